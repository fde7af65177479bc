"""`block_copy` in plain XLA, in place when the pool is donated."""

import jax
from jaxtyping import Array, Int, Shaped


def block_copy_xla(
    kv_blocks: Shaped[Array, "L P 2 K S D"], src: Int[Array, "C"], dst: Int[Array, "C"]
) -> Shaped[Array, "L P 2 K S D"]:
    """The semantics of `block_copy` (see there)."""
    return jax.lax.platform_dependent(kv_blocks, src, dst, cpu=_copy_loop, default=_copy_all)


def _copy_loop(kv_blocks: Array, src: Array, dst: Array) -> Array:
    """One block of one layer at a time: contiguous copies, no second copy held of them all."""
    L, P = kv_blocks.shape[:2]
    flat = kv_blocks.reshape(L * P, -1)

    def copy_block(i, flat):
        pair, layer = i // L, i % L
        block = jax.lax.dynamic_index_in_dim(flat, layer * P + src[pair])
        return jax.lax.dynamic_update_index_in_dim(flat, block, layer * P + dst[pair], axis=0)

    return jax.lax.fori_loop(0, src.shape[0] * L, copy_block, flat).reshape(kv_blocks.shape)


def _copy_all(kv_blocks: Array, src: Array, dst: Array) -> Array:
    blocks = kv_blocks.at[:, src].get(mode="promise_in_bounds")
    return kv_blocks.at[:, dst].set(blocks, mode="promise_in_bounds")
