import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantize import _round, dequantize, quantize

DTYPES = ("int8", "float8_e4m3fn")


def vectors(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_error_is_within_half_a_step(dtype, x_dtype):
    x = vectors(50, 3, 64, dtype=x_dtype)
    stored, scale = jax.jit(quantize, static_argnums=1)(x, dtype)
    assert (stored.dtype, scale.dtype) == (dtype, "float32")
    assert (stored.shape, scale.shape) == (x.shape, x.shape[:-1])
    error = np.abs(np.asarray(dequantize(stored, scale, "float32")) - x.astype(np.float32))
    # int8's steps are equal; e4m3's are 1/8 of a power of two, and 2**-9 at the least.
    step = 1.0 if dtype == "int8" else np.maximum(np.abs(stored.astype(np.float32)) / 8, 2**-9)
    assert (error <= 0.501 * step * np.asarray(scale)[..., None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_is_kept(dtype):
    x = vectors(1000, 16)
    stored, scale = quantize(x, dtype)
    limit = {"int8": 127, "float8_e4m3fn": 448}[dtype]
    assert (np.abs(np.asarray(stored).astype(np.float32)).max(axis=-1) == limit).all()
    back = np.abs(np.asarray(dequantize(stored, scale, "float32"))).max(axis=-1)
    np.testing.assert_allclose(back, np.abs(x).max(axis=-1), rtol=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_tiny_vectors_come_back_as_zeros(dtype):
    x = np.zeros((4, 8), np.float32)
    x[1, 3], x[2, 3], x[3, 3] = 1e-44, -1e-37, 1e-30
    stored, scale = quantize(x, dtype)
    back = np.asarray(dequantize(stored, scale, "float32"))
    np.testing.assert_array_equal(back[:3], 0.0)
    np.testing.assert_allclose(back[3], x[3], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_vectors_come_back_as_nan_whole(dtype, bad):
    x = vectors(3, 8)
    x[1, 5] = bad
    stored, scale = quantize(x, dtype)
    back = np.asarray(dequantize(stored, scale, "float32"))
    assert np.isnan(back[1]).all()
    assert np.isfinite(back[[0, 2]]).all()
    np.testing.assert_array_equal(np.asarray(stored[1]).astype(np.float32), 0.0)


def test_ties_go_to_even_and_large_values_saturate():
    x = np.float32([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5]])
    np.testing.assert_array_equal(quantize(x, "int8")[0], [[127, 0, 2, 2, 0, -4]])
    x = np.float32([[3e38, -3e38, 1e38, 0.0]])
    for dtype in DTYPES:
        back = dequantize(*quantize(x, dtype), "float32")
        np.testing.assert_allclose(back, x, rtol=0.04)


def test_every_value_near_a_tie_is_rounded_to_the_nearest():
    ties = np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)
    x = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-200, 200)] + [ties])
    np.testing.assert_array_equal(jax.jit(_round)(x), np.rint(x))


def test_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for dtype in DTYPES:
            dequantize(*quantize(jnp.ones((2, 4), jnp.bfloat16), dtype), jnp.bfloat16)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype is int4; must be int8 or float8_e4m3fn"):
        quantize(jnp.ones((1, 4)), "int4")
