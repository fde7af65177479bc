"""Causal attention of whole rows, with nothing kept: what models train with."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paged_jax.cache import ScoreFn


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["q_lens"], meta_fields=["recompute_scores"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class UncachedAttention:
    """A ``KVCache`` that stores nothing: a row's first token is at position 0, its last the end.

    Every model that serves from a pool trains with it unchanged: all of it is differentiable in
    reverse, by ``q``, ``k``, ``v`` and ``sinks``. Padding gets zeros and gives no gradient, even
    where it holds NaN.

    Attributes:
      q_lens: real tokens of each row; None: all T.
      recompute_scores: compute the scores once more in the backward pass instead of keeping
        ``[B, H, T, T]`` arrays of every layer for it.
    """

    q_lens: Int[Array, "B"] | None = None
    recompute_scores: bool = False

    def attend(
        self,
        layer: Int[Array, ""] | int,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        scale: float | None = None,
        window: Int[Array, ""] | int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        score_fn: ScoreFn | None = None,
    ) -> tuple[Float[Array, "B T H D"], UncachedAttention]:
        """See ``KVCache.attend``; positions are counted from the row's first token."""
        del layer
        options = {"scale": scale, "soft_cap": soft_cap, "score_fn": score_fn}
        attend = functools.partial(causal_attention, **options)
        if self.recompute_scores:
            attend = jax.checkpoint(attend)
        return attend(q, k, v, q_lens=self.q_lens, window=window, sinks=sinks), self


def causal_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    scale: float | None = None,
    window: Int[Array, ""] | int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    score_fn: ScoreFn | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention of rows that begin at position 0, all scores at once.

    ``jax.nn.dot_product_attention`` has no soft cap, no sinks and no score function, and the
    baseline's ``dense_attention`` loops over as many slices as the longest row has, which has no
    reverse derivative.

    Args:
      q: queries.
      k: keys.
      v: values.
      q_lens: real tokens of each row; None: all T.
      scale: see ``KVCache.attend``, as for the rest.
      window: likewise.
      soft_cap: likewise.
      sinks: likewise.
      score_fn: likewise.

    Returns:
      Outputs in q's dtype; zeros at padding.
    """
    B, T, H, D = q.shape
    K, G = k.shape[2], H // k.shape[2]
    positions = jnp.arange(T, dtype=jnp.int32)
    seen = positions <= positions[:, None]  # [T, T]: query, key
    if window is not None:
        seen &= positions > positions[:, None] - window
    is_real = None
    if q_lens is not None:
        is_real = positions < q_lens[:, None]  # [B, T]
        # Also what is masked afterwards: NaN times a gradient of zero is NaN.
        q, k, v = (jnp.where(is_real[..., None, None], x, 0) for x in (q, k, v))
    # Batch axes first: XLA on CPU multiplies 16-bit operands into float32 in this order only.
    grouped = q.reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    keys, values = (x.astype(q.dtype).swapaxes(1, 2) for x in (k, v))  # [B, K, T, D]
    scores = (D**-0.5 if scale is None else scale) * jnp.einsum(
        "bkgtd,bkcd->bkgtc", grouped, keys, preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if score_fn is not None:
        rows = jnp.arange(B, dtype=jnp.int32).reshape(B, 1, 1, 1, 1)
        heads = jnp.arange(H, dtype=jnp.int32).reshape(1, K, G, 1, 1)
        scores = score_fn(scores, rows, heads, positions[:, None], positions)
    weights = _softmax(jnp.where(seen, scores, -jnp.inf), sinks)
    out = jnp.einsum(
        "bkgtc,bkcd->bkgtd",
        weights.astype(q.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    if is_real is not None:
        out = jnp.where(is_real[..., None, None], out, 0)
    return out.astype(q.dtype)


def _softmax(scores: Float[Array, "B K G T C"], sinks: Float[Array, "H"] | None) -> Array:
    """Weights of the keys; every query attends to one at least, its own."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    K, G = scores.shape[1:3]
    logits = sinks.astype(jnp.float32).reshape(K, G, 1, 1)
    extra = jnp.broadcast_to(logits, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
