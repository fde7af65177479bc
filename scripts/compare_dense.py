"""The same prompts, paged and dense, in one run: whether they are equal, and what each costs.

``paged_jax.compare`` on a model of models/ and a static batch over a dense cache; for a model of
another zoo and that zoo's own cache, call it with ``baseline=`` (docs/integrations_zoos.md).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Comparison, Model, compare
from paged_jax.comparison import NEAR_TIE
from paged_jax_scripts import cli, workload

PROMPTS = flags.DEFINE_multi_string("prompt", [], "a prompt; none: built-in requests")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens a prompt", lower_bound=1)
NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", 8, "of the 32 built-in ones (8: about a minute on 2 cores)", lower_bound=1
)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
cli.define_engine_flags()
flags.adopt_module_key_flags(cli)


def print_comparison(console: Console, result: Comparison) -> None:
    """Print a table with paged and dense side by side."""
    table = Table(title="paged against dense, same prompts, same run", title_justify="left")
    for heading in ("", "paged", "dense"):
        table.add_column(heading)

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:,.1f} MiB"

    table.add_row("requests", str(result.num_requests), str(result.num_requests))
    table.add_row("KV memory", f"{mib(result.paged_bytes)} (peak)", mib(result.dense_bytes))
    table.add_row("  longest context reserved", "", mib(result.dense_max_bytes))
    table.add_row("seconds", f"{result.paged_seconds:.2f}", f"{result.dense_seconds:.2f}")
    rates = [result.num_tokens / s for s in (result.paged_seconds, result.dense_seconds)]
    table.add_row("wanted tokens/s", *(f"{rate:.1f}" for rate in rates))
    console.print(table)
    console.print(
        f"Equal tokens: {result.num_equal} of {result.num_requests} requests. "
        f"Largest logit difference: {result.max_logit_difference:.2e}. "
        f"Dense holds {result.dense_bytes / result.paged_bytes:.1f} times the paged memory "
        f"({result.dense_max_bytes / result.paged_bytes:.0f} times with the longest context), "
        f"and takes {result.dense_seconds / result.paged_seconds:.2f} times as long."
    )
    for index, step, margin in result.near_ties:
        verdict = "a near tie" if margin < NEAR_TIE else "NOT a near tie"
        console.print(
            f"Request {index} parts at step {step}: top-two margin {margin:.2e}, {verdict}."
        )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _requests(model: Model) -> list[workload.Request]:
    if not PROMPTS.value:
        return workload.load()[: NUM_REQUESTS.value]
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, so --prompt cannot be used")
    encode = model.tokenizer.encode
    return [workload.Request(encode(prompt), MAX_TOKENS.value) for prompt in PROMPTS.value]


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags; exit 1 when tokens differ other than after a near tie."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}: prompts go into --prompt")
    console = Console()
    model = cli.load_model()
    engine = cli.make_engine(model)
    requests = _requests(model)
    result = compare(
        model,
        [request.prompt_token_ids for request in requests],
        max_tokens=[request.max_tokens for request in requests],
        engine=engine,
        report=_report,
    )
    print_comparison(console, result)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(result), file, indent=2)
    if engine.config.kv_dtype == "float32" and not result.is_equal:
        sys.exit(1)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
