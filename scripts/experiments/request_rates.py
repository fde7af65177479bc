"""Fig. 12: normalized latency against request rate, and the rates that policies sustain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paged_jax.simulation.machines import (
    PAPER_OPT_13B,
    PAPER_OPT_66B,
    PAPER_OPT_175B,
    Server,
)
from paged_jax.simulation.simulator import Policy
from paged_jax_scripts.experiments.records import Comparison, Experiment, Lines, Options, Row
from paged_jax_scripts.experiments.runs import (
    POLICY_NAMES,
    Job,
    Search,
    Sustained,
    make_job,
    run_all,
    sustained_rate,
)
from paged_jax_scripts.experiments.workloads import WorkloadName

# Those that batch at the level of steps; the other one runs whole batches.
CONTINUOUS_POLICIES: tuple[Policy, ...] = ("paged", "orca_oracle", "orca_pow2", "orca_max")
POLICIES: tuple[Policy, ...] = (*CONTINUOUS_POLICIES, "static")
_DATASETS: tuple[WorkloadName, ...] = ("sharegpt", "alpaca")
# With traces of 20 minutes the largest model's are as long as in the paper: 15.
_SERVERS: tuple[tuple[Server, float], ...] = (
    (PAPER_OPT_13B, 1.0),
    (PAPER_OPT_66B, 1.0),
    (PAPER_OPT_175B, 0.75),
)
# Requests a second where the search begins; what it finds depends on them by its tolerance only.
FIRST_RATES: Mapping[str, float] = {"sharegpt": 0.5, "alpaca": 5.0, "translation": 4.0, "chat": 0.5}

# How many times more than these the paper's system sustains, ShareGPT (section 6.2).
PAPER_RATIOS: Mapping[str, tuple[float, float]] = {
    "orca_oracle": (1.7, 2.7),
    "orca_max": (2.7, 8.0),
}
_PAPER_MOST_OF_STATIC = 22.0


def search_all(jobs: Sequence[Job], options: Options) -> list[Sustained]:
    """The rate that each sustains, searched side by side."""
    searches = [Search(job=job) for job in jobs]
    return run_all(sustained_rate, searches, num_processes=options.num_processes)


def latency_panel(
    title: str, curves: Mapping[str, Iterable[Row]], limit: float, *, label: str = "requests/s"
) -> Lines:
    """Normalized latency against request rate, as the paper draws it: up to 1 s a token.

    Args:
      title: above it.
      curves: rows by name.
      limit: latency at which a rate counts as sustained.
      label: of the rates.
    """
    points = {
        name: [(row["rate"], row["normalized_latency"]) for row in rows]
        for name, rows in curves.items()
    }
    return Lines(
        title=title,
        x_label=label,
        y_label="s / output token",
        series=points,
        y_max=5 * limit,
        limit=limit,
    )


def run_rates(options: Options) -> Experiment:
    """Fig. 12, all six panels."""
    cases: list[tuple[WorkloadName, Server, float, Policy]] = [
        (dataset, server, share, policy)
        for dataset in _DATASETS
        for server, share in _SERVERS
        for policy in POLICIES
    ]
    jobs = [
        make_job(
            server,
            policy,
            dataset,
            rate=FIRST_RATES[dataset],
            options=options,
            share_of_minutes=share,
        )
        for dataset, server, share, policy in cases
    ]
    found = {
        (dataset, server.model.name, policy): one
        for (dataset, server, _, policy), one in zip(cases, search_all(jobs, options), strict=True)
    }
    rates = {key: one.rate for key, one in found.items()}
    panels = [
        latency_panel(
            f"{server.model.name}, {dataset}",
            {
                POLICY_NAMES[policy]: found[dataset, server.model.name, policy].rows
                for policy in POLICIES
            },
            options.assumptions.max_normalized_latency,
        )
        for dataset in _DATASETS
        for server, _ in _SERVERS
    ]
    rows = [
        {"workload": dataset, "model": model, "policy": policy, "sustained": rate}
        | {"paged over it": rates[dataset, model, "paged"] / rate}
        for (dataset, model, policy), rate in rates.items()
    ]
    curves = [row for one in found.values() for row in one.rows]
    return Experiment(
        name="fig12",
        title="Normalized latency against request rate",
        kind="simulated",
        how="A rate is sustained while the mean normalized latency is at most "
        f"{options.assumptions.max_normalized_latency:g} s a token; found by halving, to 3 %.",
        rows=tuple(rows),
        points=tuple(curves),
        comparisons=tuple(_compare(rates)),
        panels=tuple(panels),
    )


def _compare(rates: Mapping[tuple[str, str, str], float]) -> Iterable[Comparison]:
    models = [server.model.name for server, _ in _SERVERS]
    for model in models:
        for policy, paper in PAPER_RATIOS.items():
            ratio = rates["sharegpt", model, "paged"] / rates["sharegpt", model, policy]
            what = f"{model}, sharegpt, paged / {POLICY_NAMES[policy]}"
            yield Comparison(what=what, paper=paper, ours=ratio)
    most = max(rates["sharegpt", model, "paged"] / rates["sharegpt", model, "static"]
               for model in models)  # fmt: skip
    paper = (_PAPER_MOST_OF_STATIC, _PAPER_MOST_OF_STATIC)
    yield Comparison(what="sharegpt, most of paged / FasterTransformer", paper=paper, ours=most)
