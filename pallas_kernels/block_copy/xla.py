"""Moves of whole blocks in plain XLA, in place when the pool is donated."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.block_copy.blocks import Blocks


def move_blocks_xla(
    source: Blocks | None, target: Blocks | None, src: Int[Array, "C"], dst: Int[Array, "C"]
) -> Blocks:
    """The semantics of `block_copy`, `block_gather` and `block_scatter` (see `Blocks`)."""
    if target is None:
        return jax.tree.map(lambda x: _gather(x, src), source)
    if source is None:
        return jax.tree.map(lambda x: _copy(x, src, dst), target)
    return jax.tree.map(lambda to, from_: _scatter(to, from_, src, dst), target, source)


def _gather(pool: Array, src: Int[Array, "C"]) -> Array:
    """Rows of a layer's block each, so that they are copied as they lie."""
    L, P = pool.shape[:2]
    rows = jnp.arange(L, dtype=jnp.int32)[:, None] * P + src  # [L, C]
    flat = pool.reshape(L * P, -1)
    blocks = flat.at[rows.reshape(-1)].get(mode="promise_in_bounds")
    return blocks.reshape(L, src.shape[0], *pool.shape[2:])


def _copy(pool: Array, src: Int[Array, "C"], dst: Int[Array, "C"]) -> Array:
    return jax.lax.platform_dependent(pool, src, dst, cpu=_copy_loop, default=_copy_all)


def _copy_loop(pool: Array, src: Array, dst: Array) -> Array:
    """One block of one layer at a time: contiguous copies, no second copy held of them all."""
    L, P = pool.shape[:2]
    flat = pool.reshape(L * P, -1)

    def copy_block(i, flat):
        pair, layer = i // L, i % L
        block = jax.lax.dynamic_index_in_dim(flat, layer * P + src[pair])
        return jax.lax.dynamic_update_index_in_dim(flat, block, layer * P + dst[pair], axis=0)

    return jax.lax.fori_loop(0, src.shape[0] * L, copy_block, flat).reshape(pool.shape)


def _copy_all(pool: Array, src: Array, dst: Array) -> Array:
    blocks = pool.at[:, src].get(mode="promise_in_bounds")
    return pool.at[:, dst].set(blocks, mode="promise_in_bounds")


def _scatter(pool: Array, blocks: Array, src: Array, dst: Array) -> Array:
    return jax.lax.platform_dependent(
        pool, blocks, src, dst, cpu=_scatter_loop, default=_scatter_all
    )


def _scatter_loop(pool: Array, blocks: Array, src: Array, dst: Array) -> Array:
    L, P = pool.shape[:2]
    C = blocks.shape[1]
    flat, rows = pool.reshape(L * P, -1), blocks.reshape(L * C, -1)

    def write_block(i, flat):
        pair, layer = i // L, i % L
        block = jax.lax.dynamic_index_in_dim(rows, layer * C + src[pair])
        return jax.lax.dynamic_update_index_in_dim(flat, block, layer * P + dst[pair], axis=0)

    return jax.lax.fori_loop(0, src.shape[0] * L, write_block, flat).reshape(pool.shape)


def _scatter_all(pool: Array, blocks: Array, src: Array, dst: Array) -> Array:
    return pool.at[:, dst].set(blocks[:, src], mode="promise_in_bounds")
