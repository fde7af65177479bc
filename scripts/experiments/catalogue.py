"""The figures by name, in the paper's order, and how some of them are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from paged_jax_scripts.experiments.block_sizes import run_block_sizes
from paged_jax_scripts.experiments.decoding import run_decoding, run_savings
from paged_jax_scripts.experiments.drawing import draw
from paged_jax_scripts.experiments.memory_use import run_batches, run_shares
from paged_jax_scripts.experiments.preemption import run_preemption
from paged_jax_scripts.experiments.prompts import run_chat, run_prefix
from paged_jax_scripts.experiments.records import Experiment, Options
from paged_jax_scripts.experiments.report import print_experiment, write_json
from paged_jax_scripts.experiments.request_rates import run_rates
from paged_jax_scripts.experiments.sensitivity import run_sensitivity

EXPERIMENTS: Mapping[str, Callable[[Options], Experiment]] = MappingProxyType(
    {
        "fig2": run_shares,
        "fig12": run_rates,
        "fig13": run_batches,
        "fig14": run_decoding,
        "fig15": run_savings,
        "fig16": run_prefix,
        "fig17": run_chat,
        "fig18": run_block_sizes,
        "fig19": run_preemption,
        "sensitivity": run_sensitivity,
    }
)


def resolve_names(names: Sequence[str]) -> list[str]:
    """The experiments that these names stand for: 'all' for each of them.

    Raises:
      ValueError: there are no names, or no such experiment.
    """
    choices = [*EXPERIMENTS, "all"]
    if not names or not set(names) <= set(choices):
        raise ValueError(f"figures={list(names)} must be some of {choices}")
    return [*EXPERIMENTS] if "all" in names else list(names)


def run_named(
    names: Sequence[str],
    options: Options,
    *,
    out: Path,
    console: Console,
    experiments: Mapping[str, Callable[[Options], Experiment]] = EXPERIMENTS,
) -> list[str]:
    """Run experiments one after the other; write ``name.json`` and ``name.png`` for each.

    One that fails does not end the run, unless it is the only one.

    Args:
      names: of the experiments.
      options: for each.
      out: folder of the files, which is made.
      console: for the tables.
      experiments: by name.

    Returns:
      The names of those that failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name in names:
        begin = time.perf_counter()
        try:
            experiment = experiments[name](options)
            print_experiment(console, experiment)
            write_json(experiment, options, out / f"{name}.json")
            if experiment.panels:
                draw(experiment, out / f"{name}.png")
        except Exception:
            if len(names) == 1:
                raise
            console.print_exception()
            failed.append(name)
        console.print(f"{name}: {time.perf_counter() - begin:.0f} s")
    return failed
