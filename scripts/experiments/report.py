"""Prints an experiment's tables, and writes its JSON file and picture."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_jax_scripts.experiments.records import Comparison, Experiment, Options, Row

_PACKAGES = ("paged-jax", "jax", "numpy", "matplotlib")


def print_experiment(console: Console, experiment: Experiment) -> None:
    """Print rows, and the comparisons with the paper's figures beside ours."""
    console.print(f"\n[bold]{experiment.name}: {experiment.title}[/] ({experiment.kind})")
    console.print(experiment.how)
    for _, rows in itertools.groupby(experiment.rows, key=tuple):
        console.print(rows_table(list(rows)))
    if experiment.comparisons:
        console.print(comparison_table(experiment.comparisons))


def rows_table(rows: Sequence[Row]) -> Table:
    """All rows; their columns are the keys in order of first use."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table()
    for name in columns:
        numbers = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """The paper's figures, ours, the difference and what to think of it."""
    table = Table()
    for name in ("compared", "paper", "ours", "difference", "verdict"):
        justify = "left" if name in ("compared", "verdict") else "right"
        table.add_column(name, justify=justify)
    for one in comparisons:
        low, high = one.paper
        paper = f"{low:g}{one.unit}" if low == high else f"{low:g} to {high:g}{one.unit}"
        difference = (
            f"{one.difference:+.1f} points" if one.in_points else f"{100 * one.difference:+.0f} %"
        )
        table.add_row(one.what, paper, f"{one.ours:.3g}{one.unit}", difference, one.verdict)
    return table


def write_json(experiment: Experiment, options: Options, path: Path) -> None:
    """Write everything of a run to one file: results, how they came about, and on what machine."""
    record: dict[str, Any] = {
        "name": experiment.name,
        "title": experiment.title,
        "kind": experiment.kind,
        "how": experiment.how,
        "command": ["python", Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": machine(),
        "versions": versions(),
        "options": {"minutes": options.minutes, "seed": options.seed, "model": options.model},
        "assumptions": options.assumptions.values,
        "comparisons": [
            dataclasses.asdict(one) | {"difference": one.difference, "verdict": one.verdict}
            for one in experiment.comparisons
        ],
        "rows": experiment.rows,
        "points": experiment.points,
    }
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def machine() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of the packages that matter, where they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
