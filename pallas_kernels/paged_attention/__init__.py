"""Attention over a paged KV pool."""

from pallas_kernels.paged_attention.api import paged_attention, plan_attention

__all__ = ["paged_attention", "plan_attention"]
