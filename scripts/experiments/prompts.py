"""Fig. 16: prompts with a shared prefix, and Fig. 17: a chatbot's prompts, which are long."""

from __future__ import annotations

from paged_jax.simulation.machines import PAPER_LLAMA_13B, PAPER_OPT_13B
from paged_jax.simulation.simulator import Policy
from paged_jax_scripts.experiments.records import Comparison, Experiment, Options, Row
from paged_jax_scripts.experiments.request_rates import (
    CONTINUOUS_POLICIES,
    FIRST_RATES,
    latency_panel,
    search_all,
)
from paged_jax_scripts.experiments.runs import POLICY_NAMES, Job, Sustained, make_job

# Tokens of one and of five examples, and how many times more the paper's system sustains.
PAPER_PREFIX_GAINS = {80: 1.67, 341: 3.58}
PREFIX_POLICIES: tuple[Policy, ...] = ("paged", "orca_oracle")
PAPER_CHAT_GAIN = 2.0


def prefix_job(policy: Policy, prefix_len: int, rate: float, options: Options) -> Job:
    """Translations behind a prefix, which a paged pool computes and holds once."""
    return make_job(
        PAPER_LLAMA_13B,
        policy,
        "translation",
        rate=rate,
        options=options,
        shared_prefix_len=prefix_len,
    )


def chat_job(policy: Policy, rate: float, options: Options) -> Job:
    """Rounds of conversations."""
    return make_job(PAPER_OPT_13B, policy, "chat", rate=rate, options=options)


def run_prefix(options: Options) -> Experiment:
    """Fig. 16: rates sustained, LLaMA-13B, translations behind one and five examples."""
    cases: list[tuple[int, Policy]] = [
        (length, policy) for length in PAPER_PREFIX_GAINS for policy in PREFIX_POLICIES
    ]
    jobs = [
        prefix_job(policy, length, FIRST_RATES["translation"], options) for length, policy in cases
    ]
    found = dict(zip(cases, search_all(jobs, options), strict=True))
    comparisons = []
    for length, paper in PAPER_PREFIX_GAINS.items():
        gain = found[length, "paged"].rate / found[length, "orca_oracle"].rate
        what = f"prefix of {length} tokens, paged / Orca (Oracle)"
        comparisons.append(Comparison(what=what, paper=(paper, paper), ours=gain))
    limit = options.assumptions.max_normalized_latency
    return Experiment(
        name="fig16",
        title="A shared prefix, LLaMA-13B on one A100-40GB, translation",
        kind="simulated",
        how="Rates sustained as in Fig. 12. Paged: the prefix is registered, each request computes "
        "what follows its full blocks; Orca computes and holds it for every request.",
        rows=tuple(
            _row(one, {"prefix": length}, policy) for (length, policy), one in found.items()
        ),
        points=tuple(row for one in found.values() for row in one.rows),
        comparisons=tuple(comparisons),
        panels=tuple(
            latency_panel(
                f"prefix of {length} tokens",
                {POLICY_NAMES[policy]: found[length, policy].rows for policy in PREFIX_POLICIES},
                limit,
            )
            for length in PAPER_PREFIX_GAINS
        ),
    )


def run_chat(options: Options) -> Experiment:
    """Fig. 17: rates sustained with long prompts, OPT-13B."""
    jobs = [chat_job(policy, FIRST_RATES["chat"], options) for policy in CONTINUOUS_POLICIES]
    found = dict(zip(CONTINUOUS_POLICIES, search_all(jobs, options), strict=True))
    curves = {POLICY_NAMES[policy]: one.rows for policy, one in found.items()}
    limit = options.assumptions.max_normalized_latency
    return Experiment(
        name="fig17",
        title="Chatbot, OPT-13B on one A100-40GB",
        kind="simulated",
        how="Rates sustained as in Fig. 12. A prompt is the last "
        f"{options.assumptions.chat_max_prompt} tokens of history and question, an output has at "
        f"most {options.assumptions.chat_max_output}; nothing is kept between rounds.",
        rows=tuple(_row(one, {}, policy) for policy, one in found.items()),
        points=tuple(row for one in found.values() for row in one.rows),
        comparisons=tuple(
            Comparison(
                what=f"paged / {POLICY_NAMES[policy]}",
                paper=(PAPER_CHAT_GAIN, PAPER_CHAT_GAIN),
                ours=found["paged"].rate / one.rate,
            )
            for policy, one in found.items()
            if policy != "paged"
        ),
        panels=(latency_panel("chat", curves, limit),),
    )


def _row(found: Sustained, names: Row, policy: Policy) -> Row:
    return names | {"policy": policy, "sustained": found.rate}
