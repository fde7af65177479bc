"""Runs to compare with: the same models over a contiguous (dense) cache."""

from paged_jax.baselines.static_batch import StaticRun, run_static_batch

__all__ = ["StaticRun", "run_static_batch"]
