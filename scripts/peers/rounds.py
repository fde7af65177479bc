"""What is made of the engines' answers: who is here, the rounds, the figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from paged_jax_scripts.peers.engines import PEERS, Running


def installed(names: Sequence[str], console: Console) -> list[str]:
    """Those of the named peers that are here; the others are said to be missing.

    Raises:
      ValueError: a name that is no peer's.
    """
    unknown = sorted(set(names) - PEERS.keys())
    if unknown:
        raise ValueError(f"--peers={','.join(unknown)} must be among {', '.join(PEERS)}")
    for name in names:
        if not PEERS[name].is_installed:
            console.print(f"{name} is not installed ({PEERS[name].python}): make peers")
    return [name for name in names if PEERS[name].is_installed]


def quartiles(values: Sequence[float]) -> str:
    """Return ``median [first..third quartile]``."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return f"{median:.2f} [{low:.2f}..{high:.2f}]"


def run_rounds(
    engines: Sequence[Running], rounds: int, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Every engine once a round; the answers by engine, without the first round's."""
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for index in range(rounds + 1):
        for engine in engines:
            with console.status(f"round {index} of {rounds}: {engine.name}"):
                answer = engine.run()
            if index:
                answers[engine.name].append(answer)
    return answers


def figures_of(
    name: str, answers: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What is printed of an engine; ``base`` are our own answers of the same rounds."""
    tokens = [token for one in answers[0]["tokens"] for token in one]
    equal = sum(a == b for a, b in zip(answers[0]["tokens"], base[0]["tokens"], strict=True))
    gaps = np.concatenate([answer["gaps"] for answer in answers])
    return {
        "name": name,
        "tokens_per_second": statistics.median(len(tokens) / one["seconds"] for one in answers),
        "ratios": [
            theirs["seconds"] / ours["seconds"] for theirs, ours in zip(answers, base, strict=True)
        ],
        "first_token_seconds": statistics.median(
            statistics.mean(answer["first"]) for answer in answers
        ),
        "gap_p50": float(np.percentile(gaps, 50)),
        "gap_p99": float(np.percentile(gaps, 99)),
        "equal_requests": equal,
    }
