"""Overwriting whole blocks on the device, in place: what ``EngineConfig.zero_on_free`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from paged_jax.pool import KVPool

ID_BUCKETS = (8, 64)


def make_block_fill(*, donate: bool, value: float = 0.0) -> Callable[..., KVPool]:
    """Build the jitted ``fill(pool, ids i32[C]) -> pool``: one launch for all of a step's blocks.

    Scales are filled like elements. Padding ids are 0, the null block, and come last; it may or may
    not be filled.

    Args:
      donate: give the pool to the call, so that it is updated in place.
      value: what to fill with.
    """

    loop, scatter = (functools.partial(f, value=value) for f in (_fill_loop, _fill_scatter))

    def fill(pool: KVPool, ids: Int[Array, "C"]) -> KVPool:
        return jax.tree.map(
            lambda array: jax.lax.platform_dependent(array, ids, cpu=loop, default=scatter), pool
        )

    return jax.jit(fill, donate_argnames=("pool",) if donate else ())


def _fill_scatter(array: Array, ids: Array, *, value: float) -> Array:
    return array.at[:, ids].set(jnp.asarray(value, array.dtype), mode="promise_in_bounds")


def _fill_loop(array: Array, ids: Array, *, value: float) -> Array:
    """One block of one layer at a time, without the padding: contiguous writes."""
    L, P = array.shape[:2]
    flat = array.reshape(L * P, -1)
    row = jnp.full((1, flat.shape[1]), value, array.dtype)

    def fill_block(i: Array, flat: Array) -> Array:
        block, layer = ids[i // L], i % L
        return jax.lax.dynamic_update_slice_in_dim(flat, row, layer * P + block, axis=0)

    num_ids = jnp.count_nonzero(ids)
    return jax.lax.fori_loop(0, num_ids * L, fill_block, flat).reshape(array.shape)


def padded_ids(blocks: Sequence[int]) -> Iterator[np.ndarray]:
    """Cut block ids into int32 arrays of few sizes, so that few programs are compiled.

    >>> [ids.tolist() for ids in padded_ids([3, 4, 9])]
    [[3, 4, 9, 0, 0, 0, 0, 0]]
    """
    most = ID_BUCKETS[-1]
    for start in range(0, len(blocks), most):
        chunk = blocks[start : start + most]
        ids = np.zeros(next(size for size in ID_BUCKETS if size >= len(chunk)), np.int32)
        ids[: len(chunk)] = chunk
        yield ids
