"""Swapping against recomputing one sequence at several block sizes (the paper's Fig. 19).

Both are timed alone, medians of several runs: a sequence's blocks to the host pool and back, and
its tokens through prefill. The first run compiles and is not counted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, EngineConfig, Model, SamplingParams
from paged_jax.blocks.block_manager import BlockSwap
from paged_jax_scripts import cli

BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["1", "4", "16", "64"], "token positions a block")
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 512, "of the sequence", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 5, "counted runs", lower_bound=1)
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "most sequences in a step", lower_bound=1)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)


def measure(
    model: Model, *, block_size: int, num_tokens: int, runs: int, max_num_seqs: int
) -> dict[str, float]:
    """Seconds to swap a sequence out, in, and to recompute it; medians."""
    num_blocks = -(-num_tokens // block_size)
    engine = Engine(
        model,
        config=EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks + 2,
            max_num_seqs=max_num_seqs,
            kv_dtype=cli.DTYPE.value,
            preemption="swap",
        ),
    )
    executor, host = engine.executor, engine.executor.host_pool
    assert host is not None
    prompt = np.random.default_rng(0).integers(0, model.spec.vocab_size, num_tokens).tolist()
    swaps = [BlockSwap(block, block) for block in range(1, num_blocks + 1)]
    seconds: dict[str, list[float]] = {"recompute": [], "out": [], "in": []}
    for _ in range(runs + 1):
        begin = time.perf_counter()
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        seconds["recompute"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        host.store(executor.pool, swaps)
        host.settle()
        seconds["out"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        executor.pool = jax.block_until_ready(host.load(executor.pool, swaps))
        seconds["in"].append(time.perf_counter() - begin)
    medians = {f"{name}_seconds": statistics.median(times[1:]) for name, times in seconds.items()}
    swap_seconds = medians["out_seconds"] + medians["in_seconds"]
    return medians | {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "mib": num_blocks * executor.pool.block_nbytes / 2**20,
        "swap_seconds": swap_seconds,
        "recompute_over_swap": medians["recompute_seconds"] / swap_seconds,
    }


def main(argv: Sequence[str]) -> None:
    """Measure and print a row a block size."""
    del argv
    model = cli.load_model()
    figures = [
        measure(
            model,
            block_size=int(block_size),
            num_tokens=NUM_TOKENS.value,
            runs=RUNS.value,
            max_num_seqs=MAX_NUM_SEQS.value,
        )
        for block_size in BLOCK_SIZES.value
    ]
    columns = {
        "block size": "block_size", "blocks": "num_blocks", "MiB": "mib", "out s": "out_seconds",
        "in s": "in_seconds", "recompute s": "recompute_seconds",
        "recompute / swap": "recompute_over_swap",
    }  # fmt: skip
    table = Table(*columns, title=f"{model.name}, {NUM_TOKENS.value} tokens")
    for row in figures:
        table.add_row(*(f"{row[name]:.4g}" for name in columns.values()))
    Console().print(table)
    if JSON_FILE.value:
        Path(JSON_FILE.value).write_text(json.dumps(figures, indent=1), encoding="utf-8")


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
