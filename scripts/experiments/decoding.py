"""Figs. 14 and 15: parallel sampling and beam search, the rates sustained and the memory saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_jax.simulation.lengths import DATASETS, draw_requests
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax.simulation.simulator import Policy
from paged_jax_scripts.experiments.records import Bars, Comparison, Experiment, Options, Row
from paged_jax_scripts.experiments.request_rates import (
    CONTINUOUS_POLICIES,
    FIRST_RATES,
    latency_panel,
    search_all,
)
from paged_jax_scripts.experiments.runs import POLICY_NAMES, make_job, run_all, run_job
from paged_jax_scripts.experiments.workloads import WorkloadName
from paged_jax_scripts.sharing import parallel_saving

NUM_SEQUENCES = (2, 4, 6)
_BLOCK_SIZE = 16
_CONCURRENCY = 32
_REQUESTS_PER_MINUTE = 100  # of the closed loop: 20 minutes are as docs/sharing.md has it
SAVING_RATES: Mapping[WorkloadName, float] = {
    "sharegpt": 0.5,
    "alpaca": 4.0,
}  # requests a second; most sequences still run


def run_decoding(options: Options) -> Experiment:
    """Fig. 14: rates sustained with several sequences a request, OPT-13B, Alpaca."""
    kinds: dict[str, dict[str, Any]] = {"basic": {}}
    kinds |= {f"parallel {n}": {"num_samples": n} for n in NUM_SEQUENCES}
    kinds |= {f"beam {n}": {"beam_width": n} for n in NUM_SEQUENCES}
    cases: list[tuple[str, Policy]] = [
        (kind, policy) for kind in kinds for policy in CONTINUOUS_POLICIES
    ]
    jobs = [
        make_job(
            PAPER_OPT_13B,
            policy,
            "alpaca",
            rate=FIRST_RATES["alpaca"],
            options=options,
            **kinds[kind],
        )
        for kind, policy in cases
    ]
    found = dict(zip(cases, search_all(jobs, options), strict=True))
    rows: list[Row] = [
        {
            "decoding": kind,
            "policy": policy,
            "sustained": one.rate,
            "paged over it": found[kind, "paged"].rate / one.rate,
        }
        for (kind, policy), one in found.items()
    ]
    gains = {kind: found[kind, "paged"].rate / found[kind, "orca_oracle"].rate for kind in kinds}
    limit = options.assumptions.max_normalized_latency
    return Experiment(
        name="fig14",
        title="Parallel sampling and beam search, OPT-13B on one A100-40GB, Alpaca",
        kind="simulated",
        how="Rates sustained as in Fig. 12. All sequences of a request have its length; beams fork "
        "and die by a random model (paged_jax/simulation/beams.py).",
        rows=tuple(rows),
        points=tuple(row for one in found.values() for row in one.rows),
        comparisons=tuple(
            Comparison(
                what=f"{kind}, paged / Orca (Oracle)", paper=(paper, paper), ours=gains[kind]
            )
            for kind, paper in (("basic", 1.3), ("beam 6", 2.3))
        ),
        panels=tuple(
            latency_panel(
                kind,
                {POLICY_NAMES[p]: found[kind, p].rows for p in CONTINUOUS_POLICIES},
                limit,
            )
            for kind in kinds
            if kind != "basic"
        ),
    )


def parallel_rows(options: Options, *, concurrency: int = _CONCURRENCY) -> list[Row]:
    """What parallel sampling saves on the block manager, executed in a closed loop.

    Args:
      options: how many requests, and their lengths.
      concurrency: requests that run at a time.
    """
    rows: list[Row] = []
    for name, dataset in DATASETS.items():
        num_requests = max(round(_REQUESTS_PER_MINUTE * options.minutes), 8 * concurrency)
        requests = draw_requests(
            dataset,
            num_requests,
            seed=options.seed,
            prompt_spread=options.assumptions.prompt_spread,
            output_spread=options.assumptions.output_spread,
            min_len=options.assumptions.min_len,
            max_prompt=options.assumptions.max_prompt,
            max_total=options.assumptions.max_total,
        )
        for n in NUM_SEQUENCES:
            saving = parallel_saving(
                requests, num_samples=n, block_size=_BLOCK_SIZE, concurrency=concurrency
            )
            rows.append(_saving(name, "parallel", n, "executed", saving))
    return rows


def run_savings(options: Options) -> Experiment:
    """Fig. 15: blocks that sharing saves, of those that there would be without."""
    rows = parallel_rows(options)
    datasets: tuple[WorkloadName, ...] = ("sharegpt", "alpaca")
    cases: list[tuple[WorkloadName, int]] = [
        (name, width) for name in datasets for width in NUM_SEQUENCES
    ]
    jobs = [
        make_job(
            PAPER_OPT_13B,
            "paged",
            name,
            rate=SAVING_RATES[name],
            options=options,
            beam_width=width,
        )
        for name, width in cases
    ]
    runs = run_all(run_job, jobs, num_processes=options.num_processes)
    for (name, width), row in zip(cases, runs, strict=True):
        rows.append(_saving(name, "beam", width, "simulated", row["saved"]))
    ours = {(row["workload"], row["decoding"], row["sequences"]): row["saved %"] for row in rows}
    paper = {
        (name, decoding, n): saving
        for name, dataset in DATASETS.items()
        for decoding, savings in (("parallel", dataset.parallel), ("beam", dataset.beam))
        for n, saving in savings.items()
    }
    return Experiment(
        name="fig15",
        title="Memory saved by sharing, OPT-13B",
        kind="executed and simulated",
        how="Parallel sampling: the block manager itself, in a closed loop (docs/sharing.md). "
        "Beams: simulated, and which of them survive is a random model's choice; "
        "docs/beam_search.md has those of a real model.",
        rows=tuple(rows),
        comparisons=tuple(
            Comparison(
                what=f"{name}, {decoding} {n}",
                paper=(theirs, theirs),
                ours=ours[name, decoding, n],
                unit=" %",
            )
            for (name, decoding, n), theirs in paper.items()
        ),
        panels=tuple(
            Bars(
                title=f"{name}, {decoding}",
                y_label="% of blocks saved",
                groups=tuple(str(n) for n in NUM_SEQUENCES),
                series={
                    "ours": tuple(ours[name, decoding, n] for n in NUM_SEQUENCES),
                    "paper": tuple(paper.get((name, decoding, n)) for n in NUM_SEQUENCES),
                },
            )
            for name in DATASETS
            for decoding in ("parallel", "beam")
        ),
    )


def _saving(name: str, decoding: str, num_sequences: int, kind: str, share: float) -> Row:
    row: Row = {"workload": name, "decoding": decoding, "sequences": num_sequences}
    return row | {"kind": kind, "saved %": 100 * share}
