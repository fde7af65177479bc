"""Fig. 18b: latency by block size, which decides how much of the last blocks is not filled."""

from __future__ import annotations

from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax_scripts.experiments.memory_use import ALPACA_RATE, SHAREGPT_RATE
from paged_jax_scripts.experiments.records import Lines, Options, Row
from paged_jax_scripts.experiments.runs import Job, run_all, run_job
from paged_jax_scripts.experiments.workloads import Workload, WorkloadName

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LOADS: tuple[tuple[WorkloadName, float], ...] = (
    ("sharegpt", SHAREGPT_RATE),
    ("alpaca", ALPACA_RATE),
)


def run_block_sizes(options: Options) -> tuple[list[Row], Lines]:
    """Serve the loads of Fig. 13 with each block size, OPT-13B on one A100-40GB.

    Returns:
      A row a load and size, and the panel of their latencies.
    """
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
        title="end to end, simulated",
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
    return rows, panel
