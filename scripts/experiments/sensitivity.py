"""The headline results with every assumption at half and at double: which of them moves what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from paged_jax.simulation.machines import (
    PAPER_OPT_13B,
    PAPER_OPT_66B,
    PAPER_OPT_175B,
    Server,
)
from paged_jax.simulation.simulator import Policy
from paged_jax_scripts.experiments.decoding import SAVING_RATES
from paged_jax_scripts.experiments.memory_use import LOADS, job, shares_of
from paged_jax_scripts.experiments.memory_use import POLICIES as MEMORY_POLICIES
from paged_jax_scripts.experiments.preemption import model_row
from paged_jax_scripts.experiments.prompts import (
    PAPER_PREFIX_GAINS,
    PREFIX_POLICIES,
    chat_job,
    prefix_job,
)
from paged_jax_scripts.experiments.records import Experiment, Options, Row
from paged_jax_scripts.experiments.request_rates import CONTINUOUS_POLICIES, FIRST_RATES
from paged_jax_scripts.experiments.runs import (
    POLICY_NAMES,
    Job,
    Search,
    make_job,
    run_all,
    run_job,
    sustained_rate,
)

_SHARE_OF_MINUTES = 0.1
_WIDENING, _TOLERANCE = 1.3, 1.05

Figures = dict[str, float]


def _memory(options: Options) -> Figures:
    figures: Figures = {}
    for name, rate in LOADS:
        for policy in MEMORY_POLICIES:
            row = run_job(job(policy, name, rate, options))
            policy_name = POLICY_NAMES[policy]
            figures[f"Fig. 13 batch, {name}, {policy_name}"] = row["batched_requests"]
            if name == "sharegpt":
                figures[f"Fig. 2 tokens %, {policy_name}"] = shares_of(row)[0]
    return dict(sorted(figures.items()))


def _rates(server: Server, policies: tuple[Policy, ...], share: float, options: Options) -> Figures:
    jobs: dict[Policy, Job] = {
        policy: make_job(
            server,
            policy,
            "sharegpt",
            rate=FIRST_RATES["sharegpt"],
            options=options,
            share_of_minutes=share,
        )
        for policy in policies
    }
    return _gains(f"Fig. 12, {server.model.name}", jobs)


def _beams(options: Options) -> Figures:
    policies: tuple[Policy, ...] = ("paged", "orca_oracle")
    figures: Figures = {}
    for kind, settings in (("basic", {}), ("beam 6", {"beam_width": 6})):
        jobs: dict[Policy, Job] = {
            policy: make_job(
                PAPER_OPT_13B,
                policy,
                "alpaca",
                rate=FIRST_RATES["alpaca"],
                options=options,
                **settings,
            )
            for policy in policies
        }
        figures |= _gains(f"Fig. 14, {kind}", jobs)
    return figures


def _savings(options: Options) -> Figures:
    figures: Figures = {}
    for name in SAVING_RATES:
        row = run_job(
            make_job(
                PAPER_OPT_13B,
                "paged",
                name,
                rate=SAVING_RATES[name],
                options=options,
                beam_width=6,
            )
        )
        figures[f"Fig. 15 saved %, beam 6, {name}"] = 100 * row["saved"]
    return figures


def _moves(options: Options) -> Figures:
    row = model_row(16, 256, options.assumptions.cost)
    return {"Fig. 19, recompute / swap, blocks of 16": row["recompute / swap"]}


def _prefix(options: Options) -> Figures:
    figures: Figures = {}
    for length in PAPER_PREFIX_GAINS:
        jobs: dict[Policy, Job] = {
            policy: prefix_job(policy, length, FIRST_RATES["translation"], options)
            for policy in PREFIX_POLICIES
        }
        figures |= _gains(f"Fig. 16, {length} tokens", jobs)
    return figures


def _chat(options: Options) -> Figures:
    jobs: dict[Policy, Job] = {
        policy: chat_job(policy, FIRST_RATES["chat"], options) for policy in CONTINUOUS_POLICIES
    }
    return _gains("Fig. 17", jobs)


def _gains(name: str, jobs: Mapping[Policy, Job]) -> Figures:
    """How many times the rate of each other policy the paged one sustains."""
    rates: dict[str, float] = {}
    first = None
    for policy, one in jobs.items():
        # The last rate is a good first guess for the next policy's.
        one = one if first is None else one.at(first)
        search = Search(job=one, widening=_WIDENING, tolerance=_TOLERANCE)
        first = rates[policy] = sustained_rate(search).rate
    return {
        f"{name}, paged / {POLICY_NAMES[policy]}": rates["paged"] / rate
        for policy, rate in rates.items()
        if policy != "paged"
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Headline:
    """Results that are computed together.

    Attributes:
      compute: gives them, by name.
      uses: assumptions that enter.
    """

    compute: Callable[[Options], Figures]
    uses: frozenset[str]


_SERVER = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "cost.bandwidth_efficiency",
        "cost.flops_efficiency",
        "cost.overhead",
        "cost.row_overhead",
    }
)
_LENGTHS = _SERVER | {"prompt_spread", "output_spread", "min_len", "max_prompt", "max_total"}
_RATES = _LENGTHS | {"max_normalized_latency"}
_SEVERAL_GPUS = _RATES | {"cost.link_efficiency", "cost.reduce_latency"}
_TRANSLATION = {"translation_prompt_mean", "translation_output_mean", "translation_spread"}
_CHAT = {"chat_mean_turns", "chat_max_prompt", "chat_max_output"}
_MOVES = frozenset(
    {
        "cost.host_bandwidth",
        "cost.swap_latency",
        "cost.flops_efficiency",
        "cost.bandwidth_efficiency",
    }
)
_ORCAS: tuple[Policy, ...] = ("paged", "orca_oracle", "orca_max")
HEADLINES: Mapping[str, Headline] = MappingProxyType(
    {
        "memory": Headline(_memory, _LENGTHS),
        "rates 13B": Headline(partial(_rates, PAPER_OPT_13B, (*_ORCAS, "static"), 1.0), _RATES),
        "rates 66B": Headline(partial(_rates, PAPER_OPT_66B, _ORCAS, 1.0), _SEVERAL_GPUS),
        "rates 175B": Headline(partial(_rates, PAPER_OPT_175B, _ORCAS, 0.75), _SEVERAL_GPUS),
        "beams": Headline(_beams, _RATES | {"beam_concentration"}),
        "savings": Headline(_savings, _LENGTHS | {"beam_concentration"}),
        "prefix": Headline(_prefix, _RATES - {"prompt_spread", "output_spread"} | _TRANSLATION),
        "chat": Headline(_chat, _RATES | _CHAT),
        "swapping": Headline(_moves, _MOVES),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    headline: str
    constant: str
    factor: float
    options: Options


def _run(case: _Case) -> Figures | str:
    """The case's figures, or why there are none."""
    try:
        return HEADLINES[case.headline].compute(case.options)
    except ValueError as error:
        return str(error)


def run_sensitivity(options: Options) -> Experiment:
    """Every constant of the assumptions at half and at double, one at a time."""
    short = dataclasses.replace(options, minutes=options.minutes * _SHARE_OF_MINUTES)
    cases = [_Case(name, "as assumed", 1.0, short) for name in HEADLINES]
    for constant, factor, assumptions in options.assumptions.variants():
        changed = dataclasses.replace(short, assumptions=assumptions)
        cases += [
            _Case(name, constant, factor, changed)
            for name, headline in HEADLINES.items()
            if constant in headline.uses
        ]
    found = run_all(_run, cases, num_processes=options.num_processes)
    rows: dict[tuple[str, float], Row] = {}
    failures: list[Row] = []
    for case, figures in zip(cases, found, strict=True):
        key = (case.constant, case.factor)
        row = rows.setdefault(key, {"constant": case.constant, "times": case.factor})
        if isinstance(figures, str):
            failures.append({"headline": case.headline, **row, "error": figures})
        else:
            row.update(figures)
    return Experiment(
        name="sensitivity",
        title="Every assumption at half and at double",
        kind="simulated",
        how=f"Traces of {short.minutes:g} minutes, rates to {100 * (_TOLERANCE - 1):.0f} %. An "
        "empty cell: the constant does not enter, or no such load can be drawn or served.",
        rows=tuple(rows.values()),
        points=tuple(failures),
    )
