"""`kv_write` in plain XLA, in place when the pool is donated or carried through a scan."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kv_write.stored import as_stored


def kv_write_xla(
    kv_blocks: Shaped[Array, "N 2 K S D"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: Float[Array, "N 2 K S"] | None,
) -> tuple[Shaped[Array, "N 2 K S D"], Float[Array, "N 2 K S"] | None]:
    """The semantics of `kv_write` (see there); padding goes to slot 0 of the null block."""
    N, _, K, S, D = kv_blocks.shape
    B, T = slot_mapping.shape
    written = (jnp.arange(T, dtype=jnp.int32) < q_lens[:, None]) & (slot_mapping >= 0)
    written &= slot_mapping < N * S
    slots = jnp.where(written, slot_mapping, 0).reshape(B * T)
    kv, scales = as_stored(
        k, v, head_dim=D, dtype=kv_blocks.dtype, is_quantized=kv_scales is not None
    )
    kv_blocks = _write(kv_blocks, kv.reshape(B * T, 2, K, D), slots)
    if kv_scales is not None and scales is not None:
        kv_scales = _write(kv_scales, scales.reshape(B * T, 2, K), slots)
    return kv_blocks, kv_scales


def _write(pool: Array, new: Array, slots: Array) -> Array:
    """Write `new` [B*T, 2, K, ...] to its slots of `pool` [N, 2, K, S, ...]."""
    return jax.lax.platform_dependent(pool, new, slots, cpu=_write_loop, default=_write_scatter)


def _write_loop(pool: Array, new: Array, slots: Array) -> Array:
    """One update a token: on CPU up to 1.4 times faster than the scatter."""
    S, dtype = pool.shape[3], pool.dtype
    if dtype == jnp.float8_e4m3fn:
        # The CPU backend widens the whole pool to float16 at every update of e4m3; of bytes not.
        pool, new = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (pool, new))
    if slots.shape[0] == 1:
        # XLA unrolls a loop of one turn, and then copies the pool. The null block takes the second.
        new = jnp.pad(new, [(0, 1)] + [(0, 0)] * (new.ndim - 1))
        slots = jnp.pad(slots, (0, 1))

    def write_token(i, pool):
        update = jnp.expand_dims(new[i], (0, 3))  # [1, 2, K, 1, ...]
        at = (slots[i] // S, 0, 0, slots[i] % S) + (0,) * (pool.ndim - 4)
        return jax.lax.dynamic_update_slice(pool, update, at)

    pool = jax.lax.fori_loop(0, slots.shape[0], write_token, pool)
    return pool if pool.dtype == dtype else jax.lax.bitcast_convert_type(pool, dtype)


def _write_scatter(pool: Array, new: Array, slots: Array) -> Array:
    """All tokens at once, for devices where a loop means a launch a token."""
    S = pool.shape[3]
    return pool.at[slots // S, :, :, slots % S].set(new, mode="promise_in_bounds")
