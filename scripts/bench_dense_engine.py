"""The paged engine against the dense engine on the same requests: tokens/s and cache memory.

All are compared in turns, in one process: the dense engine, the paged one with as many rows, and
the paged one with as many bytes, which may run more rows. The dense rows are as long as the longest
request, which a server would have to know beforehand: with --max_model_len they are longer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, EngineConfig, Model
from paged_jax.baselines import DenseEngine
from paged_jax.pool import bytes_per_block
from paged_jax_scripts import cli, workload
from paged_jax_scripts.engine_comparison import Contender, run_in_turns

RUNS = flags.DEFINE_integer("runs", 3, "counted runs, after one that compiles", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 32, "of the 32 built-in ones", lower_bound=1)
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "rows of the dense cache", lower_bound=1)
PAGED_MAX_NUM_SEQS = flags.DEFINE_integer(
    "paged_max_num_seqs", 32, "most rows of the paged engine at equal memory", lower_bound=1
)
MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, "positions of a dense row; None: what the longest request needs"
)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "token positions a block", lower_bound=1)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)

DENSE, SAME_ROWS, SAME_BYTES = "dense", "paged, as many rows", "paged, as many bytes"


def make_contenders(
    model: Model,
    requests: Sequence[workload.Request],
    *,
    dtype: str,
    max_num_seqs: int,
    paged_max_num_seqs: int,
    max_model_len: int | None,
    block_size: int,
) -> dict[str, Contender]:
    """The dense engine and two paged ones, whose pools have the bytes of the dense cache.

    Raises:
      ValueError: the pools, whose null block counts, would not hold the longest request.
    """
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    length = longest if max_model_len is None else max_model_len
    dense = DenseEngine(model, max_num_seqs=max_num_seqs, max_model_len=length, dtype=dtype)
    block_nbytes = bytes_per_block(model.spec, block_size=block_size, dtype=dtype)
    num_slots = (dense.nbytes // block_nbytes - 1) * block_size
    if num_slots < longest:
        raise ValueError(
            f"max_num_seqs={max_num_seqs} rows of {length} positions make a pool of {num_slots} "
            f"slots, which must hold the longest request's {longest}"
        )

    def paged(max_num_seqs: int) -> Engine:
        config = EngineConfig(
            block_size=block_size,
            num_blocks=dense.nbytes // block_nbytes,
            kv_dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            prefix_cache=False,  # the same prompts come again and again
        )
        return Engine(model, config=config)

    engines = {DENSE: dense, SAME_ROWS: paged(max_num_seqs), SAME_BYTES: paged(paged_max_num_seqs)}
    return {name: Contender(engine) for name, engine in engines.items()}


def figures_of(contenders: dict[str, Contender]) -> list[dict[str, float | str]]:
    """A row for each: its speed, that of the dense engine being 1 in each run, and its memory."""
    dense = contenders[DENSE]
    rows: list[dict[str, float | str]] = []
    for name, contender in contenders.items():
        pool, stats = contender.engine.executor.pool, contender.engine.stats
        pairs = zip(dense.seconds, contender.seconds, strict=True)
        speeds = sorted(theirs / own for theirs, own in pairs)
        num_tokens = sum(map(len, contender.token_ids))
        same = zip(contender.token_ids, dense.token_ids, strict=True)
        rows.append(
            {
                "engine": name,
                "tokens_per_second": num_tokens / statistics.median(contender.seconds),
                "speed": statistics.median(speeds),
                "least_speed": speeds[0],
                "most_speed": speeds[-1],
                "peak_rows": contender.peak_rows,
                "cache_mib": pool.nbytes / 2**20,
                "peak_used_mib": stats.peak_used_blocks * pool.block_nbytes / 2**20,
                "preemptions": stats.num_preemptions / len(contender.seconds),
                "equal_requests": sum(own == theirs for own, theirs in same),
            }
        )
    return rows


def load_requests(model: Model) -> list[workload.Request]:
    """The built-in requests, cut to fit a small model's vocabulary and context."""
    spec, requests = model.spec, []
    for request in workload.load()[: NUM_REQUESTS.value]:
        room = spec.max_position - request.max_tokens
        prompt = [token % spec.vocab_size for token in request.prompt_token_ids[:room]]
        requests.append(workload.Request(prompt, request.max_tokens))
    return requests


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    model = cli.load_model()
    requests = load_requests(model)
    contenders = make_contenders(
        model,
        requests,
        dtype=cli.DTYPE.value,
        max_num_seqs=MAX_NUM_SEQS.value,
        paged_max_num_seqs=PAGED_MAX_NUM_SEQS.value,
        max_model_len=MAX_MODEL_LEN.value,
        block_size=BLOCK_SIZE.value,
    )
    run_in_turns(contenders, requests, runs=RUNS.value)
    rows = figures_of(contenders)
    length = contenders[DENSE].engine.max_model_len
    title = f"{len(requests)} requests, dense rows of {length} positions, {RUNS.value} runs"
    table = Table("", *(str(row["engine"]) for row in rows), title=title, title_justify="left")
    for name in list(rows[0])[1:]:
        table.add_row(name.replace("_", " "), *(f"{row[name]:,.2f}" for row in rows))
    Console().print(table)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
