"""`kv_write` in plain XLA, in place when the pool is donated or carried through a scan."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_write_xla(
    kv_blocks: Float[Array, "N 2 K S D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
) -> Float[Array, "N 2 K S D"]:
    """The semantics of `kv_write` (see there); padding goes to slot 0 of the null block."""
    N, _, K, S, D = kv_blocks.shape
    B, T = slot_mapping.shape
    written = (jnp.arange(T, dtype=jnp.int32) < q_lens[:, None]) & (slot_mapping >= 0)
    written &= slot_mapping < N * S
    slots = jnp.where(written, slot_mapping, 0).reshape(B * T)
    kv = jnp.stack([k, v], axis=2).astype(kv_blocks.dtype).reshape(B * T, 2, K, D)
    return jax.lax.platform_dependent(kv_blocks, kv, slots, cpu=_write_loop, default=_write_scatter)


def _write_loop(kv_blocks: Array, kv: Array, slots: Array) -> Array:
    """One update a token: on CPU up to 1.4 times faster than the scatter."""
    _, _, K, S, D = kv_blocks.shape
    if slots.shape[0] == 1:
        # XLA unrolls a loop of one turn, and then copies the pool. The null block takes the second.
        kv, slots = jnp.pad(kv, ((0, 1), (0, 0), (0, 0), (0, 0))), jnp.pad(slots, (0, 1))

    def write_token(i, kv_blocks):
        update = kv[i].reshape(1, 2, K, 1, D)
        at = (slots[i] // S, 0, 0, slots[i] % S, 0)
        return jax.lax.dynamic_update_slice(kv_blocks, update, at)

    return jax.lax.fori_loop(0, slots.shape[0], write_token, kv_blocks)


def _write_scatter(kv_blocks: Array, kv: Array, slots: Array) -> Array:
    """All tokens at once, for devices where a loop means a launch a token."""
    S = kv_blocks.shape[3]
    return kv_blocks.at[slots // S, :, :, slots % S].set(kv, mode="promise_in_bounds")
