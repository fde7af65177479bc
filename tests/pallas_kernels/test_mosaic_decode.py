"""The Mosaic decode kernel: in its interpreter, with race detection, and lowered for GPUs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from suites import attention_cases
from suites.attention_cases import Case, pairwise

from pallas_kernels.devices import A100, B200, H100
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import MosaicDecodeConfig
from pallas_kernels.paged_attention.mosaic_decode import (
    paged_attention_mosaic_decode,
    unsupported_decode,
)
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.work import plan_work
from pallas_kernels.quantize import quantize

# NaN in what must not be read meets numpy's products; columns of padded tokens may hold it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BASE = Case(dtype="bfloat16", block_size=16, num_kv_heads=2, group=4, head_dim=64)
CONFIG = MosaicDecodeConfig(pack=1, stages=2, num_ctas=3, mma=False)
PACKED = dataclasses.replace(CONFIG, pack=2)
MMA = dataclasses.replace(CONFIG, mma=True)


@pytest.fixture(autouse=True)
def _no_race(capsys):
    """JAX 0.11 prints the races that later versions raise."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@functools.partial(jax.jit, static_argnames=("score_fn", "return_lse", "config", "interpret"))
def decode(q, *args, scale=None, score_fn=None, return_lse=True, interpret=True, **kwargs):
    assert score_fn is None
    assert return_lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return paged_attention_mosaic_decode(q, *args, scale=scale, interpret=interpret, **kwargs)


def check(config: MosaicDecodeConfig | None = CONFIG, **settings) -> None:
    case = dataclasses.replace(BASE, **settings)
    attention_cases.check(functools.partial(decode, config=config), case)


def check_quantized(dtype: str, config: MosaicDecodeConfig, **settings) -> None:
    """A case's pool in 8 bits, against the reference on the same pool without its garbage."""
    arrays = attention_cases.make(dataclasses.replace(BASE, dtype="float32", **settings))
    q, pool, *rest = (jnp.asarray(x) for x in arrays.args)
    q = q.astype(jnp.bfloat16)
    kwargs = dict(arrays.kwargs, scale=q.shape[-1] ** -0.5)
    garbage = jnp.isnan(pool).any(axis=-1)
    stored, scales = quantize(jnp.nan_to_num(pool), jnp.dtype(dtype))
    want, want_lse = paged_attention_reference(
        q.astype(jnp.float32), stored, *rest, kv_scales=scales, **kwargs
    )
    worst = jnp.asarray(127 if dtype == "int8" else jnp.nan, stored.dtype)
    stored = jnp.where(garbage[..., None], worst, stored)
    scales = jnp.where(garbage, jnp.nan, scales)
    out, lse = decode(q, stored, *rest, kv_scales=scales, config=config, **kwargs)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-2, atol=2e-2)


def test_ragged_rows_and_group_of_seven():
    check(group=7)


def test_packed_heads_window_cap_sinks_and_few_new_tokens():
    check(
        PACKED,
        group=2,
        max_new=3,
        kv_lens=(37, 0, 70, 3, 100),
        q_lens=(3, 0, 1, 3, 2),
        window=20,
        soft_cap=3.0,
        sinks=True,
    )


def test_small_blocks_by_mma():
    check(dataclasses.replace(MMA, pack=2), block_size=8, group=1, kv_lens=(9, 400))


def test_blocks_of_two_tiles_float16_and_negative_scale():
    lens = {"kv_lens": (129, 0, 200)}
    check(dtype="float16", block_size=128, num_kv_heads=1, scale=-0.3, window=70, **lens)


def test_wide_group_in_blocks_of_one_tile():
    check(block_size=64, num_kv_heads=1, group=33, head_dim=128, kv_lens=(65, 100))


def test_int8_pool():
    check_quantized("int8", PACKED, kv_lens=(37, 0, 70), window=20, sinks=True)


def test_float8_pool():
    check_quantized("float8_e4m3fn", CONFIG, block_size=32, max_new=2, group=2, kv_lens=(37, 70))


def test_a_list_planned_without_the_layer_s_window():
    """Traced window and scale, float32 queries, and the step's list of whole contexts."""
    case = dataclasses.replace(
        BASE, num_kv_heads=1, group=1, kv_lens=(200, 5), q_lens=(1, 1), window=30, block_size=32
    )
    arrays = attention_cases.make(case)
    q, *args = (jnp.asarray(x) for x in arrays.args)

    @jax.jit
    def layer(q, *args, window, scale):
        kv_lens, q_lens = args[-2:]
        work = plan_work(kv_lens, q_lens, num_groups=1, tile_tokens=64, num_ctas=3)
        return paged_attention_mosaic_decode(
            q,
            *args,
            scale=scale,
            window=window,
            soft_cap=None,
            sinks=None,
            work=work,
            interpret=True,
        )

    out, lse = layer(q.astype(jnp.float32), *args, window=jnp.int32(30), scale=jnp.float32(0.125))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, arrays.out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, arrays.lse, rtol=2e-2, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    pairwise(
        dtype=("bfloat16", "float16"),
        block_size=(8, 16, 32, 64, 128),
        num_kv_heads=(1, 2),
        group=(1, 4, 7, 8),
        head_dim=(64, 128, 256),
        max_new=(1, 2, 4),
        window=(None, 1, 40),
        soft_cap=(None, 20.0),
        sinks=(False, True),
        garbage=(float("nan"), float("inf")),
        config=(CONFIG, PACKED, MMA, None),
    ),
    ids=str,
)
def test_pairs_of_features(settings):
    config = settings.pop("config")
    if config is PACKED and (settings["num_kv_heads"] == 1 or settings["block_size"] > 32):
        config = CONFIG
    check(config, **settings)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("config", [PACKED, dataclasses.replace(PACKED, mma=True)])
def test_8_bit_pools(dtype, head_dim, config):
    check_quantized(dtype, config, head_dim=head_dim, max_new=2, window=40, soft_cap=20.0)


CALL = AttentionCall(
    num_rows=4,
    num_new=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    block_size=16,
    table_width=8,
    num_blocks=64,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (A100, {}, r"compute capability 9.0 or later \(here: \(8, 0\)\)"),
        (H100, {"has_score_fn": True}, "score_fn"),
        (H100, {"kv_dtype": "float32"}, "float32; the tensor core transposes V only in 16-bit"),
        (H100, {"head_dim": 80}, "head_dim 80; must be 64, 128, 192 or 256 .make the pool with"),
        (H100, {"block_size": 24}, "block size 24; must be one of"),
        (H100, {"num_new": 8, "num_heads": 18}, "product must be at most 64"),
        (
            H100,
            {"num_new": 5, "num_heads": 14, "head_dim": 256},
            "40 columns of head_dim 256 in bfloat16 need",
        ),
        (H100, {"kv_dtype": "int8", "num_kv_heads": 1}, "use blocks of 32 tokens or more"),
        (dataclasses.replace(H100, smem_per_block=101_376), {"head_dim": 256}, "shared memory"),
    ],
)
def test_unsupported(device, changes, reason):
    said = unsupported_decode(dataclasses.replace(CALL, **changes), device)
    assert said is not None
    assert re.search(reason, said)


def test_supported():
    assert unsupported_decode(CALL, H100) is None
    assert unsupported_decode(CALL, B200) is None


def shapes(call: AttentionCall) -> list[jax.ShapeDtypeStruct]:
    B, N, K, S = call.num_rows, call.num_blocks, call.num_kv_heads, call.block_size
    struct = jax.ShapeDtypeStruct
    return [
        struct((B, call.num_new, call.num_heads, call.head_dim), call.q_dtype),
        struct((N, 2, K, S, call.head_dim), call.kv_dtype),
        struct((B, call.table_width), "int32"),
        struct((B,), "int32"),
        struct((B,), "int32"),
    ]


def lower(call: AttentionCall, device=H100, **options) -> str:
    """The call as StableHLO for a GPU that is not there."""
    kinds = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None}
    if call.is_quantized:
        N, K, S = call.num_blocks, call.num_kv_heads, call.block_size
        kinds["kv_scales"] = jnp.zeros((N, 2, K, S), jnp.float32)
    options = kinds | options
    run = jax.jit(lambda *args: paged_attention_mosaic_decode(*args, **options))
    abstract = AbstractDevice(device_kind=device.kind, num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract)):
        return run.trace(*shapes(call)).lower(lowering_platforms=("cuda",)).as_text()


FEATURES = {"window": 40, "soft_cap": 20.0, "sinks": jnp.zeros(8)}


@pytest.mark.parametrize(
    ("device", "changes", "options"),
    [
        (H100, {}, FEATURES),
        (H100, {"block_size": 64, "num_new": 4}, FEATURES),
        (H100, {"block_size": 128, "head_dim": 256, "kv_dtype": "float16"}, {}),
        (H100, {"block_size": 8, "head_dim": 64, "q_dtype": "float32"}, {}),
        (H100, {"kv_dtype": "int8"}, {}),
        (B200, {}, FEATURES),
        (B200, {"kv_dtype": "float8_e4m3fn", "block_size": 64}, {}),
    ],
)
def test_lowers(device, changes, options):
    text = lower(dataclasses.replace(CALL, **changes), device, **options)
    assert text.count("mosaic_gpu") >= 2  # the kernel and the merge


@pytest.mark.long
@pytest.mark.parametrize("device", [H100, B200], ids=["h100", "b200"])
@pytest.mark.parametrize(
    "changes",
    pairwise(
        block_size=(8, 16, 32, 64, 128),
        head_dim=(64, 128, 192, 256),
        num_heads=(2, 8, 14, 16),
        num_new=(1, 2, 4),
        kv_dtype=("bfloat16", "float16", "int8", "float8_e4m3fn"),
    ),
    ids=str,
)
def test_lowers_every_pair(device, changes):
    call = dataclasses.replace(CALL, **changes)
    reason = unsupported_decode(call, device)
    if reason is None:
        lower(call, device)
    else:
        assert reason.startswith("8-bit blocks of 8 tokens") or "registers a thread" in reason


def test_refused_calls():
    arrays = attention_cases.make(dataclasses.replace(BASE, dtype="float32", kv_lens=(5,)))
    with pytest.raises(NotImplementedError, match="mosaic decode: kv_blocks are float32"):
        decode(*arrays.args, config=None, **dict(arrays.kwargs, scale=0.1))
    arrays = attention_cases.make(dataclasses.replace(BASE, kv_lens=(5,)))
    kv_lens, q_lens = (jnp.asarray(x) for x in arrays.args[-2:])
    work = plan_work(kv_lens, q_lens, num_groups=2, tile_tokens=32, num_ctas=3)
    with pytest.raises(ValueError, match=r"planned for .* \(2, 2, 32\); must be \(2, 2, 64\)"):
        decode(*arrays.args, config=CONFIG, work=work, **arrays.kwargs)
    work = plan_work(kv_lens, q_lens, num_groups=2, tile_tokens=64, num_ctas=3, window=5)
    with pytest.raises(ValueError, match="planned with a window"):
        decode(*arrays.args, config=CONFIG, work=work, **arrays.kwargs)
