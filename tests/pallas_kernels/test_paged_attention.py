"""One suite for every backend of `paged_attention`."""

import dataclasses
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

BACKENDS = ("reference", "xla")
STATIC = ("scale", "window", "soft_cap", "score_fn", "return_lse", "backend")
jitted = jax.jit(paged_attention, static_argnames=STATIC)

AXES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "block_size": (1, 3, 16),
    "heads": ((1, 1), (2, 3), (1, 8)),
    "max_new": (1, 5),
    "window": (None, "1", "S-1", "S", "S+1"),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "score_fn": (False, True),
    "garbage": (math.nan, math.inf, 1e38),
}


@pytest.fixture(params=BACKENDS)
def op(request):
    return functools.partial(jitted, backend=request.param)


def as_case(row: dict) -> Case:
    S = row["block_size"]
    windows = {None: None, "1": 1, "S-1": max(1, S - 1), "S": S, "S+1": S + 1}
    row = dict(row, window=windows[row["window"]])
    row["num_kv_heads"], row["group"] = row.pop("heads")
    if row["dtype"] == "float16" and row["garbage"] == 1e38:
        row["garbage"] = 65504.0
    return Case(scale=0.3 if row["soft_cap"] else None, **row)


@pytest.mark.parametrize("row", attention_cases.pairwise(**AXES), ids=str)
def test_every_pair_of_settings(op, row):
    attention_cases.check(op, as_case(row))


@pytest.mark.long
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("block_size", [*AXES["block_size"], 2, 64])
def test_every_geometry(op, dtype, block_size):
    """The full product of what moves indices; what changes scores takes turns."""
    turns = ("soft_cap", "sinks", "score_fn", "garbage")
    axes = {name: AXES[name] for name in ("heads", "max_new", "window")}
    for i, row in enumerate(attention_cases.product(**axes)):
        options = {
            name: AXES[name][(i + k * (i // 3)) % len(AXES[name])] for k, name in enumerate(turns)
        }
        attention_cases.check(
            op, as_case({**row, **options, "dtype": dtype, "block_size": block_size})
        )
    jax.clear_caches()


def test_many_rows_in_groups_of_unequal_length(op):
    rng = np.random.default_rng(0)
    lens = tuple(int(n) for n in rng.integers(0, 400, size=19))
    attention_cases.check(op, Case(kv_lens=lens, block_size=8))
    attention_cases.check(op, Case(kv_lens=lens, block_size=8, window=50, sinks=True))


@pytest.mark.parametrize("window", [None, 7])
def test_chunks_of_a_prompt_equal_the_whole(op, window):
    whole = Case(kv_lens=(29,), q_lens=(29,), max_new=29, window=window)
    arrays = attention_cases.make(whole)
    q, pool, tables, _, _ = arrays.args
    for size in (1, 10):
        for start in range(0, 29, size):
            new = min(size, 29 - start)
            chunk = np.zeros((1, size, *q.shape[2:]), q.dtype)
            chunk[:, :new] = q[:, start : start + new]
            out = op(chunk, pool, tables, np.int32([start + new]), np.int32([new]), window=window)
            np.testing.assert_allclose(out[:, :new], arrays.out[:, start : start + new], atol=1e-5)
            np.testing.assert_array_equal(out[:, new:], 0.0)


def test_rows_of_one_sequence_in_one_step(op):
    whole = attention_cases.make(Case(kv_lens=(20,), q_lens=(20,), max_new=20))
    q, pool, tables, _, _ = whole.args
    rows = q.reshape(5, 4, *q.shape[2:])
    ends = np.int32([4, 8, 12, 16, 20])
    out = op(rows, pool, np.repeat(tables, 5, axis=0), ends, np.int32([4] * 5))
    np.testing.assert_allclose(out.reshape(whole.out.shape), whole.out, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_may_be_traced(backend):
    case = Case(block_size=3, kv_lens=(14, 6), window=4, max_new=2)
    arrays = attention_cases.make(dataclasses.replace(case, garbage=0.0))
    kwargs = {**arrays.kwargs, "window": None}

    @jax.jit
    def both(window):
        return paged_attention(*arrays.args, **{**kwargs, "window": window}, backend=backend)

    np.testing.assert_allclose(both(np.int32(4)), arrays.out, atol=1e-5)
    np.testing.assert_array_equal(both(np.int32(2**31 - 1)), both(np.int32(1000)))


def test_query_dtype_may_differ_from_the_pools(op):
    arrays = attention_cases.make(Case(dtype="bfloat16"))
    q, *rest = arrays.args
    out = op(q.astype(np.float32), *rest)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, arrays.out, atol=1e-5)  # the same values, summed in float32


def test_pool_may_store_head_dim_padded(op):
    arrays = attention_cases.make(Case(head_dim=12))
    q, pool, *rest = arrays.args
    padded = np.pad(pool, [(0, 0)] * 4 + [(0, 4)])
    np.testing.assert_allclose(op(q, padded, *rest), arrays.out, atol=1e-5)


def test_score_fn_may_hide_everything(op):
    arrays = attention_cases.make(Case(kv_lens=(9,), sinks=True))

    def hide(score, row, head, q_pos, k_pos):
        return jnp.where(head == 0, -jnp.inf, score)

    out, lse = op(*arrays.args, sinks=arrays.kwargs["sinks"], score_fn=hide, return_lse=True)
    np.testing.assert_array_equal(out[:, :, 0], 0.0)
    np.testing.assert_array_equal(lse[:, :, 0], -np.inf)
    np.testing.assert_allclose(out[:, :, 1:], arrays.out[:, :, 1:], atol=1e-5)


def test_lengths_and_entries_are_clamped_inside_jit(op):
    arrays = attention_cases.make(Case(kv_lens=(20, 20), block_size=4, garbage=0.0, max_new=2))
    q, pool, tables, _, _ = arrays.args
    tables = tables[:, :5]
    out = op(q, pool, tables, np.int32([99, -3]), np.int32([99, 7]))
    np.testing.assert_allclose(out[0], arrays.out[0], atol=1e-5)
    np.testing.assert_array_equal(out[1], 0.0)
    wild = np.where(tables == tables[0, 0], 2**30, tables)
    last = np.where(tables == tables[0, 0], pool.shape[0] - 1, tables)
    lens, new = np.int32([20, 20]), np.int32([2, 2])
    np.testing.assert_array_equal(op(q, pool, wild, lens, new), op(q, pool, last, lens, new))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_healthy_call_passes_debug_nans(backend):
    arrays = attention_cases.make(Case(garbage=0.0, window=3, sinks=True, max_new=2))
    with jax.debug_nans(True):
        jax.block_until_ready(
            paged_attention(*arrays.args, backend=backend, return_lse=True, **arrays.kwargs)
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_strict_dtype_promotion(backend):
    arrays = attention_cases.make(Case(dtype="bfloat16", sinks=True, soft_cap=3.0, window=5))
    with jax.numpy_dtype_promotion("strict"):
        paged_attention(*arrays.args, backend=backend, return_lse=True, **arrays.kwargs)


@pytest.mark.long
def test_long_context():
    lens = (100_000, 99_999, 65_537, 3)
    for window in (None, 4_000):
        case = Case(kv_lens=lens, block_size=16, num_kv_heads=1, window=window)
        attention_cases.check(functools.partial(jitted, backend="xla"), case)


def decode_step(pool, x, tables, kv_lens, slots):
    """A scan over layers that writes and attends, the pool in the carry."""
    L, P, _, K, S, D = pool.shape

    def layer(carry, index):
        pool, x = carry
        kv_blocks = pool.reshape(L * P, 2, K, S, D)
        new = x[:, :, :K]
        ones = jnp.ones_like(kv_lens)
        slots_here = slots + index * (P * S)
        kv_blocks = kv_write(kv_blocks, new, new, slots_here, ones, backend="xla")
        x = x + paged_attention(x, kv_blocks, tables + index * P, kv_lens, ones, backend="xla")
        return (kv_blocks.reshape(pool.shape), x), None

    return jax.lax.scan(layer, (pool, x), jnp.arange(L, dtype=jnp.int32))[0]


def compile_step(dtype, *, M: int = 64, P: int = 1400):
    L, K, S, D, H, B = 30, 3, 16, 64, 9, 32
    shape = jax.ShapeDtypeStruct
    return (
        jax.jit(decode_step, donate_argnums=0)
        .lower(
            shape((L, P, 2, K, S, D), dtype),
            shape((B, 1, H, D), dtype),
            shape((B, M), jnp.int32),
            shape((B,), jnp.int32),
            shape((B, 1), jnp.int32),
        )
        .compile()
        .memory_analysis()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pool_of_a_gigabyte_stays_in_place(dtype):
    memory = compile_step(dtype)
    pool_bytes = 30 * 1400 * 2 * 3 * 16 * 64 * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes


def test_memory_does_not_grow_with_the_table():
    narrow, wide = compile_step("float32", M=64), compile_step("float32", M=2048)
    table_bytes = 32 * 2048 * 4
    grown = wide.temp_size_in_bytes - narrow.temp_size_in_bytes
    assert grown < 4 * table_bytes  # keys and values of such a table take 192 * table_bytes a head
