"""Swapping against recomputing one sequence at several block sizes (the paper's Fig. 19).

Both are timed alone, medians of several runs: a sequence's blocks to the host pool and back, and
its tokens through prefill. The first run compiles and is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax_scripts import cli
from paged_jax_scripts.preemption_timing import measure

BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["1", "4", "16", "64"], "token positions a block")
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 512, "of the sequence", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 5, "counted runs", lower_bound=1)
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "most sequences in a step", lower_bound=1)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)


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
            kv_dtype=cli.DTYPE.value,
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
