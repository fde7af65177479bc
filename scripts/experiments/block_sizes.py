"""Fig. 18: attention through block tables against dense, executed; the block size end to end."""

from __future__ import annotations

from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax_scripts.experiments.memory_use import LOADS
from paged_jax_scripts.experiments.records import Comparison, Experiment, Lines, Options, Row
from paged_jax_scripts.experiments.runs import make_job, run_all, run_job
from paged_jax_scripts.experiments.workloads import WorkloadName

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PAPER_OVERHEAD = (1.20, 1.26)  # attention's time over FasterTransformer's (section 7.1)


def run_block_sizes(options: Options) -> Experiment:
    """Time attention here, and serve the loads of Fig. 13 with each block size."""
    attention = _attention()
    cases: list[tuple[WorkloadName, float, int]] = [
        (name, rate, size) for name, rate in LOADS for size in BLOCK_SIZES
    ]
    jobs = [
        make_job(PAPER_OPT_13B, "paged", name, rate=rate, options=options, block_size=size)
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
            for name, rate in LOADS
        },
        is_log_x=True,
        is_log_y=True,
    )
    return Experiment(
        name="fig18",
        title="Attention through block tables, and the block size",
        kind="executed and simulated",
        how="Attention: OPT-13B's heads on this machine, paged over the fastest dense form; by "
        "block size at context 256. End to end: the loads of Fig. 13 on an A100-40GB, where block "
        "sizes decide how much of the last blocks is not filled; a kernel's liking is left out.",
        rows=(
            *attention,
            *(
                {
                    "workload": row["workload"],
                    "block size": row["block_size"],
                    "latency s/token": row["normalized_latency"],
                    "internal %": 100 * row["internal"],
                    "preemptions": row["preemptions"],
                }
                for row in rows
            ),
        ),
        comparisons=tuple(
            Comparison(
                what=f"paged / dense, batch {row['batch']}, context {row['context']}",
                paper=_PAPER_OVERHEAD,
                ours=row["paged / dense"],
            )
            for row in attention
            if "context" in row
        ),
        points=tuple(rows),
        panels=(panel,),
    )


def _attention() -> list[Row]:
    # Only this part needs jax.
    from paged_jax_scripts.experiments.kernel_overhead import (
        attention_rows,
        block_size_attention_rows,
    )

    rows: list[Row] = [
        {
            "batch": row["batch"],
            "context": row["context"],
            "paged ms": row["paged_ms"],
            "dense ms": row["dense_ms"],
            "paged / dense": row["ratio"],
        }
        for row in attention_rows()
    ]
    rows += [
        {"block size": row["block_size"], "paged ms": row["paged_ms"], "over 16": row["ratio"]}
        for row in block_size_attention_rows()
    ]
    return rows
