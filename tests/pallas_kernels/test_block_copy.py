import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import block_copy, check_copies
from pallas_kernels.block_copy.xla import _copy_all, _copy_loop

SRC, DST = np.int32([1, 1, 5, 0, 0]), np.int32([3, 2, 4, 0, 0])


def pool(dtype=np.float32):
    return np.random.default_rng(0).normal(size=(3, 7, 2, 2, 3, 4)).astype(dtype)


FORMS = {
    "reference": functools.partial(block_copy, backend="reference"),
    "xla": functools.partial(block_copy, backend="xla"),
    "loop": _copy_loop,
    "all": _copy_all,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_copies_every_layer(form, dtype):
    before = pool(dtype)
    want = before.copy()
    want[:, [3, 2, 4]] = before[:, [1, 1, 5]]
    np.testing.assert_array_equal(FORMS[form](*map(jnp.asarray, (before, SRC, DST))), want)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_ids_are_clamped_inside_jit(backend):
    copy = jax.jit(block_copy, static_argnames="backend")
    before = pool()
    out = copy(before, np.int32([-1]), np.int32([99]), backend=backend)
    np.testing.assert_array_equal(out[:, 6], before[:, 0])
    np.testing.assert_array_equal(out[:, :6], before[:, :6])


def test_in_place_when_donated():
    shape = jax.ShapeDtypeStruct
    L, P, K, S, D = 30, 1400, 3, 16, 64
    memory = (
        jax.jit(functools.partial(block_copy, backend="xla"), donate_argnums=0)
        .lower(
            shape((L, P, 2, K, S, D), jnp.float32),
            shape((32,), jnp.int32),
            shape((32,), jnp.int32),
        )
        .compile()
        .memory_analysis()
    )
    pool_bytes = L * P * 2 * K * S * D * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.001 * pool_bytes


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1, 2], [2, 3], "src and dst both name block 2"),
        ([4], [4], "src and dst both name block 4"),
        ([1, 2], [3, 3], "dst names block 3 more than once"),
        ([7], [1], r"src has values 7\.\.7; must be within 0\.\.6"),
        ([1], [-1], r"dst has values -1\.\.-1; must be within 0\.\.6"),
        ([1], [0], "dst names the null block 0"),
        ([0], [1], "src names the null block 0"),
    ],
)
def test_pairs_refused(src, dst, message):
    with pytest.raises(ValueError, match=message):
        check_copies(src, dst, num_blocks=7)
    with pytest.raises(ValueError, match=message):
        block_copy(pool(), np.int32(src), np.int32(dst))


def test_shapes_refused():
    with pytest.raises(ValueError, match=r"kv_blocks has shape .*; must be \[L, P, 2, K, S, D\]"):
        block_copy(pool()[0], SRC, DST)
    with pytest.raises(ValueError, match=r"src has shape \(1, 5\); must be \[C\]"):
        block_copy(pool(), SRC[None], DST)
    with pytest.raises(ValueError, match=r"dst has shape \(4,\); must be \(5,\)"):
        block_copy(pool(), SRC, DST[:4])
    with pytest.raises(ValueError, match="src has dtype int64"):
        block_copy(pool(), SRC.astype(np.int64), DST)


def test_no_pairs_and_only_padding():
    check_copies([], [], num_blocks=7)
    check_copies([0, 0], [0, 0], num_blocks=7)
    empty = np.zeros(0, np.int32)
    np.testing.assert_array_equal(block_copy(pool(), empty, empty), pool())
