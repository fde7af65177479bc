"""Faults that users met in similar GPU kernels (tests/data/field_reports.json), on every backend.

The GPU backends run in Pallas's interpreters, which clamp what a GPU would read wildly: what CUDA
makes of the same kernels is in test_cuda_lowering.py and in the compile report.
"""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from paged_jax_scripts.aot.cases import all_cases
from paged_jax_scripts.aot.compiler import lower_for
from paged_jax_scripts.aot.programs import program
from paged_jax_scripts.aot.targets import TARGETS
from paged_jax_scripts.aot.triton_ir import narrow_accesses, triton_calls
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention

STATIC = ("scale", "window", "soft_cap", "score_fn", "return_lse", "backend", "interpret")
attend = jax.jit(paged_attention, static_argnames=STATIC)
FAST = ("reference", "xla", "triton")  # a run of Mosaic's interpreter takes seconds


def op(backend):
    return functools.partial(attend, backend=backend, interpret=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_b19_garbage_in_unwritten_slots_changes_nothing(backend, dtype):
    if backend == "mosaic" and dtype == "float32":
        pytest.skip("mosaic takes pools of 16 bits")
    lens = (1, 7, 8, 9, 13, 17)
    garbages = [0.0, math.nan, math.inf, 65504.0 if dtype == "float16" else 1e38]
    results = []
    for garbage in garbages if backend == "triton" else garbages[:2]:
        case = Case(kv_lens=lens, block_size=8, head_dim=64, dtype=dtype, garbage=garbage)
        results.append(np.asarray(op(backend)(*attention_cases.make(case).args), np.float32))
    assert np.isfinite(results[0]).all()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b49_lengths_that_no_tile_divides(backend, dtype):
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(1, 300, size=12))
    case = Case(kv_lens=(*lens, 192), block_size=16, head_dim=64, dtype=dtype, num_kv_heads=1)
    attention_cases.check(op(backend), case)


@pytest.mark.parametrize("backend", FAST)
def test_b51_prefill_after_a_context(backend):
    S = 16
    rows = list(itertools.product((1, 3, 17, 64), (0, 1, S, 5 * S + 2)))
    q_lens = tuple(new for new, _ in rows)
    kv_lens = tuple(new + context for new, context in rows)
    case = Case(kv_lens=kv_lens, q_lens=q_lens, max_new=64, block_size=S, head_dim=64)
    attention_cases.check(op(backend), case)


HEADS = [(1, 1), (8, 1), (32, 1), (71, 1), (12, 3), (32, 8), (40, 8), (28, 4)]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_b52_any_number_of_heads_a_group(backend, num_heads, num_kv_heads):
    group = num_heads // num_kv_heads
    case = Case(kv_lens=(1, 30), block_size=16, head_dim=64, num_kv_heads=num_kv_heads, group=group)
    attention_cases.check(op(backend), case)  # at the default scale


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(71, 1), (28, 4)])
def test_b52_groups_in_mosaic(num_heads, num_kv_heads):
    group = num_heads // num_kv_heads
    case = Case(kv_lens=(30,), block_size=16, head_dim=64, num_kv_heads=num_kv_heads, group=group)
    attention_cases.check(op("mosaic"), Case(**{**vars(case), "dtype": "bfloat16"}))


@pytest.mark.parametrize("backend", [*FAST, "mosaic"])
def test_b54_a_last_tile_that_overruns_the_pool(backend):
    """The row's last block is the pool's last, and a tile is longer than what it holds."""
    case = Case(kv_lens=(61,), block_size=8, head_dim=64, dtype="bfloat16", garbage=0.0)
    arrays = attention_cases.make(case)
    q, pool, tables, kv_lens, q_lens = arrays.args
    used, last = tables[:, :8], pool.shape[0] - 1
    order = np.arange(last + 1)
    order[[last, used[0, -1]]] = used[0, -1], last  # its own inverse
    ids = order[used].astype(np.int32)
    out = op(backend)(q, pool[order], ids, kv_lens, q_lens)
    np.testing.assert_allclose(np.asarray(out, np.float64), arrays.out, atol=2e-2)


def test_b55_offsets_of_a_pool_above_two_to_the_31():
    """Block 65535 of such a pool is right, and later ones too: rows fit int32, offsets need not."""
    (case,) = [
        case
        for case in all_cases()
        if case.kind == "decode" and case.is_big and case.backend == "triton"
    ]
    lowered = lower_for(TARGETS["h100"].device.kind, program(case))
    calls = triton_calls(lowered)
    assert max(size for call in calls for size in call.num_elements) > 2**31
    assert [line for call in calls for line in narrow_accesses(call)] == []
    shape = jax.ShapeDtypeStruct
    pool = shape(
        (140_000 * 64, 2, 8, 16, 128), np.dtype("bfloat16")
    )  # rows that int32 cannot count
    k, ints = shape((1, 1, 8, 128), np.dtype("bfloat16")), shape((1,), np.int32)
    with pytest.raises(ValueError, match=r"kv_blocks has shape .*; .* must be under 2\*\*31"):
        jax.eval_shape(kv_write, pool, k, k, shape((1, 1), np.int32), ints)


@pytest.mark.parametrize("window", [1, 7, 8, 9])
@pytest.mark.parametrize("new", [1, 4])
def test_b89_a_window_is_exactly_that_many_keys(new, window):
    case = Case(
        kv_lens=tuple(range(new, 33, 5)),
        max_new=new,
        block_size=8,
        head_dim=64,
        window=window,
    )
    attention_cases.check(op("triton"), case)


def test_b89_windows_in_mosaic():
    case = Case(kv_lens=(9, 32), block_size=8, head_dim=64, window=8, dtype="bfloat16")
    attention_cases.check(op("mosaic"), case)
