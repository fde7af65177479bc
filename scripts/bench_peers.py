"""The 32 built-in requests on this engine and on those that people use, in turns, in one run.

Every engine lives in a process and an environment of its own (``make peers``) and is loaded once.
In each round every engine runs all requests, alone, while the others wait; the first round warms up
and is not counted. Ratios compare neighbours in time.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags
from rich.console import Console
from rich.table import Table

from models.checkpoints import cache_root
from models.conversion import write_hf
from models.loading import open_model
from paged_jax_scripts import cli, workload
from paged_jax_scripts.peers.engines import PEERS, Running
from paged_jax_scripts.peers.rounds import figures_of, installed, quartiles, run_rounds

NAMES = flags.DEFINE_list("peers", [name for name in PEERS if name != "ours"], "whom to run beside")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "precisions")
ROUNDS = flags.DEFINE_integer("rounds", 15, "counted rounds", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 32, "of the 32", lower_bound=1)
SAMPLED = flags.DEFINE_bool(
    "sampled", False, "run ours sampled (0.8, top-p 0.95, half with penalties) beside ours greedy"
)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)


@contextlib.contextmanager
def loaded(names: Sequence[str], dtype: str, logs: Path) -> Iterator[list[Running]]:
    """All engines of one precision; they are ended when the block is."""
    requests = workload.load()[: NUM_REQUESTS.value]
    longest = max(len(one.prompt_token_ids) + one.max_tokens for one in requests)
    folder = _folder(dtype, logs)
    command = {
        "dtype": dtype,
        "requests": [
            {"prompt_token_ids": one.prompt_token_ids, "max_tokens": one.max_tokens}
            for one in requests
        ],
        "max_model_len": longest,
        "compilation_cache": str(cache_root(cli.CACHE_DIR.value) / "xla"),
        "unroll": cli.UNROLL.value,
    }
    engines: list[Running] = []
    try:
        for number, name in enumerate(names):
            choice = {"folder": str(folder), "sampled": SAMPLED.value and number > 0}
            engines.append(Running(name, logs / f"{number}-{name}.log", command | choice))
        yield engines
    finally:
        for engine in engines:
            engine.close()


def _folder(dtype: str, parent: Path) -> Path:
    """The model as a Hugging Face folder."""
    folder = parent / f"model-{dtype}"
    folder.mkdir()
    stored = open_model(cli.MODEL.value, cache_dir=cli.CACHE_DIR.value)
    write_hf(stored, folder, jnp.dtype(dtype), max_shard_bytes=5 * 10**9)
    return folder


def report(dtype: str, figures: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one precision's table."""
    table = Table(title=f"{dtype}, {NUM_REQUESTS.value} requests at time 0", title_justify="left")
    columns = ("engine", "tokens/s", "ours is faster by", "first token, s", "gap p50, p99, ms")
    for column in (*columns, "peak MiB", "equal"):
        table.add_column(column, no_wrap=True)
    for one in figures:
        table.add_row(
            one["name"],
            f"{one['tokens_per_second']:.1f}",
            quartiles(one["ratios"]),
            f"{one['first_token_seconds']:.2f}",
            f"{one['gap_p50'] * 1e3:.0f}, {one['gap_p99'] * 1e3:.0f}",
            f"{one['peak_mib']:,.0f}",
            f"{one['equal_requests']} of {NUM_REQUESTS.value}",
        )
    console.print(table)


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    console = Console(width=120)
    names = ["ours", *(["ours"] if SAMPLED.value else installed(NAMES.value, console))]
    results: dict[str, list[dict[str, Any]]] = {}
    for dtype in DTYPES.value:
        with (
            tempfile.TemporaryDirectory(prefix="peers-") as scratch,
            loaded(names, dtype, Path(scratch)) as engines,
        ):
            if SAMPLED.value:
                engines[1].name = "ours, sampled"
            answers = run_rounds(engines, ROUNDS.value, console)
            results[dtype] = [
                figures_of(engine.name, answers[engine.name], answers["ours"])
                | {"peak_mib": engine.peak_mib()}
                for engine in engines
            ]
        report(dtype, results[dtype], console)
    if JSON_FILE.value:
        Path(JSON_FILE.value).write_text(json.dumps(results, indent=2), encoding="utf-8")


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
