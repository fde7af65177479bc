"""Callers may forbid rank promotion, as JAX's own tests do."""

import jax
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_attention(backend):
    case = Case(block_size=8, head_dim=32, window=9, sinks=True, soft_cap=2.0, max_new=2)
    arrays = attention_cases.make(case)
    with jax.numpy_rank_promotion("raise"):
        out = jax.jit(
            lambda *args: paged_attention(*args, backend=backend, interpret=True, **arrays.kwargs)
        )(*arrays.args)
    np.testing.assert_allclose(out, arrays.out, atol=1e-5)


def test_write_and_copy():
    pool, k = np.zeros((1, 3, 2, 2, 4, 16), np.float32), np.ones((1, 1, 2, 16), np.float32)
    with jax.numpy_rank_promotion("raise"):
        written = kv_write(pool[0], k, k, np.int32([[5]]), np.int32([1]))
        copied = block_copy(written[None], np.int32([1]), np.int32([2]))
    np.testing.assert_array_equal(copied[0, 2], written[1])
