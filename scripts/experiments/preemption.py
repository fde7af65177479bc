"""Fig. 19: swapping against recomputation, by block size."""

from __future__ import annotations

from typing import Any

from paged_jax.simulation.assumptions import CostConstants
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax_scripts.experiments.records import Comparison, Experiment, Lines, Options, Row
from paged_jax_scripts.experiments.runs import Job, make_job, run_all, run_job

BLOCK_SIZES = (1, 4, 16, 64, 256)
_NUM_TOKENS = 256  # of the sequence that is moved, or computed again
_NUM_RUNS = 3
_RATE = 2.5  # requests a second; too many for the pool, so that some are preempted
_PAPER_MOST = 1.2  # recomputation's time in swapping's, at any block size (section 7.3)


def model_row(block_size: int, num_tokens: int, constants: CostConstants) -> Row:
    """What the cost model says of moving or computing one sequence, OPT-13B on one A100.

    Args:
      block_size: token positions a block.
      num_tokens: of the sequence.
      constants: of the cost model.
    """
    model = CostModel(PAPER_OPT_13B, constants)
    num_blocks = -(-num_tokens // block_size)
    moves = model.step_time([], num_sampled=0, num_swapped_blocks=num_blocks, block_size=block_size)
    computed = model.step_time([RowWork(num_tokens, num_tokens)], num_sampled=0)
    return _row("simulated", block_size, 2 * moves.moves, computed.dense + computed.attention)


def run_preemption(options: Options) -> Experiment:
    """Fig. 19: each alone, on the engine and by the cost model, and end to end."""
    executed = [] if options.model is None else _measure(options.model)
    constants = options.assumptions.cost
    modelled = [model_row(size, _NUM_TOKENS, constants) for size in BLOCK_SIZES]
    cases = [(mode, size) for mode in ("recompute", "swap") for size in BLOCK_SIZES]
    jobs = [_job(mode, size, options) for mode, size in cases]
    served = run_all(run_job, jobs, num_processes=options.num_processes)
    panels = [
        _panel(f"one sequence, {kind}", "s", rows)
        for kind, rows in (("executed", executed), ("simulated", modelled))
        if rows
    ]
    latencies = Lines(
        title=f"end to end, {_RATE:g} requests/s, simulated",
        x_label="block size",
        y_label="s / output token",
        series={
            mode: [
                (size, row["normalized_latency"])
                for (its, size), row in zip(cases, served, strict=True)
                if its == mode
            ]
            for mode in ("recompute", "swap")
        },
        is_log_x=True,
    )
    worst = max(row["recompute / swap"] for row in modelled)
    smallest, largest = modelled[0]["recompute / swap"], modelled[-1]["recompute / swap"]
    return Experiment(
        name="fig19",
        title="Swapping against recomputation",
        kind="executed and simulated" if executed else "simulated",
        how=f"One sequence of {_NUM_TOKENS} tokens, out and in again or computed again: executed "
        "on this machine, where host and device may be one, and by the cost model of OPT-13B on "
        "an A100-40GB; then the latter end to end, ShareGPT.",
        rows=(*executed, *modelled, *map(_served_row, served)),
        points=tuple(served),
        comparisons=(
            Comparison(
                what="recompute / swap, cost model, largest", paper=(0, _PAPER_MOST), ours=worst
            ),
            Comparison(
                what="recompute / swap, blocks of 1 over blocks of 256", paper=(0, 1),
                ours=smallest / largest,
            ),
        ),
        panels=(*panels, latencies),
    )  # fmt: skip


def _measure(name: str) -> list[Row]:
    # Only this part needs jax.
    from models import load_model
    from paged_jax_scripts.preemption_timing import measure

    model = load_model(name)
    rows = []
    for size in BLOCK_SIZES:
        found = measure(
            model, block_size=size, num_tokens=_NUM_TOKENS, runs=_NUM_RUNS, max_num_seqs=8
        )
        rows.append(_row("executed", size, found["swap_seconds"], found["recompute_seconds"]))
    return rows


def _job(mode: str, block_size: int, options: Options) -> Job:
    settings: dict[str, Any] = {"block_size": block_size, "preemption": mode}
    if mode == "swap":
        settings["num_host_blocks"] = PAPER_OPT_13B.num_blocks(block_size)
    return make_job(PAPER_OPT_13B, "paged", "sharegpt", rate=_RATE, options=options, **settings)


def _row(kind: str, block_size: int, swap: float, recompute: float) -> Row:
    row: Row = {"kind": kind, "block size": block_size, "swap s": swap, "recompute s": recompute}
    return row | {"recompute / swap": recompute / swap}


def _served_row(row: Row) -> Row:
    return {
        "kind": f"end to end, {row['preemption']}",
        "block size": row["block_size"],
        "latency s/token": row["normalized_latency"],
        "preemptions": row["preemptions"],
    }


def _panel(title: str, unit: str, rows: list[Row]) -> Lines:
    return Lines(
        title=title,
        x_label="block size",
        y_label=unit,
        series={
            name: [(row["block size"], row[f"{name} s"]) for row in rows]
            for name in ("swap", "recompute")
        },
        is_log_x=True,
        is_log_y=True,
    )
