"""8-bit keys and values: one float32 scale a token and head (symmetric, no zero point)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

# The largest stored magnitude. int8's -128 is not used, so that the range is symmetric.
MAX_STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)  # its reciprocal is finite too


def quantize(
    x: Float[Array, "*V D"], dtype: Any
) -> tuple[Shaped[Array, "*V D"], Float[Array, "*V"]]:
    """Store vectors in 8 bits: `x` is about `stored * scale`.

    A vector's largest magnitude becomes the largest that `dtype` holds, 127 or 448; the others are
    rounded to the nearest stored value, ties to even, so int8's error is at most half a scale.
    Vectors of zeros, or of magnitudes too small for a normal float32 scale (absmax under about
    5e-36), are stored with scale 0 and come back as zeros. A vector with a NaN or an infinity gets
    a NaN scale and comes back as NaN whole: what is broken stays visible.

    Args:
        x: vectors of any float dtype; the arithmetic is float32.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The stored elements, and a float32 scale a vector.

    Raises:
        ValueError: `dtype` is neither.

    >>> stored, scale = quantize(jnp.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]]), "int8")
    >>> stored.tolist(), [round(s, 6) for s in scale.tolist()]
    ([[32, -127, 64], [0, 0, 0]], [0.015748, 0.0])
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in MAX_STORED:
        raise ValueError(f"dtype is {dtype.name}; must be {' or '.join(MAX_STORED)}")
    x = x.astype(jnp.float32)
    scale, factor = scale_and_factor(magnitude(x).max(axis=-1), dtype)
    return store(x, factor[..., None], dtype), scale


# The steps of `quantize`, of operations that Pallas kernels have too: every backend rounds alike.


def magnitude(x: Array) -> Array:
    """|x|, and infinity for a NaN: a maximum of magnitudes then tells whether all are finite."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.float32(jnp.inf))


def scale_and_factor(top: Array, dtype: Any) -> tuple[Array, Array]:
    """Scales, and what elements are multiplied by to be stored (0: they are stored as 0).

    Args:
        top: the largest `magnitude` of each vector, float32.
        dtype: of the stored elements.
    """
    is_finite = top < jnp.float32(jnp.inf)
    scale = top * jnp.float32(1 / MAX_STORED[jnp.dtype(dtype).name])
    is_normal = is_finite & (scale >= jnp.float32(SMALLEST_SCALE))
    factor = jnp.where(is_normal, 1.0 / jnp.where(is_normal, scale, 1.0), 0.0)
    scale = jnp.where(is_normal, scale, 0.0)
    return jnp.where(is_finite, scale, jnp.float32(jnp.nan)), factor


def store(x: Array, factor: Array, dtype: Any) -> Array:
    """Elements as they are stored: scaled, rounded and cast."""
    dtype = jnp.dtype(dtype)
    limit = MAX_STORED[dtype.name]
    # A NaN or infinity times 0 is NaN: it must not reach the cast, which leaves its value open.
    scaled = jnp.where(factor > 0, x, 0.0) * factor
    scaled = jnp.clip(scaled, -limit, limit)  # casts to e4m3 overflow to NaN
    return (_round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)


def _round(x: Array) -> Array:
    """To the nearest integer, ties to even; Pallas Triton has no `jnp.round`.

    (Adding and subtracting 1.5 * 2**23 is shorter, but XLA may simplify it away.)
    """
    floor = jnp.floor(x)
    rest = x - floor
    is_odd = floor - 2.0 * jnp.floor(floor * 0.5)
    return floor + jnp.where(rest == 0.5, is_odd, jnp.where(rest > 0.5, 1.0, 0.0))


def dequantize(
    stored: Shaped[Array, "*V D"], scale: Float[Array, "*V"], dtype: Any
) -> Float[Array, "*V D"]:
    """`stored * scale`, multiplied in float32 and returned as `dtype`."""
    return (stored.astype(jnp.float32) * scale[..., None]).astype(dtype)
