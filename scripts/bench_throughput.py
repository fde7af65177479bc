"""The 32 built-in requests through the engine: tokens/s, time to first token, memory, waste, time.

Each precision runs in a process of its own, so that its peak memory is its own. Runs are repeated
and medians printed; the first run compiles and is not counted.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, EngineConfig, SamplingParams, count_compilations
from paged_jax_scripts import cli, workload

DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "precisions to run")
RUNS = flags.DEFINE_integer("runs", 3, "counted runs", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 32, "of the 32", lower_bound=1)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
SAMPLED = flags.DEFINE_bool("sampled", False, "temperature 0.8, top-p 0.95 instead of greedy")
EVENT_LOG = flags.DEFINE_string("event_log", None, "write the event record there, and time it")
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)


def measure(
    dtype: str,
    *,
    runs: int,
    num_requests: int,
    block_size: int,
    sampled: bool,
    unroll: bool,
    cache_dir: Any,
    event_log: str | None = None,
) -> dict[str, float]:
    """Run the workload in this process; return the figures, medians where there are several."""
    import models

    cli.enable_compilation_cache(cache_dir)
    model = models.load_model(dtype=dtype, cache_dir=cache_dir, progress=False, unroll=unroll)
    requests = workload.load()[:num_requests]
    prompts = [request.prompt_token_ids for request in requests]
    choice: dict[str, Any] = (
        {"temperature": 0.8, "top_p": 0.95, "seed": 1} if sampled else {"temperature": 0.0}
    )
    params = [
        SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, **choice)
        for request in requests
    ]
    with count_compilations() as compiled:
        # The same prompts come again and again, and each time they are to be computed.
        config = EngineConfig(
            block_size=block_size, kv_dtype=dtype, prefix_cache=False, event_log=event_log
        )
        engine = Engine(model, config=config)
        begin = time.perf_counter()
        engine.generate(prompts, params)
        first_seconds = time.perf_counter() - begin
    timed: list[dict[str, float]] = []
    with count_compilations() as recompiled:
        for _ in range(runs):
            engine.stats.reset()
            log_seconds = engine.event_log.seconds if engine.event_log else 0.0
            begin = time.perf_counter()
            outputs = engine.generate(prompts, params)
            seconds = time.perf_counter() - begin
            waits = [(out.first_token_time or 0.0) - out.arrival_time for out in outputs]
            timed.append(
                {
                    "tokens_per_second": sum(len(out.token_ids) for out in outputs) / seconds,
                    "mean_first_token_seconds": statistics.mean(waits),
                    "last_first_token_seconds": max(waits),
                    "scheduling_share": engine.stats.schedule_seconds / seconds,
                    "packing_share": engine.stats.pack_seconds / seconds,
                }
            )
            if engine.event_log:
                log_seconds = engine.event_log.seconds - log_seconds
                timed[-1]["event_log_share"] = log_seconds / seconds
    stats = engine.stats
    figures = {name: statistics.median(run[name] for run in timed) for name in timed[0]}
    return figures | {
        "padding_share": stats.padding_share,
        "block_utilisation": stats.block_utilisation,
        "peak_kv_mib": stats.peak_used_blocks * engine.executor.pool.block_nbytes / 2**20,
        "peak_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "steps": stats.num_steps,
        "compilations": compiled.count,
        "compilations_later": recompiled.count,
        "first_run_seconds": first_seconds,
    }


def _in_child(arguments: tuple[str, dict[str, Any]]) -> dict[str, float]:
    dtype, options = arguments
    return measure(dtype, **options)


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    options = {
        "runs": RUNS.value,
        "num_requests": NUM_REQUESTS.value,
        "block_size": BLOCK_SIZE.value,
        "sampled": SAMPLED.value,
        "unroll": cli.UNROLL.value,
        "cache_dir": cli.CACHE_DIR.value,
        "event_log": EVENT_LOG.value,
    }
    console = Console()
    results: dict[str, dict[str, float]] = {}
    for dtype in DTYPES.value:
        with (
            console.status(f"{dtype}: one run to compile, {RUNS.value} counted"),
            multiprocessing.get_context("spawn").Pool(1) as pool,
        ):
            results[dtype] = pool.map(_in_child, [(dtype, options)])[0]
    table = Table(title=f"{NUM_REQUESTS.value} requests, all at time 0", title_justify="left")
    table.add_column("")
    for dtype in results:
        table.add_column(dtype, justify="right")
    for name in next(iter(results.values())):
        cells = [_cell(name, figures[name]) for figures in results.values()]
        table.add_row(name.replace("_", " "), *cells)
    console.print(table)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


def _cell(name: str, value: float) -> str:
    if name.endswith("share") or name == "block_utilisation":
        return f"{value:.2%}"
    return f"{value:,.0f}" if isinstance(value, int) else f"{value:,.2f}"


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
