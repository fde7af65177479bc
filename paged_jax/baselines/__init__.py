"""Runs to compare with: the same models over a contiguous (dense) cache."""

from paged_jax.baselines.dense_engine import DenseEngine
from paged_jax.baselines.lockstep import Baseline, BaselineRun, lockstep_baseline
from paged_jax.baselines.static_batch import StaticRun, run_static_batch

__all__ = [
    "Baseline",
    "BaselineRun",
    "DenseEngine",
    "StaticRun",
    "lockstep_baseline",
    "run_static_batch",
]
