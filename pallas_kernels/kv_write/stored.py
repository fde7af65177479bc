"""New keys and values as the pool stores them, for the backends in plain XLA."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.quantize import quantize


def as_stored(
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    *,
    head_dim: int,
    dtype: Any,
    is_quantized: bool,
) -> tuple[Shaped[Array, "B T 2 K D"], Float[Array, "B T 2 K"] | None]:
    """Keys and values side by side, cast or quantised and padded with zeros, and the scales."""
    kv, scales = jnp.stack([k, v], axis=2), None
    if is_quantized:
        kv, scales = quantize(kv, dtype)
    kv = kv.astype(dtype)
    missing = head_dim - kv.shape[-1]
    if missing:
        kv = jnp.pad(kv, [(0, 0)] * 4 + [(0, missing)])
    return kv, scales
