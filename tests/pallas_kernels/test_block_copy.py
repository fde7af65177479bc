"""One suite for every backend of `block_copy`, `block_gather` and `block_scatter`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.block_copy import block_copy, block_gather, block_scatter, check_copies
from pallas_kernels.block_copy.api import BACKENDS as BACKENDS_OF_OP
from pallas_kernels.block_copy.call import CopyCall
from pallas_kernels.block_copy.xla import _copy_all, _copy_loop, _scatter_all, _scatter_loop
from pallas_kernels.devices import A100, H100

BACKENDS = ("reference", "xla", "triton", "mosaic")
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
SRC, DST = np.int32([1, 1, 5, 0, 0]), np.int32([3, 2, 4, 0, 0])
STATIC = ("backend", "interpret")


def pool(dtype="float32", num_blocks=7):
    """Blocks and, for 8 bits, their scales."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(-99, 99, size=(3, num_blocks, 2, 2, 8, 16)).astype(jnp.dtype(dtype))
    has_scales = dtype in ("int8", "float8_e4m3fn")
    return blocks, rng.normal(size=blocks.shape[:5]).astype(np.float32) if has_scales else None


def named(function, backend):
    return functools.partial(
        jax.jit(function, static_argnames=STATIC), backend=backend, interpret=True
    )


def as_pair(out, scales):
    return (out, None) if scales is None else out


def check(out, before, want, *, null_block_too=False):
    """Blocks and scales hold what they must; the null block is nobody's unless said otherwise."""
    for x, old, ids in zip(as_pair(out, before[1]), before, want, strict=True):
        if old is None:
            continue
        assert x.dtype == old.dtype
        first = 0 if null_block_too else 1
        np.testing.assert_array_equal(np.asarray(x)[:, first:], ids[:, first:])


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_every_layer(backend, dtype):
    before = pool(dtype)
    want = [None if x is None else x.copy() for x in before]
    for x, old in zip(want, before, strict=True):
        if x is not None:
            x[:, [3, 2, 4]] = old[:, [1, 1, 5]]
    out = named(block_copy, backend)(before[0], SRC, DST, kv_scales=before[1])
    check(out, before, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_every_layer(backend, dtype):
    before = pool(dtype)
    ids = np.int32([4, 1, 4, 0])
    out = named(block_gather, backend)(before[0], ids, kv_scales=before[1])
    want = [None if x is None else x[:, ids] for x in before]
    check(out, before, want, null_block_too=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatters_every_layer(backend, dtype):
    before = pool(dtype)
    blocks = pool(dtype, num_blocks=3)
    ids = np.int32([6, 0, 2])
    want = [None if x is None else x.copy() for x in before]
    for x, new in zip(want, blocks, strict=True):
        if x is not None:
            x[:, [6, 2]] = new[:, [0, 2]]
    out = named(block_scatter, backend)(
        before[0], ids, blocks[0], kv_scales=before[1], block_scales=blocks[1]
    )
    check(out, before, want)


def test_out_and_in_again_changes_nothing(backend):
    before, _ = pool()
    ids = np.int32([3, 1, 5, 0])
    blocks = named(block_gather, backend)(before, ids)
    wiped = before.copy()
    wiped[:, ids] = np.nan
    out = named(block_scatter, backend)(wiped, ids, blocks)
    np.testing.assert_array_equal(out[:, 1:], before[:, 1:])


def test_gpu_kernels_leave_the_null_block_alone():
    """Padding is skipped, not written."""
    before, _ = pool()
    blocks = np.full_like(before[:, :2], np.nan)
    for name in ("triton", "mosaic"):
        out = named(block_scatter, name)(before, np.int32([0, 3]), blocks)
        np.testing.assert_array_equal(out[:, 0], before[:, 0])


CALL = CopyCall(
    num_layers=32,
    num_blocks=1000,
    block_shape=(2, 8, 16, 128),
    num_pairs=64,
    dtype="bfloat16",
    has_scales=False,
)
IS_8BIT = {"dtype": "int8", "has_scales": True}
OLD = dataclasses.replace(A100, compute_capability=(7, 5))


@pytest.mark.parametrize(
    ("backend", "device", "changes", "reason"),
    [
        ("triton", A100, IS_8BIT, None),
        ("triton", A100, {"dtype": "float8_e4m3fn"}, "needs compute capability 8.9"),
        ("triton", OLD, {}, "needs compute capability 8.0"),
        ("triton", H100, {**IS_8BIT, "num_blocks": 2100}, "32-bit offsets"),
        ("triton", H100, {**IS_8BIT, "num_blocks": 4200}, None),
        ("triton", H100, {"block_shape": (2, 3, 1, 5)}, "has no 16-byte pieces"),
        ("mosaic", H100, {**IS_8BIT, "num_blocks": 2100}, None),
        ("mosaic", A100, {}, "needs compute capability 9.0"),
        ("mosaic", H100, {"block_shape": (2, 3, 1, 5)}, "has no 16-byte rows"),
        ("mosaic", H100, {**IS_8BIT, "block_shape": (2, 3, 1, 64)}, "scales of a block have no"),
    ],
)
def test_what_kernels_cannot_take_has_a_reason(backend, device, changes, reason):
    found = BACKENDS_OF_OP[backend]().unsupported(dataclasses.replace(CALL, **changes), device)
    assert found is None if reason is None else reason in found


# It is used for as long as JAX ships it.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(2, 8, 16, 128), (2, 3, 8, 80), (2, 1, 128, 256)])
def test_lowers_for_cuda(backend, dtype, block):
    shape = jax.ShapeDtypeStruct

    def shapes(num_blocks):
        blocks = shape((4, num_blocks, *block), jnp.dtype(dtype))
        is_8bit = blocks.dtype.itemsize == 1
        return blocks, shape(blocks.shape[:5], jnp.float32) if is_8bit else None

    def run(pool, buffer, ids):
        options = {"kv_scales": pool[1], "backend": backend}
        copied = block_copy(pool[0], ids, ids + 1, **options)
        gathered = block_gather(pool[0], ids, **options)
        put = block_scatter(pool[0], ids, buffer[0], block_scales=buffer[1], **options)
        return copied, gathered, put

    device = AbstractDevice(device_kind=H100.kind, num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        args = shapes(99), shapes(5), shape((5,), jnp.int32)
        jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))


def test_the_two_forms_of_xla_agree():
    before, _ = pool()
    args = [jnp.asarray(x) for x in (before, SRC, DST)]
    np.testing.assert_array_equal(_copy_loop(*args), _copy_all(*args))
    blocks = jnp.asarray(before[:, :3] + 1)
    src, dst = jnp.asarray(np.int32([0, 1, 2])), jnp.asarray(np.int32([6, 3, 1]))
    args = [args[0], blocks, src, dst]
    np.testing.assert_array_equal(_scatter_loop(*args), _scatter_all(*args))


def test_ids_are_clamped_inside_jit(backend):
    before, _ = pool()
    out = named(block_copy, backend)(before, np.int32([-1]), np.int32([99]))
    np.testing.assert_array_equal(out[:, 6], before[:, 0])
    np.testing.assert_array_equal(out[:, :6], before[:, :6])
    out = named(block_gather, backend)(before, np.int32([-1, 99]))
    np.testing.assert_array_equal(out, before[:, [0, 6]])
    out = named(block_scatter, backend)(before, np.int32([99]), before[:, :1])
    np.testing.assert_array_equal(out[:, 6], before[:, 0])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("op", ["copy", "scatter"])
def test_in_place_when_donated(op, dtype):
    shape = jax.ShapeDtypeStruct
    L, P, K, S, D, C = 30, 1400, 3, 16, 64, 32
    is_8bit = dtype == "int8"

    def shapes(num_blocks):
        blocks = shape((L, num_blocks, 2, K, S, D), jnp.dtype(dtype))
        return blocks, shape(blocks.shape[:5], jnp.float32) if is_8bit else None

    def run(pool, buffer, ids):
        blocks, scales = pool
        if op == "copy":
            return block_copy(blocks, ids, ids + 1, kv_scales=scales, backend="xla")
        options = {"kv_scales": scales, "block_scales": buffer[1]}
        return block_scatter(blocks, ids, buffer[0], backend="xla", **options)

    lowered = jax.jit(run, donate_argnums=0).lower(shapes(P), shapes(C), shape((C,), jnp.int32))
    memory = lowered.compile().memory_analysis()
    pool_bytes = L * P * 2 * K * S * (D + 4 if is_8bit else 4 * D)
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
        block_copy(pool()[0], np.int32(src), np.int32(dst))


def test_shapes_refused():
    blocks, _ = pool()
    with pytest.raises(ValueError, match=r"kv_blocks has shape .*; must be \[L, P, 2, K, S, D\]"):
        block_copy(blocks[0], SRC, DST)
    with pytest.raises(ValueError, match=r"src has shape \(1, 5\); must be \[C\]"):
        block_copy(blocks, SRC[None], DST)
    with pytest.raises(ValueError, match=r"dst has shape \(4,\); must be \(5,\)"):
        block_copy(blocks, SRC, DST[:4])
    with pytest.raises(ValueError, match="src has dtype int64"):
        block_copy(blocks, SRC.astype(np.int64), DST)
    with pytest.raises(ValueError, match="ids has dtype int64"):
        block_gather(blocks, SRC.astype(np.int64))
    with pytest.raises(ValueError, match=r"blocks is float32\[3, 6, .*must be float32\[3, 5, "):
        block_scatter(blocks, SRC, blocks[:, :6])
    with pytest.raises(ValueError, match=r"blocks is float16\[3, 5, .*must be float32\[3, 5, "):
        block_scatter(blocks, SRC, blocks[:, :5].astype(np.float16))


def test_ids_refused():
    blocks, _ = pool()
    with pytest.raises(ValueError, match=r"ids has values 1\.\.7; must be within 0\.\.6"):
        block_gather(blocks, np.int32([1, 7]))
    with pytest.raises(ValueError, match=r"ids has values -1\.\.1; must be within 0\.\.6"):
        block_scatter(blocks, np.int32([1, -1]), blocks[:, :2])
    with pytest.raises(ValueError, match="ids names block 3 more than once; must be once"):
        block_scatter(blocks, np.int32([0, 3, 3, 0]), blocks[:, :4])


def test_scales_refused():
    blocks, scales = pool("int8")
    with pytest.raises(ValueError, match="kv_scales is None; blocks of int8 need their scales"):
        block_copy(blocks, SRC, DST)
    with pytest.raises(ValueError, match=r"kv_scales is float32\[3, 6, .*must be float32\[3, 7, "):
        block_gather(blocks, SRC, kv_scales=scales[:, :6])
    with pytest.raises(ValueError, match="kv_scales is given for blocks of float32; must be None"):
        block_copy(pool()[0], SRC, DST, kv_scales=scales)
    with pytest.raises(ValueError, match="block_scales is None; blocks of int8 need their scales"):
        block_scatter(blocks, np.int32([1]), blocks[:, :1], kv_scales=scales)


def test_no_pairs_and_only_padding():
    check_copies([], [], num_blocks=7)
    check_copies([0, 0], [0, 0], num_blocks=7)
    empty = np.zeros(0, np.int32)
    for dtype in ("float32", "int8"):
        blocks, scales = pool(dtype)
        check(block_copy(blocks, empty, empty, kv_scales=scales), (blocks, scales), pool(dtype))
        gathered = as_pair(block_gather(blocks, empty, kv_scales=scales), scales)
        assert gathered[0].shape == (3, 0, *blocks.shape[2:])
        none = None if scales is None else scales[:, :0]
        out = block_scatter(blocks, empty, blocks[:, :0], kv_scales=scales, block_scales=none)
        check(out, (blocks, scales), pool(dtype))
