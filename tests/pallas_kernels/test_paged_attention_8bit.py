"""8-bit pools with scales, on the backends that run anywhere."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantize import dequantize

STATIC = ("scale", "window", "soft_cap", "score_fn", "return_lse", "backend")
jitted = jax.jit(paged_attention, static_argnames=STATIC)
KV_DTYPES = ("int8", "float8_e4m3fn")

AXES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_dtype": KV_DTYPES,
    "block_size": (1, 3, 16),
    "group": (1, 7),
    "max_new": (1, 5),
    "window": (None, 1, 4, 17),
    "sinks": (False, True),
    "soft_cap": (None, 2.0),
    "garbage": (math.nan, math.inf, 1e38),
}


@pytest.fixture(params=("reference", "xla"))
def op(request):
    return functools.partial(jitted, backend=request.param)


@pytest.mark.parametrize("row", attention_cases.pairwise(**AXES), ids=str)
def test_every_pair_of_settings(op, row):
    attention_cases.check(op, Case(**row))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_equals_a_float_pool_of_the_dequantised_values(op, kv_dtype):
    arrays = attention_cases.make(Case(kv_dtype=kv_dtype, garbage=0.0, max_new=3))
    q, pool, *rest = arrays.args
    floats = dequantize(jnp.asarray(pool), jnp.asarray(arrays.kwargs["kv_scales"]), jnp.float32)
    out = op(q, pool, *rest, kv_scales=arrays.kwargs["kv_scales"])
    np.testing.assert_allclose(out, op(q, floats, *rest), atol=2e-6)


@pytest.mark.parametrize(("num_rows", "num_new"), [(1, 1), (32, 1), (4, 32)])
def test_a_scan_over_layers_leaves_pool_and_scales_in_place(num_rows, num_new):
    """Of int8. XLA's CPU backend widens e4m3 to float16 for everything, so there it holds more."""
    L, P, K, S, D, H = 30, 1400, 3, 16, 64, 9
    shape = jax.ShapeDtypeStruct

    def step(pool, x, tables, lens):
        def layer(carry, index):
            (blocks, scales), x = carry
            new, slots = x[:, :, :K], tables[:, :num_new] * S + index * (P * S)
            blocks, scales = kv_write(
                blocks, new, new, slots, lens, kv_scales=scales, backend="xla"
            )
            x = x + paged_attention(
                x, blocks, tables + index * P, lens, lens, kv_scales=scales, backend="xla"
            )
            return ((blocks, scales), x), None

        return jax.lax.scan(layer, (pool, x), jnp.arange(L, dtype=jnp.int32))[0]

    pool = (
        shape((L * P, 2, K, S, D), jnp.int8),
        shape((L * P, 2, K, S), jnp.float32),
    )
    args = (
        pool,
        shape((num_rows, num_new, H, D), jnp.float32),
        shape((num_rows, 64), jnp.int32),
        shape((num_rows,), jnp.int32),
    )
    memory = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    pool_bytes = L * P * 2 * K * S * (D + 4)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
