"""`kv_write`, obviously right: one token after the other, padding written nowhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kv_write.stored import as_stored


def kv_write_reference(
    kv_blocks: Shaped[Array, "N 2 K S D"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: Float[Array, "N 2 K S"] | None,
) -> tuple[Shaped[Array, "N 2 K S D"], Float[Array, "N 2 K S"] | None]:
    """The semantics of `kv_write` (see there); returns the pool and its scales, if it has any."""
    N, _, _, S, D = kv_blocks.shape
    T = k.shape[1]
    kv, scales = as_stored(
        k, v, head_dim=D, dtype=kv_blocks.dtype, is_quantized=kv_scales is not None
    )

    def write_token(i, pool):
        kv_blocks, kv_scales = pool
        b, t = i // T, i % T
        slot = slot_mapping[b, t]
        written = (t < q_lens[b]) & (slot >= 0) & (slot < N * S)
        block, slot = jnp.where(written, slot, 0) // S, jnp.where(written, slot, 0) % S
        new = jnp.where(written, kv[b, t], kv_blocks[block, :, :, slot])
        kv_blocks = kv_blocks.at[block, :, :, slot].set(new)
        if scales is not None:
            new = jnp.where(written, scales[b, t], kv_scales[block, :, :, slot])
            kv_scales = kv_scales.at[block, :, :, slot].set(new)
        return kv_blocks, kv_scales

    return jax.lax.fori_loop(0, slot_mapping.size, write_token, (kv_blocks, kv_scales))
