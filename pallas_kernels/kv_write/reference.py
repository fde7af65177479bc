"""`kv_write`, obviously right: one token after the other, padding written nowhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_write_reference(
    kv_blocks: Float[Array, "N 2 K S D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
) -> Float[Array, "N 2 K S D"]:
    """The semantics of `kv_write` (see there)."""
    N, _, K, S, D = kv_blocks.shape
    T = k.shape[1]
    kv = jnp.stack([k, v], axis=2).astype(kv_blocks.dtype)  # [B, T, 2, K, D]

    def write_token(i, kv_blocks):
        b, t = i // T, i % T
        slot = slot_mapping[b, t]
        written = (t < q_lens[b]) & (slot >= 0) & (slot < N * S)
        slot = jnp.where(written, slot, 0)
        at = (slot // S, 0, 0, slot % S, 0)
        old = jax.lax.dynamic_slice(kv_blocks, at, (1, 2, K, 1, D))
        new = jnp.where(written, kv[b, t].reshape(old.shape), old)
        return jax.lax.dynamic_update_slice(kv_blocks, new, at)

    return jax.lax.fori_loop(0, slot_mapping.size, write_token, kv_blocks)
