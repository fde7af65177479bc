"""`paged_attention`, obviously right: one row at a time, everything gathered, float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.validate import clamp_lens


def paged_attention_reference(
    q: Float[Array, "B T H D"],
    kv_blocks: Float[Array, "N 2 K S D"],
    block_tables: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    scale: float | Array,
    window: int | Array | None,
    soft_cap: float | Array | None,
    sinks: Float[Array, "H"] | None,
    kv_scales: Float[Array, "N 2 K S"] | None,
    score_fn: Callable[..., Array] | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there); returns the output and the lse."""
    N, _, K, S, D = kv_blocks.shape
    T, H = q.shape[1:3]
    M = block_tables.shape[1]
    kv_lens, q_lens = clamp_lens(kv_lens, q_lens, num_slots=M * S, max_new=T)

    def attend_row(args):
        row, q, table, kv_len, q_len = args
        k_pos = jnp.arange(M * S, dtype=jnp.int32)
        q_pos = kv_len - q_len + jnp.arange(T, dtype=jnp.int32)
        mask = (k_pos <= q_pos[:, None]) & (k_pos < kv_len)  # [T, M*S]
        mask &= (jnp.arange(T) < q_len)[:, None]
        if window is not None:
            mask &= k_pos > q_pos[:, None] - jnp.asarray(window, jnp.int32)

        # Entries past the context may hold anything: block 0 is read in their place, and masked.
        blocks = jnp.where(k_pos < kv_len, jnp.repeat(table, S), 0)
        blocks = jnp.clip(blocks, 0, N - 1)
        kv = kv_blocks[blocks, :, :, k_pos % S].astype(jnp.float32)  # [M*S, 2, K, D]
        if kv_scales is not None:
            kv = kv * kv_scales[blocks, :, :, k_pos % S][..., None]
        kv = jnp.where(mask.any(axis=0)[:, None, None, None], kv, 0.0)

        q = q.astype(jnp.float32).reshape(T, K, H // K, D)
        score = jnp.einsum("tkgd,ckd->kgtc", q, kv[:, 0], precision="highest")
        score = score.reshape(H, T, M * S) * jnp.asarray(scale, jnp.float32)
        if soft_cap is not None:
            cap = jnp.asarray(soft_cap, jnp.float32)
            score = cap * jnp.tanh(score / cap)
        if score_fn is not None:
            head = jnp.arange(H, dtype=jnp.int32)[:, None, None]
            score = score_fn(score, row, head, q_pos[:, None], k_pos)
        score = jnp.where(mask, score, -jnp.inf)

        # The shift is any finite number: 0 where nothing is attended.
        shift = score.max(axis=-1)  # [H, T]
        if sinks is not None:
            shift = jnp.maximum(shift, sinks.astype(jnp.float32)[:, None])
        shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
        weight = jnp.exp(score - shift[..., None])
        attended = weight.sum(axis=-1)
        total = attended
        if sinks is not None:
            total = total + jnp.exp(sinks.astype(jnp.float32)[:, None] - shift)
        weight = weight / jnp.where(total > 0, total, 1.0)[..., None]
        out = jnp.einsum(
            "kgtc,ckd->tkgd", weight.reshape(K, H // K, T, -1), kv[:, 1], precision="highest"
        )
        nothing = attended == 0
        lse = jnp.where(nothing, -jnp.inf, jnp.log(jnp.where(nothing, 1.0, attended)))
        return out.reshape(T, H, D), (lse + shift).T

    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    out, lse = jax.lax.map(attend_row, (rows, q, block_tables, kv_lens, q_lens))
    return out.astype(q.dtype), lse
