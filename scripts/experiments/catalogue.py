"""The figures by name, in the paper's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from paged_jax_scripts.experiments.decoding import run_decoding, run_savings
from paged_jax_scripts.experiments.memory_use import run_batches, run_shares
from paged_jax_scripts.experiments.preemption import run_preemption
from paged_jax_scripts.experiments.prompts import run_chat, run_prefix
from paged_jax_scripts.experiments.records import Experiment, Options
from paged_jax_scripts.experiments.request_rates import run_rates
from paged_jax_scripts.experiments.sensitivity import run_sensitivity

EXPERIMENTS: Mapping[str, Callable[[Options], Experiment]] = MappingProxyType(
    {
        "fig2": run_shares,
        "fig12": run_rates,
        "fig13": run_batches,
        "fig14": run_decoding,
        "fig15": run_savings,
        "fig16": run_prefix,
        "fig17": run_chat,
        "fig19": run_preemption,
        "sensitivity": run_sensitivity,
    }
)
