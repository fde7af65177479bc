"""Speculative decoding by prompt lookup against one token a step, interleaved in one process.

Two kinds of text: lists and code that the prompt holds already (``copy``), and the built-in chat
requests (``prose``). Every run of every engine is the same greedy requests, so ratios can be read
on a noisy machine: medians over the runs, after one that compiles. ``waits only`` never drafts: it
is what giving up the one step in flight costs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from paged_jax import Engine, EngineConfig, Model, NgramSpeculation, SamplingParams
from paged_jax_scripts import cli, workload

DRAFTS = flags.DEFINE_list("drafts", ["2", "4", "8"], "draft tokens a row, to compare")
BATCHES = flags.DEFINE_list("batches", ["1", "8"], "requests at once")
RUNS = flags.DEFINE_integer("runs", 3, "counted runs", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "tokens a request", lower_bound=2)
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
flags.adopt_module_key_flags(cli)

NEVER = NgramSpeculation(min_ngram_len=10**6, max_ngram_len=10**6)


def measure(
    model: Model, prompts: Sequence[str] | Sequence[list[int]], *, runs: int, max_tokens: int,
    drafts: Sequence[int],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Run the prompts through every engine, in turn.

    Returns:
      By engine: tokens/s, how much faster than without speculation, and the share of the drafted
      tokens that was accepted.
    """
    kinds = {"plain": None, "waits only": NEVER}
    kinds |= {f"k = {count}": NgramSpeculation(num_draft_tokens=count) for count in drafts}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    size = len(prompts)
    engines = {
        name: Engine(
            model,
            config=EngineConfig(max_num_seqs=size, max_model_len=512, speculation=speculation),
        )
        for name, speculation in kinds.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(runs + 1):
        for name, engine in engines.items():
            engine.stats.reset()
            begin = time.perf_counter()
            engine.generate(prompts, params)
            if run:
                seconds[name].append(time.perf_counter() - begin)
    return {
        name: {
            "tokens_per_second": size * max_tokens / statistics.median(seconds[name]),
            "speedup": statistics.median(
                plain / mine for plain, mine in zip(seconds["plain"], seconds[name], strict=True)
            ),
            "acceptance_rate": engine.stats.acceptance_rate,
            "steps": engine.stats.num_steps,
        }
        for name, engine in engines.items()
    }


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    model = cli.load_model(progress=False)
    console, results = Console(), {}
    table = Table(title=f"{model.name}, {MAX_TOKENS.value} tokens a request", title_justify="left")
    for name in ("text", "batch", "engine", "tokens/s", "speedup", "accepted", "steps"):
        table.add_column(name, justify="left" if name in ("text", "engine") else "right")
    for kind, make_prompts in (
        ("copy", workload.copying_prompts),
        ("prose", workload.prose_prompts),
    ):
        for batch in map(int, BATCHES.value):
            figures = measure(
                model,
                make_prompts(batch),
                runs=RUNS.value,
                max_tokens=MAX_TOKENS.value,
                drafts=[int(count) for count in DRAFTS.value],
            )
            results[f"{kind}, batch {batch}"] = figures
            for name, one in figures.items():
                table.add_row(
                    kind,
                    f"{batch}",
                    name,
                    f"{one['tokens_per_second']:.1f}",
                    f"{one['speedup']:.2f}",
                    f"{one['acceptance_rate']:.0%}",
                    f"{one['steps']}",
                )
    console.print(table)
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
