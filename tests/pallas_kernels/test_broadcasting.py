"""Callers may forbid rank promotion, as JAX's own tests do."""

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.block_copy import block_copy
from pallas_kernels.devices import H100
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


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_64_bit_defaults(backend):
    case = Case(block_size=8, head_dim=64, window=9, dtype="bfloat16", kv_lens=(9, 17))
    arrays = attention_cases.make(case)
    q, pool, tables, kv_lens, q_lens = arrays.args
    with jax.enable_x64(True):

        @jax.jit
        def write_and_attend(pool):
            k = pool[:2, 0, :, :1].swapaxes(1, 2)  # [2, 1, K, D]
            slots = np.int32([[3], [4]])  # of the null block
            options = {"backend": backend, "interpret": True}
            pool = kv_write(pool, k, k, slots, np.int32([1, 1]), **options)
            return paged_attention(q, pool, tables, kv_lens, q_lens, window=9, **options)

        out = write_and_attend(pool)
    np.testing.assert_allclose(np.asarray(out, np.float64), arrays.out, atol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("num_new", [1, 64])
def test_kernels_lower_with_64_bit_defaults(backend, num_new):
    shape, bf16 = jax.ShapeDtypeStruct, np.dtype("bfloat16")
    args = (
        shape((4, num_new, 32, 128), bf16),
        shape((512, 2, 8, 16, 128), bf16),
        shape((4, 64), np.int32),
        shape((4,), np.int32),
        shape((4,), np.int32),
    )
    device = AbstractDevice(device_kind=H100.kind, num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.enable_x64(True), use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        attend = jax.jit(lambda *args: paged_attention(*args, backend=backend))
        assert attend.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
