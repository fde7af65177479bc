"""One suite for every backend of `kv_write`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.devices import A100, B200, H100, L4
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import BACKENDS as BACKENDS_OF_OP
from pallas_kernels.kv_write.call import WriteCall
from pallas_kernels.kv_write.xla import _write_loop, _write_scatter
from pallas_kernels.quantize import quantize

BACKENDS = ("reference", "xla", "triton")
POOL_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
QUANTIZED = ("int8", "float8_e4m3fn")
OLD = dataclasses.replace(A100, compute_capability=(7, 5))
L4_OF_9_0 = dataclasses.replace(L4, compute_capability=(9, 0))
jitted = jax.jit(kv_write, static_argnames=("backend", "interpret"))


@pytest.fixture(params=BACKENDS)
def op(request):
    return functools.partial(jitted, backend=request.param, interpret=True)


def arrays(*, S=4, K=2, D=8, d=None, dtype="float32", new_dtype="float32", seed=0):
    """Arguments of a call of three rows, one of them empty and one short; padding names slots."""
    rng = np.random.default_rng(seed)
    B, T, d = 3, 5, d or D
    N = 3 + B * T // S + 1
    k, v = rng.normal(size=(2, B, T, K, d)).astype(jnp.dtype(new_dtype))
    slots = (rng.permutation((N - 1) * S)[: B * T] + S).reshape(B, T).astype(np.int32)
    q_lens = np.int32([T, 0, T - 2])
    slots = np.where(np.arange(T) < q_lens[:, None], slots, rng.choice([-1, 2**30, 7], (B, T)))
    pool = rng.integers(-9, 9, size=(N, 2, K, S, D)).astype(jnp.dtype(dtype))
    scales = rng.normal(size=(N, 2, K, S)).astype(np.float32) if dtype in QUANTIZED else None
    return (pool, k, v, slots.astype(np.int32), q_lens), {"kv_scales": scales}


def expected(pool, k, v, slots, q_lens, *, kv_scales=None):
    pool, kv_scales = pool.copy(), None if kv_scales is None else kv_scales.copy()
    S, D = pool.shape[3:]
    for b, t in np.ndindex(slots.shape):
        if t >= q_lens[b]:
            continue
        block, offset = slots[b, t] // S, slots[b, t] % S
        for i, x in enumerate((k[b, t], v[b, t])):
            if kv_scales is not None:
                x, scale = quantize(jnp.asarray(x), pool.dtype)
                kv_scales[block, i, :, offset] = scale
            padded = np.pad(np.asarray(x).astype(pool.dtype), ((0, 0), (0, D - x.shape[-1])))
            pool[block, i, :, offset] = padded
    return pool, kv_scales


def check(op, args, kwargs):
    """Everything but slot 0 of the null block is as it must be."""
    out = op(*args, **kwargs)
    blocks, scales = (out, None) if kwargs["kv_scales"] is None else out
    want_blocks, want_scales = expected(*args, **kwargs)
    assert blocks.dtype == args[0].dtype
    for x, want in ((blocks, want_blocks), (scales, want_scales)):
        if want is None:
            assert x is None
            continue
        x = np.asarray(x)
        np.testing.assert_array_equal(x[1:], want[1:])
        np.testing.assert_array_equal(x[0, :, :, 1:], want[0, :, :, 1:])


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("S", [1, 3, 16])
def test_writes_new_tokens_and_nothing_else(S, dtype, op):
    check(op, *arrays(S=S, dtype=dtype))


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_new_tokens_of_another_dtype_and_a_smaller_head_dim(dtype, op):
    check(op, *arrays(dtype=dtype, new_dtype="bfloat16", D=16, d=12, K=3))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_broken_and_zero_vectors_are_stored_as_quantize_says(dtype, op):
    args, kwargs = arrays(dtype=dtype)
    pool, k, v, slots, q_lens = args
    k[0, 0, 0], k[0, 1, 1, 2], v[0, 0, 1, 3] = 0.0, np.nan, np.inf
    check(op, (pool, k, v, slots, q_lens), kwargs)


@pytest.mark.parametrize(("S", "dtype"), [(1, "float32"), (8, "bfloat16"), (16, "float16")])
def test_mosaic_writes_new_tokens_and_nothing_else(S, dtype):
    mosaic = functools.partial(jitted, backend="mosaic", interpret=True)
    check(mosaic, *arrays(S=S, dtype=dtype, new_dtype=dtype, K=3))


def test_gpu_kernels_leave_the_null_block_alone():
    """Padding is skipped, not sent there."""
    for backend in ("triton", "mosaic"):
        args, kwargs = arrays()
        out = jitted(*args, **kwargs, backend=backend, interpret=True)
        np.testing.assert_array_equal(out[0], args[0][0])


CALL = WriteCall(
    num_rows=8,
    num_new=1,
    num_kv_heads=8,
    head_dim=128,
    new_head_dim=128,
    block_size=16,
    num_blocks=1000,
    new_dtype="bfloat16",
    kv_dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("backend", "device", "changes", "reason"),
    [
        ("triton", L4, {"kv_dtype": "float8_e4m3fn"}, None),
        ("triton", A100, {"kv_dtype": "int8"}, None),
        ("triton", A100, {"kv_dtype": "float8_e4m3fn"}, "needs compute capability 8.9"),
        ("triton", OLD, {}, "needs compute capability 8.0"),
        ("triton", H100, {"kv_dtype": "int8", "num_blocks": 70_000}, "32-bit offsets"),
        ("triton", H100, {"kv_dtype": "int8", "num_blocks": 140_000}, None),
        ("triton", H100, {"num_blocks": 140_000}, None),
        ("mosaic", H100, {"num_blocks": 140_000}, None),
        ("mosaic", B200, {}, None),
        ("mosaic", A100, {}, "needs compute capability 9.0"),
        ("mosaic", H100, {"kv_dtype": "int8"}, "it does not quantise"),
        ("mosaic", H100, {"new_dtype": "float32"}, "it does not cast"),
        ("mosaic", H100, {"new_head_dim": 80}, "it does not pad heads"),
        ("mosaic", H100, {"head_dim": 20, "new_head_dim": 20}, "not made of 16-byte pieces"),
        ("mosaic", H100, {"head_dim": 512, "new_head_dim": 512}, "at most 256"),
        ("mosaic", H100, {"num_kv_heads": 256}, None),
        ("mosaic", L4_OF_9_0, {"num_kv_heads": 256}, "bytes of shared memory"),
    ],
)
def test_what_kernels_cannot_take_has_a_reason(backend, device, changes, reason):
    found = BACKENDS_OF_OP[backend]().unsupported(dataclasses.replace(CALL, **changes), device)
    assert found is None if reason is None else reason in found


# It is used for as long as JAX ships it.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("triton", dtype) for dtype in POOL_DTYPES), ("mosaic", "bfloat16"), ("mosaic", "float32")],
)
@pytest.mark.parametrize(("K", "head_dim"), [(8, 64), (3, 80), (3, 96), (8, 128), (1, 256)])
def test_lowers_for_cuda(backend, dtype, head_dim, K):
    is_8bit = dtype in QUANTIZED
    shape = jax.ShapeDtypeStruct
    scales = shape((999, 2, K, 16), jnp.float32) if is_8bit else None
    new = shape((8, 1, K, head_dim), jnp.dtype("bfloat16" if is_8bit else dtype))

    def write(pool, scales, new, slots, lens):
        return kv_write(pool, new, new, slots, lens, kv_scales=scales, backend=backend)

    pool = shape((999, 2, K, 16, head_dim), jnp.dtype(dtype))
    ints = shape((8, 1), jnp.int32), shape((8,), jnp.int32)
    device = AbstractDevice(device_kind=H100.kind, num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        jax.jit(write).trace(pool, scales, new, *ints).lower(lowering_platforms=("cuda",))


def test_the_two_forms_of_xla_agree():
    (pool, k, v, slots, _), _ = arrays()
    kv = jnp.stack([k, v], 2).reshape(-1, 2, *k.shape[2:])
    slots = jnp.asarray(np.arange(slots.size, dtype=np.int32) + 4)
    np.testing.assert_array_equal(
        _write_loop(jnp.asarray(pool), kv, slots), _write_scatter(jnp.asarray(pool), kv, slots)
    )
    scales = jnp.asarray(pool[..., 0])
    np.testing.assert_array_equal(
        _write_loop(scales, kv[..., 0], slots), _write_scatter(scales, kv[..., 0], slots)
    )


def test_slots_outside_the_pool_are_padding_inside_jit(op):
    (pool, k, v, _, _), _ = arrays()
    slots = np.full((3, 5), -1, np.int32)
    slots[1] = pool.shape[0] * pool.shape[3]
    out = np.asarray(op(pool, k, v, slots, np.int32([5, 5, 5])))
    np.testing.assert_array_equal(out[1:], pool[1:])


def test_a_single_token(op):
    (pool, k, v, slots, _), _ = arrays()
    args = (pool, k[:1, :1], v[:1, :1], slots[:1, :1], np.int32([1]))
    check(op, args, {"kv_scales": None})


@pytest.mark.parametrize("write_shape", [(32, 1), (1, 1), (16, 32)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_in_place_when_donated(write_shape, dtype):
    shape = jax.ShapeDtypeStruct
    B, T = write_shape
    L, P, K, S, D = 30, 1400, 3, 16, 64

    def layers(pool, k, slots, q_lens):
        def layer(pool, index):
            blocks, scales = pool
            at = slots + index * (P * S)
            if scales is None:
                return (kv_write(blocks, k, k, at, q_lens, backend="xla"), None), None
            return kv_write(blocks, k, k, at, q_lens, kv_scales=scales, backend="xla"), None

        return jax.lax.scan(layer, pool, jnp.arange(L, dtype=jnp.int32))[0]

    scales = shape((L * P, 2, K, S), jnp.float32) if dtype == "int8" else None
    memory = (
        jax.jit(layers, donate_argnums=0)
        .lower(
            (shape((L * P, 2, K, S, D), jnp.dtype(dtype)), scales),
            shape((B, T, K, D), jnp.float32),
            shape((B, T), jnp.int32),
            shape((B,), jnp.int32),
        )
        .compile()
        .memory_analysis()
    )
    slot_bytes = D + 4 if dtype == "int8" else 4 * D
    pool_bytes = L * P * 2 * K * S * slot_bytes
    assert memory.alias_size_in_bytes == pool_bytes
    # The new tokens themselves are 0.5 % of the 8-bit pool, in float32.
    assert memory.temp_size_in_bytes < (0.01 if dtype == "int8" else 0.005) * pool_bytes


def test_refusals():
    (pool, k, v, slots, q_lens), _ = arrays()
    wide = np.zeros((*k.shape[:3], 9), np.float32)
    with pytest.raises(ValueError, match=r"k has shape .*; must be \[B, T, 2, at most 8\]"):
        kv_write(pool, wide, wide, slots, q_lens)
    with pytest.raises(ValueError, match="v has shape"):
        kv_write(pool, k, v[:, :4], slots, q_lens)
    with pytest.raises(ValueError, match="v has dtype int32"):
        kv_write(pool, k, v.astype(np.int32), slots, q_lens)
    with pytest.raises(ValueError, match="v has dtype float16; must be that of k, float32"):
        kv_write(pool, k, v.astype(np.float16), slots, q_lens)
    with pytest.raises(ValueError, match="kv_scales is None; a pool of int8 needs its scales"):
        kv_write(pool.astype(np.int8), k, v, slots, q_lens)
    with pytest.raises(ValueError, match="kv_scales is given but kv_blocks has dtype float32"):
        kv_write(pool, k, v, slots, q_lens, kv_scales=pool[..., 0])
    with pytest.raises(ValueError, match="slot_mapping has dtype int64"):
        kv_write(pool, k, v, slots.astype(np.int64), q_lens)
    with pytest.raises(ValueError, match=r"q_lens has values 0\.\.6; must be within 0\.\.T=5"):
        kv_write(pool, k, v, slots, np.int32([6, 0, 1]))
    with pytest.raises(ValueError, match=r"slot_mapping has values -1\.\..*; must be within 0"):
        kv_write(pool, k, v, np.full_like(slots, -1), q_lens)
    with pytest.raises(ValueError, match="slot_mapping names slot 9 8 times; must be once"):
        kv_write(pool, k, v, np.full_like(slots, 9), q_lens)
