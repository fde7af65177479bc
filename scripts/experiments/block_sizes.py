"""Fig. 18b: latency by block size, which decides how much of the last blocks is not filled."""

from __future__ import annotations

from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax_scripts.experiments.memory_use import ALPACA_RATE, SHAREGPT_RATE
from paged_jax_scripts.experiments.records import Experiment, Lines, Options
from paged_jax_scripts.experiments.runs import Job, run_all, run_job
from paged_jax_scripts.experiments.workloads import Workload, WorkloadName

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LOADS: tuple[tuple[WorkloadName, float], ...] = (
    ("sharegpt", SHAREGPT_RATE),
    ("alpaca", ALPACA_RATE),
)


def run_block_sizes(options: Options) -> Experiment:
    """Serve the loads of Fig. 13 with each block size, OPT-13B on one A100-40GB."""
    cases = [(name, rate, size) for name, rate in _LOADS for size in BLOCK_SIZES]
    jobs = [
        Job(
            server=PAPER_OPT_13B,
            policy="paged",
            workload=Workload(name=name, rate=rate, minutes=options.minutes, seed=options.seed),
            assumptions=options.assumptions,
            settings=(("block_size", size),),
        )
        for name, rate, size in cases
    ]
    rows = run_all(run_job, jobs, num_processes=options.num_processes)
    panel = Lines(
        title="end to end",
        x_label="block size",
        y_label="s / output token",
        series={
            f"{name}, {rate:g} requests/s": [
                (row["block_size"], row["normalized_latency"])
                for row in rows
                if row["workload"] == name
            ]
            for name, rate in _LOADS
        },
        is_log_x=True,
        is_log_y=True,
    )
    return Experiment(
        name="fig18",
        title="Block sizes, OPT-13B on one A100-40GB",
        kind="simulated",
        how="The loads of Fig. 13. Block sizes decide how much of the last blocks is not filled; "
        "that a kernel likes some sizes better is not in the cost model.",
        rows=tuple(
            {
                "workload": row["workload"],
                "block size": row["block_size"],
                "latency s/token": row["normalized_latency"],
                "internal %": 100 * row["internal"],
                "preemptions": row["preemptions"],
            }
            for row in rows
        ),
        points=tuple(rows),
        panels=(panel,),
    )
