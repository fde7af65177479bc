"""Faults that users met in similar systems, each a test named by its id in the collection."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention

STATIC = ("scale", "window", "soft_cap", "score_fn", "return_lse", "backend")
attend = jax.jit(paged_attention, static_argnames=STATIC)


@pytest.fixture(params=["reference", "xla"])
def backend(request):
    return request.param


@pytest.fixture
def op(backend):
    return functools.partial(attend, backend=backend)


@pytest.mark.parametrize("padded", [4, 8])
def test_b13_padding_rows_never_write_a_live_slot(backend, padded):
    rng = np.random.default_rng(0)
    S, K, D, N = 4, 2, 8, 7
    pool = rng.normal(size=(N, 2, K, S, D)).astype(np.float32)
    k = rng.normal(size=(padded, 1, K, D)).astype(np.float32)
    slots = np.full((padded, 1), -1, np.int32)  # the padding names the last slot of the pool
    slots[:3, 0] = [1 * S + 3, 2 * S, 3 * S + 1]  # blocks 4..6 are full and belong to others
    q_lens = np.zeros(padded, np.int32)
    q_lens[:3] = 1
    written = np.asarray(
        jax.jit(functools.partial(kv_write, backend=backend))(pool, k, 2 * k, slots, q_lens)
    )
    np.testing.assert_array_equal(written[4:], pool[4:])
    for row, (block, offset) in enumerate([(1, 3), (2, 0), (3, 1)]):
        np.testing.assert_array_equal(written[block, 0, :, offset], k[row, 0])
        np.testing.assert_array_equal(written[block, 1, :, offset], 2 * k[row, 0])
        others = [s for s in range(S) if s != offset]
        np.testing.assert_array_equal(written[block][:, :, others], pool[block][:, :, others])


def test_b16_every_order_of_a_batch_equals_batches_of_one(op):
    arrays = attention_cases.make(Case(kv_lens=(1, 4, 5, 9), block_size=4))
    q, pool, tables, kv_lens, q_lens = arrays.args
    for order in itertools.permutations(range(4)):
        o = list(order)
        out = op(q[o], pool, tables[o], kv_lens[o], q_lens[o])
        np.testing.assert_allclose(out, arrays.out[o], atol=1e-5)
    for b in range(4):
        one = slice(b, b + 1)
        out = op(q[one], pool, tables[one], kv_lens[one], q_lens[one])
        np.testing.assert_allclose(out, arrays.out[one], atol=1e-5)


@pytest.mark.parametrize("poison", [2**30, -1, "num_blocks"])
def test_b18_unused_table_entries_are_never_followed(op, poison):
    case = Case(kv_lens=(0, 1, 4, 8, 9), block_size=4)
    q, pool, tables, kv_lens, q_lens = attention_cases.make(case).args
    unused = np.arange(tables.shape[1]) >= -(-kv_lens // 4)[:, None]
    filled = np.where(unused, pool.shape[0] if poison == "num_blocks" else poison, tables)
    zeros = np.where(unused, 0, tables)
    np.testing.assert_array_equal(
        op(q, pool, filled.astype(np.int32), kv_lens, q_lens), op(q, pool, zeros, kv_lens, q_lens)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_b19_garbage_in_unwritten_slots_changes_nothing(op, dtype):
    lens = (*range(1, 10), 13)
    results = []
    for garbage in (0.0, math.nan, math.inf, 65504.0 if dtype == "float16" else 1e38):
        case = Case(kv_lens=lens, block_size=4, dtype=dtype, garbage=garbage)
        results.append(np.asarray(op(*attention_cases.make(case).args)).astype(np.float32))
    assert np.isfinite(results[0]).all()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_b22_an_inactive_row_is_zero_and_its_neighbours_do_not_notice(op, dtype):
    arrays = attention_cases.make(Case(kv_lens=(7, 5, 12), block_size=4, dtype=dtype))
    q, pool, tables, kv_lens, q_lens = arrays.args
    active = op(q, pool, tables, kv_lens, q_lens)
    off = np.int32([1, 0, 1])
    out = op(q, pool, tables, kv_lens * off, q_lens * off)
    np.testing.assert_array_equal(out[1], 0.0)
    np.testing.assert_array_equal(out[::2], active[::2])
    for b in (0, 2):
        one = slice(b, b + 1)
        alone = op(q[one], pool, tables[one], kv_lens[one], q_lens[one])
        atol = 1e-5 if dtype == "float32" else 3e-3
        np.testing.assert_allclose(np.float32(alone[0]), np.float32(out[b]), atol=atol, rtol=atol)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_b43_every_block_size(op, block_size):
    dtypes = itertools.cycle(["float32", "bfloat16", "float16"])
    dtype = next(itertools.islice(dtypes, block_size.bit_length(), None))
    lens = (1, block_size, 2 * block_size + 1)
    attention_cases.check(op, Case(kv_lens=lens, block_size=block_size, dtype=dtype))


def test_b45_impossible_calls_are_refused(backend):
    q, pool, tables, kv_lens, q_lens = attention_cases.make(
        Case(kv_lens=(5, 8), block_size=4, garbage=0.0)
    ).args

    def call(q=q, tables=tables, kv_lens=kv_lens):
        return paged_attention(q, pool, tables, kv_lens, q_lens, backend=backend)

    room = tables.shape[1] * 4
    with pytest.raises(ValueError, match=rf"kv_lens has values 5\.\.{room + 1}; must be within"):
        call(kv_lens=np.int32([5, room + 1]))
    with pytest.raises(ValueError, match=r"kv_lens has values -1\.\.5"):
        call(kv_lens=np.int32([5, -1]))
    for dtype in (np.int64, np.float32):
        with pytest.raises(ValueError, match=r"block_tables has dtype .*; must be int32"):
            call(tables=tables.astype(dtype))
    with pytest.raises(ValueError, match="q has 3 heads; must be a multiple of the 2 heads"):
        call(q=q[:, :, :3])


@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_b46_identical_rows_of_length_one_are_equal(op, block_size):
    q, pool, tables, _, _ = attention_cases.make(Case(kv_lens=(1,), block_size=block_size)).args
    B = 5
    ones = np.ones(B, np.int32)
    out = np.asarray(op(np.repeat(q, B, 0), pool, np.repeat(tables, B, 0), ones, ones))
    assert (out == out[:1]).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_b89_a_window_is_exactly_that_many_keys(op, window):
    S = 4
    for new in (1, 4):  # decode four blocks, and prefill them in rows of four
        for end in range(new, 4 * S + 1, 5):
            case = Case(kv_lens=(end,), q_lens=(new,), max_new=new, block_size=S, window=window)
            arrays = attention_cases.make(case)
            q, pool, tables, kv_lens, q_lens = arrays.args
            wide = np.pad(tables, ((0, 0), (0, 6 - tables.shape[1])))
            full = np.concatenate([pool, np.full((20 - len(pool), *pool.shape[1:]), np.nan)])
            out = op(q, full.astype(np.float32), wide, kv_lens, q_lens, window=window)
            np.testing.assert_allclose(out, arrays.out, atol=1e-5)
    counted = jnp.ones((3, 2, 1, S, 8)).at[:, 1].set(1.0)
    q = jnp.zeros((1, 1, 1, 8))
    _, lse = op(
        q, counted, np.int32([[1, 2]]), np.int32([8]), np.int32([1]), window=window, return_lse=True
    )
    assert round(float(np.exp(lse[0, 0, 0]))) == window
