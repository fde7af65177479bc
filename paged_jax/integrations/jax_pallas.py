"""The call of JAX's own GPU paged attention (deprecated since JAX 0.11), served by ours.

`paged_attention` here takes the arguments of
`jax.experimental.pallas.ops.gpu.paged_attention.paged_attention`, so that code and tests written
for it run on any of our backends by changing an import. JAX keeps keys and values in two arrays
`[K, P, S, D]`; each call copies them into one pool `[P, 2, K, S, D]`. For speed, convert once, with
`pool_from_jax_pages`, and call `pallas_kernels.paged_attention`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.paged_attention import paged_attention as paged_attention_op
from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES


def pool_from_jax_pages(
    k_pages: Shaped[Array, "K N S D"], v_pages: Shaped[Array, "K N S D"]
) -> Shaped[Array, "N 2 K S D"]:
    """One pool of blocks from JAX's two arrays of pages; page i becomes block i (a copy).

    Block 0 is an ordinary block to the ops; only this library's block manager keeps it empty.

    Raises:
      ValueError: the two differ in shape or dtype.
    """
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages is {k_pages.dtype}{list(k_pages.shape)} and v_pages is "
            f"{v_pages.dtype}{list(v_pages.shape)}; must be alike"
        )
    return jnp.stack([k_pages, v_pages]).transpose(2, 0, 1, 3, 4)


def paged_attention(
    q: Float[Array, "B H D"],
    k_pages: Shaped[Array, "K N S D"],
    v_pages: Shaped[Array, "K N S D"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"] | None,
    k_scales_pages: Float[Array, "K N S"] | None = None,
    v_scales_pages: Float[Array, "K N S"] | None = None,
    *,
    attn_logits_soft_cap: float | None = None,
    backend: str | None = None,
    interpret: bool = False,
    **tuning: Any,
) -> Float[Array, "B H D"]:
    """Decode attention with the arguments and meaning of JAX's function: scores are not scaled.

    Args:
      q: one query a row.
      k_pages: key pages; 8-bit ones come with `k_scales_pages`.
      v_pages: value pages, likewise.
      block_tables: each row's pages in logical order.
      lengths: tokens a row; None means that every table is full.
      k_scales_pages: what is stored, times its scale, is the key.
      v_scales_pages: likewise for values.
      attn_logits_soft_cap: scores become ``cap * tanh(score / cap)``.
      backend: of our op; None is the best one that takes the call.
      interpret: run a GPU backend in Pallas's interpreter.
      **tuning: JAX's tile sizes (`block_h`, `pages_per_compute_block`, `k_splits`, `num_warps`,
        `num_stages`) and `debug`, `mask_value`: accepted, without effect here.

    Returns:
      The output in q's dtype.

    Raises:
      ValueError: an unknown argument, or arrays that do not fit.
      NotImplementedError: the named backend cannot take the call.
    """
    unknown = sorted(set(tuning) - _TUNING)
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r}; must be one of {sorted(_TUNING)}")
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [B, H, D]")
    kv_scales = None
    if (
        k_scales_pages is not None
        and v_scales_pages is not None
        and _keeps_8_bits(k_pages, v_pages)
    ):
        scales = jnp.stack([k_scales_pages, v_scales_pages]).transpose(2, 0, 1, 3)  # [N, 2, K, S]
        kv_scales = scales.astype(jnp.float32)
    else:  # only one of the two is quantised, or in a type that our pools do not hold
        k_pages = _dequantized(k_pages, k_scales_pages, q.dtype)
        v_pages = _dequantized(v_pages, v_scales_pages, q.dtype)
    if lengths is None:
        lengths = jnp.full(q.shape[:1], block_tables.shape[1] * k_pages.shape[2], jnp.int32)
    lengths = jnp.asarray(lengths)
    out = paged_attention_op(
        q[:, None],
        pool_from_jax_pages(k_pages, v_pages),
        jnp.asarray(block_tables),
        lengths,
        jnp.minimum(lengths, 1),
        scale=1.0,
        soft_cap=attn_logits_soft_cap,
        kv_scales=kv_scales,
        backend=backend,
        interpret=interpret,
    )
    assert not isinstance(out, tuple)  # no lse was asked for
    return out[:, 0]


_TUNING = {
    "block_h",
    "pages_per_compute_block",
    "k_splits",
    "num_warps",
    "num_stages",
    "debug",
    "mask_value",
}


def _keeps_8_bits(k_pages: Array, v_pages: Array) -> bool:
    return k_pages.dtype == v_pages.dtype and str(k_pages.dtype) in QUANTIZED_DTYPES


def _dequantized(pages: Array, scales: Array | None, dtype: Any) -> Array:
    if scales is None:
        return pages.astype(dtype)
    return (pages.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]).astype(dtype)
