"""`block_copy`, obviously right: one pair after the other."""

import jax
from jaxtyping import Array, Int, Shaped


def block_copy_reference(
    kv_blocks: Shaped[Array, "L P 2 K S D"], src: Int[Array, "C"], dst: Int[Array, "C"]
) -> Shaped[Array, "L P 2 K S D"]:
    """The semantics of `block_copy` (see there)."""

    def copy_pair(i, kv_blocks):
        block = jax.lax.dynamic_index_in_dim(kv_blocks, src[i], axis=1)  # [L, 1, 2, K, S, D]
        return jax.lax.dynamic_update_index_in_dim(kv_blocks, block, dst[i], axis=1)

    return jax.lax.fori_loop(0, src.shape[0], copy_pair, kv_blocks)
