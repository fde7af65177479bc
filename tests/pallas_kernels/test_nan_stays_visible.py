"""NaN in what a row does read reaches its output and lse, on every backend, and no other row's."""

import jax
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.paged_attention import paged_attention

CASE = Case(block_size=8, head_dim=64, kv_lens=(20, 40, 9), garbage=0.0, dtype="bfloat16")


def run(backend, q, *args, **options):
    call = jax.jit(
        lambda *args: paged_attention(
            *args, backend=backend, interpret=True, return_lse=True, **options
        )
    )
    return (np.asarray(x, np.float32) for x in call(q, *args))


@pytest.mark.parametrize("backend", ["reference", "xla", "triton", "mosaic"])
@pytest.mark.parametrize("where", ["query", "first key", "last key"])
def test_nan(backend, where):
    if backend == "mosaic" and where == "first key":
        pytest.skip("seconds a run; the others show it")
    q, pool, tables, kv_lens, q_lens = attention_cases.make(CASE).args
    if where == "query":
        q[1, 0, 0, 3] = np.nan
    else:
        position = 0 if where == "first key" else kv_lens[1] - 1
        pool[tables[1, position // 8], 0, 0, position % 8, 5] = np.nan
    out, lse = run(backend, q, pool, tables, kv_lens, q_lens)
    assert np.isnan(out[1, 0, 0]).all()
    assert np.isnan(lse[1, 0, 0])
    assert np.isfinite(out[[0, 2]]).all()
    assert np.isfinite(lse[[0, 2]]).all()
    assert np.isfinite(out[1, 0, 2:]).all()  # the heads of the other key/value head


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_nan_in_a_long_context_of_several_splits(backend):
    case = Case(block_size=8, head_dim=64, kv_lens=(700,), garbage=0.0, num_kv_heads=1)
    q, pool, tables, kv_lens, q_lens = attention_cases.make(case).args
    pool[tables[0, 41], 0, 0, 2, 5] = np.nan
    out, lse = run(backend, q, pool, tables, kv_lens, q_lens)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
