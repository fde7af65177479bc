"""Attention of one layer over a contiguous cache: what the paged op is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Most positions that are read at a time: their keys and values stay in a fast cache.
DENSE_SLICE = 256


class Queries(NamedTuple):
    """What each row asks of a layer; ``rows`` are their numbers in the batch."""

    q: Float[Array, "B T H D"]
    starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    rows: Int[Array, "B"]


def dense_attention(
    queries: Queries,
    kv: Float[Array, "L N 2 K C D"],
    layer: Int[Array, ""] | int,
    *,
    regions: Int[Array, "B"] | None = None,
    scale: float | None = None,
    window: Int[Array, ""] | int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    score_fn: Callable[..., Array] | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention of one layer of a contiguous cache, read in slices of positions.

    A whole layer would be copied before it is read, and positions that no row has reached would be
    computed. Independent of the paged op on purpose: the two are compared with each other.

    Args:
      queries: of each row, with their first positions.
      kv: keys (index 0 of the third axis) and values of all layers, the new ones included.
      layer: the layer, traced or not.
      regions: the region of each row; None: row b has region b.
      scale: see ``KVCache.attend``, as for the rest.
      window: likewise.
      soft_cap: likewise.
      sinks: likewise.
      score_fn: likewise.

    Returns:
      Outputs in q's dtype; zeros at padding.
    """
    q, starts, q_lens, rows = queries
    B, T, H, D = q.shape
    K, C = kv.shape[3:5]
    G, width = H // K, -(-C // -(-C // DENSE_SLICE))  # as equal as can be
    factor = D**-0.5 if scale is None else scale
    # Batch axes first: XLA on CPU multiplies 16-bit operands into float32 in this order only.
    grouped = q.astype(kv.dtype).reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    kv_lens = jnp.where(q_lens > 0, starts + q_lens, 0)
    positions = starts[:, None] + jnp.arange(T, dtype=jnp.int32)  # [B, T]
    is_query = jnp.arange(T) < q_lens[:, None]  # [B, T]
    rows, heads = rows.reshape(B, 1, 1, 1, 1), jnp.arange(H).reshape(1, K, G, 1, 1)

    def attend(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = sums
        # The last slice ends at C: what it shares with the one before was seen there.
        begin = jnp.minimum(index * width, C - width)
        k_pos = begin + jnp.arange(width, dtype=jnp.int32)
        is_written = (k_pos < kv_lens[:, None]) & (k_pos >= index * width)  # [B, width]
        part = _read(kv, layer, begin, width, regions)  # [B, 2, K, width, D]
        scores = factor * jnp.einsum(
            "bkgtd,bkcd->bkgtc", grouped, part[:, 0], preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if score_fn is not None:
            scores = score_fn(scores, rows, heads, positions[:, None, None, :, None], k_pos)
        seen = is_written[:, None] & (k_pos <= positions[..., None]) & is_query[..., None]
        if window is not None:
            seen &= k_pos > positions[..., None] - window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)  # seen: [B, T, width]
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        weights, decay = jnp.exp(scores - shift[..., None]), jnp.exp(top - shift)
        values = jnp.where(is_written[:, None, :, None], part[:, 1], 0)
        new = jnp.einsum(
            "bkgtc,bkcd->bkgtd",
            weights.astype(kv.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * decay + jnp.sum(weights, axis=-1), out * decay[..., None] + new

    if sinks is None:
        top, total = jnp.full((B, K, G, T), -jnp.inf), jnp.zeros((B, K, G, T))
    else:
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, G, 1), (B, K, G, T))
        total = jnp.ones((B, K, G, T))
    num_slices = -(-jnp.max(kv_lens) // width)
    start = (top, total, jnp.zeros((B, K, G, T, D)))
    _, total, out = jax.lax.fori_loop(0, num_slices, attend, start)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    return jnp.where(is_query[:, :, None, None], out, 0).astype(q.dtype)


def _read(kv: Array, layer: Any, begin: Array, width: int, regions: Array | None) -> Array:
    """``width`` positions of each row's region from ``begin`` on: ``[B, 2, K, width, D]``."""
    size = (1, 1, *kv.shape[2:4], width, kv.shape[5])
    if regions is None:
        size = (1, *kv.shape[1:4], width, kv.shape[5])
        return jax.lax.dynamic_slice(kv, (layer, 0, 0, 0, begin, 0), size)[0]

    def read(region: Array) -> Array:
        return jax.lax.dynamic_slice(kv, (layer, region, 0, 0, begin, 0), size)[0, 0]

    return jax.vmap(read)(regions)
