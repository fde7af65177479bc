"""Fig. 2: what the KV pool's memory holds, and Fig. 13: how many requests then run together."""

from __future__ import annotations

from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax.simulation.simulator import Policy
from paged_jax_scripts.experiments.records import Bars, Comparison, Experiment, Options, Row
from paged_jax_scripts.experiments.runs import POLICY_NAMES, Job, make_job, run_all, run_job
from paged_jax_scripts.experiments.workloads import WorkloadName

ORCAS: tuple[Policy, ...] = ("orca_max", "orca_pow2", "orca_oracle")
POLICIES: tuple[Policy, ...] = (*ORCAS, "paged")
SHAREGPT_RATE, ALPACA_RATE = 2.0, 30.0  # requests a second, the paper's Fig. 13
LOADS: tuple[tuple[WorkloadName, float], ...] = (
    ("sharegpt", SHAREGPT_RATE),
    ("alpaca", ALPACA_RATE),
)
_SATURATING_RATE = 4.0  # requests a second; the queue never empties, whatever the policy

# Percent of KV memory: token states, reserved, internal, external fragmentation and others.
_PAPER_SHARES: dict[str, tuple[float, float, float, float]] = {
    "orca_max": (20.4, 13.3, 57.3, 8.9),
    "orca_pow2": (26.8, 17.9, 13.6, 41.6),
    "orca_oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, 0.0, 0.0, 3.7),
}
_CATEGORIES = ("token states", "reserved", "internal", "external and others")
_SHARES_MARGIN = 8.0  # points
_BATCH_MARGIN = 0.25
PAPER_BATCHES: dict[str, tuple[float, ...]] = {
    "sharegpt": (7.00, 9.81, 13.62, 30.42),
    "alpaca": (7.00, 43.24, 72.75, 132.44),
}


def job(policy: Policy, workload: WorkloadName, rate: float, options: Options) -> Job:
    """OPT-13B on one A100 with 40 GB, under a policy."""
    return make_job(PAPER_OPT_13B, policy, workload, rate=rate, options=options)


def shares_of(row: Row) -> tuple[float, float, float, float]:
    """Percent in the paper's four categories, of the whole pool; of what is taken, if paged.

    What of a reserved pool is free is too small for the next request, so it counts as 'others'. A
    paged pool's free blocks are anybody's: they are left out, as the paper's figure says 96.3 %.
    """
    if row["policy"] == "paged":
        taken = 1 - row["free"]
        parts = (row["filled"], row["reserved"], row["internal"], row["external"])
        return tuple(100 * part / taken if taken else 0.0 for part in parts)  # type: ignore
    parts = (row["filled"], row["reserved"], row["internal"], row["external"] + row["free"])
    return tuple(100 * part for part in parts)  # type: ignore


def run_shares(options: Options) -> Experiment:
    """Fig. 2: shares of the pool by what they hold, on ShareGPT's lengths."""
    jobs = [job(policy, "sharegpt", SHAREGPT_RATE, options) for policy in POLICIES]
    jobs.append(job("paged", "sharegpt", _SATURATING_RATE, options))
    *rows, saturated = run_all(run_job, jobs, num_processes=options.num_processes)
    comparisons: list[Comparison] = []
    groups: list[str] = []
    heights: list[tuple[float, ...]] = []
    for row in rows:
        name, ours = POLICY_NAMES[row["policy"]], shares_of(row)
        paper = _PAPER_SHARES[row["policy"]]
        groups += [f"{name}\nours", f"{name}\npaper"]
        heights += [ours, paper]
        for category, theirs, our in zip(_CATEGORIES, paper, ours, strict=True):
            # The paper's bar of a paged pool has token states and others only.
            if row["policy"] != "paged" or category == "token states":
                comparisons.append(_share(f"{name}, {category}", theirs, our))
    whole = 100 * saturated["filled"]
    printed = [
        {"policy": POLICY_NAMES[row["policy"]], "requests/s": row["rate"]}
        | dict(zip((f"{name} %" for name in _CATEGORIES), shares_of(row), strict=True))
        | {"free %": 100 * row["free"], "served/s": row["requests_per_second"]}
        for row in (*rows, saturated)
    ]
    comparisons.append(_share("paged, token states of the whole pool, saturated", 96.3, whole))
    return Experiment(
        name="fig2",
        title="What KV memory holds, OPT-13B on one A100-40GB, ShareGPT",
        kind="simulated",
        how=f"{SHAREGPT_RATE:g} requests a second, where the reserving policies' queues never "
        "empty; averages over time. Of the whole pool; paged: of the blocks in use, and of the "
        f"whole pool at {_SATURATING_RATE:g} requests a second, which are more than it can serve.",
        rows=tuple(printed),
        points=(*rows, saturated),
        comparisons=tuple(comparisons),
        panels=(
            Bars(
                title="Shares of KV memory",
                y_label="%",
                groups=tuple(groups),
                series=dict(zip(_CATEGORIES, zip(*heights, strict=True), strict=True)),
                is_stacked=True,
            ),
        ),
    )


def run_batches(options: Options) -> Experiment:
    """Fig. 13: mean number of requests in a step."""
    jobs = [job(policy, name, rate, options) for name, rate in LOADS for policy in POLICIES]
    rows = run_all(run_job, jobs, num_processes=options.num_processes)
    batches = {(row["workload"], row["policy"]): row["batched_requests"] for row in rows}
    comparisons: list[Comparison] = []
    panels: list[Bars] = []
    for name, rate in LOADS:
        paper = PAPER_BATCHES[name]
        ours = tuple(batches[name, policy] for policy in POLICIES)
        comparisons += [
            Comparison(
                what=f"{name}, {rate:g} requests/s, {POLICY_NAMES[policy]}",
                paper=(theirs, theirs),
                ours=our,
                margin=_BATCH_MARGIN,
            )
            for policy, theirs, our in zip(POLICIES, paper, ours, strict=True)
        ]
        panels.append(
            Bars(
                title=f"{name}, {rate:g} requests/s",
                y_label="requests in a step",
                groups=tuple(POLICY_NAMES[policy] for policy in POLICIES),
                series={"ours": ours, "paper": paper},
            )
        )
    for policy, paper in (("orca_oracle", 2.2), ("orca_max", 4.3)):
        ratio = batches["sharegpt", "paged"] / batches["sharegpt", policy]
        what = f"sharegpt, paged / {POLICY_NAMES[policy]}"
        comparisons.append(Comparison(what=what, paper=(paper, paper), ours=ratio))
    return Experiment(
        name="fig13",
        title="Batched requests, OPT-13B on one A100-40GB",
        kind="simulated",
        how="Requests computed in a step, averaged over time.",
        rows=tuple(
            {
                "workload": row["workload"],
                "policy": POLICY_NAMES[row["policy"]],
                "requests/s": row["rate"],
                "served/s": row["requests_per_second"],
                "batched": row["batched_requests"],
                "preemptions": row["preemptions"],
            }
            for row in rows
        ),
        points=tuple(rows),
        comparisons=tuple(comparisons),
        panels=tuple(panels),
    )


def _share(what: str, paper: float, ours: float) -> Comparison:
    return Comparison(
        what=what,
        paper=(paper, paper),
        ours=ours,
        margin=_SHARES_MARGIN,
        unit=" %",
        in_points=True,
    )
