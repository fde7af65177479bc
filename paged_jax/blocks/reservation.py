"""The policies by which a request gets its memory: paged, or the paper's Orca baselines (6.1)."""

from __future__ import annotations

from typing import Any

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.contiguous import ContiguousManager
from paged_jax.blocks.demand import (
    RESERVATION_POLICIES,
    ContiguousPolicy,
    Demand,
    ReservationPolicy,
    num_reserved,
)

__all__ = [
    "RESERVATION_POLICIES",
    "ContiguousPolicy",
    "Demand",
    "ReservationPolicy",
    "make_manager",
    "num_reserved",
]


def make_manager(
    policy: ReservationPolicy, *, max_model_len: int, num_host_blocks: int = 0, **options: Any
) -> BlockManager:
    """The block manager of a policy; schedulers and kernels don't know which one it is.

    Args:
      policy: 'paged', or how long contiguous regions are: 'orca_max' has the longest context,
        'orca_pow2' the output rounded up to a power of two, 'orca_oracle' the true output.
      max_model_len: longest context in tokens.
      num_host_blocks: see ``BlockManager``; contiguous regions are never swapped.
      options: as ``BlockManager``.

    Raises:
      ValueError: as ``BlockManager``, or the pool has no region for 'orca_max', there is no such
        policy, or a contiguous one comes with a host pool.
    """
    if policy not in RESERVATION_POLICIES:
        choices = ", ".join(map(repr, RESERVATION_POLICIES))
        raise ValueError(f"policy={policy!r} must be one of {choices}")
    if policy == "paged":
        return BlockManager(num_host_blocks=num_host_blocks, **options)
    if num_host_blocks:
        raise ValueError(f"num_host_blocks={num_host_blocks} must be 0 with policy={policy!r}")
    return ContiguousManager(policy, max_model_len=max_model_len, **options)
