"""The Mosaic prefill kernel: in its interpreter, with race detection, and lowered for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.devices import A100, B200, H100, H200
from pallas_kernels.paged_attention import mosaic_prefill_config
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_prefill import (
    paged_attention_mosaic_prefill,
    unsupported_prefill,
)
from pallas_kernels.paged_attention.mosaic_prefill_config import (
    MosaicPrefillConfig,
    pick_mosaic_prefill_config,
)

# Garbage may be infinite; the interpreter's WGMMA is a product of numpy.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

BASE = Case(
    dtype="bfloat16",
    block_size=16,
    num_kv_heads=1,
    group=4,
    head_dim=64,
    max_new=20,
    kv_lens=(96, 13, 150),
    q_lens=(20, 13, 1),
)
NEW, CONTEXTS = (1, 3, 17, 64), (0, 1, 16, 82)


@functools.partial(
    jax.jit, static_argnames=("score_fn", "return_lse", "config", "scale", "interpret")
)
def prefill(q, *args, scale=None, score_fn=None, return_lse=True, interpret=True, **kwargs):
    assert score_fn is None
    assert return_lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return paged_attention_mosaic_prefill(q, *args, scale=scale, interpret=interpret, **kwargs)


def check(config: MosaicPrefillConfig | None = None, **settings) -> None:
    case = dataclasses.replace(BASE, **settings)
    attention_cases.check(functools.partial(prefill, config=config), case)


def test_every_context_of_a_chunk():
    """Rows of 1 to 64 new tokens after 0 to 82 positions, in one call of two query tiles."""
    rows = [(context + new, new) for new in NEW for context in CONTEXTS] + [(0, 0)]
    kv_lens, q_lens = zip(*rows, strict=True)
    check(group=2, max_new=64, kv_lens=kv_lens, q_lens=q_lens)


def test_group_of_seven_sinks_and_window():
    check(group=7, num_kv_heads=2, block_size=8, dtype="float16", sinks=True, window=9)


def test_soft_cap_and_negative_scale():
    lens = {"max_new": 70, "q_lens": (70, 13, 1)}
    check(group=1, head_dim=128, block_size=64, soft_cap=3.0, scale=-0.3, **lens)


def test_wide_heads_and_blocks_of_two_tiles():
    check(group=8, head_dim=256, block_size=128, max_new=3, kv_lens=(70, 140), q_lens=(3, 3))


def test_window_that_skips_tiles():
    check(window=20, kv_lens=(300, 40), q_lens=(20, 7), garbage=float("inf"))


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("stages", [1, 2])
def test_rings_that_turn_over(rows, stages):
    config = MosaicPrefillConfig(tile_rows=rows, tile_tokens=64, num_stages=stages)
    check(config, kv_lens=(390, 64), q_lens=(20, 20), window=290)


AXES = {
    "dtype": ("bfloat16", "float16"),
    "block_size": (8, 16, 32, 64, 128),
    "head_dim": (64, 128, 256),
    "heads": ((1, 1), (2, 3), (1, 7), (1, 16), (1, 64), (2, 4)),
    "lens": (
        {"kv_lens": None, "q_lens": None, "max_new": 1},
        {"kv_lens": None, "q_lens": None, "max_new": 9},
        {"kv_lens": (131, 0, 33, 260), "q_lens": (33, 0, 33, 2), "max_new": 33},
    ),
    "window": (None, 1, 17, 200),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "garbage": (float("nan"), float("inf"), 6e4),
}


@pytest.mark.long
@pytest.mark.parametrize("row", attention_cases.pairwise(**AXES), ids=str)
def test_every_pair_of_settings(row):
    row = dict(row, **row["lens"])
    row["num_kv_heads"], row["group"] = row.pop("heads")
    del row["lens"]
    check(**row)


def test_padding_queries_may_hold_nan():
    arrays = attention_cases.make(dataclasses.replace(BASE, kv_lens=(40, 0), q_lens=(7, 0)))
    q, *rest = arrays.args
    padding = np.arange(q.shape[1]) >= rest[-1][:, None]  # [B, T]
    q = np.where(padding[:, :, None, None], np.asarray(np.nan, q.dtype), q)
    out, lse = prefill(q.astype(np.float32), *rest, window=None, soft_cap=None, sinks=None)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, arrays.out, atol=2e-2)
    np.testing.assert_allclose(lse, arrays.lse, atol=2e-2)


def test_scalars_may_be_traced_and_lengths_and_entries_are_clamped():
    case = dataclasses.replace(BASE, kv_lens=(64, 64), q_lens=(20, 20), window=30, garbage=0.0)
    arrays = attention_cases.make(case)
    q, pool, tables, _, _ = arrays.args
    wild = np.where(tables == pool.shape[0] - 1, 2**30, tables)[:, :4]
    kv_lens, q_lens = np.array([999, -3], np.int32), np.array([99, 7], np.int32)

    @jax.jit
    def run(scale, window, *args):
        return paged_attention_mosaic_prefill(
            *args, scale=scale, window=window, soft_cap=None, sinks=None, interpret=True
        )

    out, lse = run(np.float32(0.125), np.int32(30), q, pool, wild, kv_lens, q_lens)
    np.testing.assert_allclose(np.asarray(out[0], np.float32), arrays.out[0], atol=2e-2)
    np.testing.assert_array_equal(np.asarray(out[1], np.float32), 0.0)
    np.testing.assert_array_equal(lse[1], -np.inf)


def lowered(call: AttentionCall, device=H100, **kwargs) -> str:
    """The call's CUDA lowering on a machine without a GPU."""
    shape, B = jax.ShapeDtypeStruct, call.num_rows
    pool = (call.num_blocks, 2, call.num_kv_heads, call.block_size, call.head_dim)
    args = (
        shape((B, call.num_new, call.num_heads, call.head_dim), call.q_dtype),
        shape(pool, call.kv_dtype),
        shape((B, call.table_width), jnp.int32),
        shape((B,), jnp.int32),
        shape((B,), jnp.int32),
    )
    kwargs = {"window": None, "soft_cap": None, "sinks": None, **kwargs}
    gpu = AbstractDevice(device_kind=device.kind, num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu)):
        traced = prefill.trace(*args, interpret=False, **kwargs)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


LLAMA = AttentionCall(
    num_rows=4,
    num_new=512,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    table_width=256,
    num_blocks=1024,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)


@pytest.mark.parametrize("settings", [
    {},
    {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "block_size": 64},
    {"head_dim": 256, "block_size": 128, "num_new": 16, "num_heads": 8, "num_kv_heads": 4},
    {"block_size": 8, "kv_dtype": "float16"},
], ids=str)  # fmt: skip
def test_lowers_for_cuda(settings):
    call = dataclasses.replace(LLAMA, **settings)
    assert unsupported_prefill(call, H100) is None
    assert "mosaic_gpu" in lowered(call)


def test_lowers_for_cuda_with_every_option():
    scalar = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    sinks = jax.ShapeDtypeStruct((32,), jnp.float32)
    assert "mosaic_gpu" in lowered(LLAMA, window=scalar[0], soft_cap=scalar[1], sinks=sinks)


@pytest.mark.parametrize(("device", "settings", "reason"), [
    (H200, {}, None),
    (H100, {"head_dim": 80}, "D padded"),
    (H100, {"head_dim": 320}, "D padded"),
    (H100, {"block_size": 48}, "block_size 48"),
    (H100, {"block_size": 4}, "block_size 4"),
    (H100, {"kv_dtype": "float32"}, "a pool of float32"),
    (H100, {"kv_dtype": "int8"}, "a pool of int8"),
    (H100, {"has_score_fn": True}, "score_fn"),
    (A100, {}, "compute capability 9.x"),
    (B200, {}, "compute capability 9.x"),
], ids=str)  # fmt: skip
def test_unsupported_says_why(device, settings, reason):
    answer = unsupported_prefill(dataclasses.replace(LLAMA, **settings), device)
    assert answer is reason is None or reason in answer


def test_unsupported_where_ptxas_miscompiles(monkeypatch):
    class Versions:
        @staticmethod
        def cuda_runtime_get_version():
            return 12090

    monkeypatch.setattr(mosaic_prefill_config.jax_lib, "cuda_versions", Versions)
    assert "CUDA 12.8 or 12.9" in str(unsupported_prefill(LLAMA, H100))


@pytest.mark.parametrize(("settings", "rows", "tokens", "stages"), [
    ({}, 128, 128, 2),
    ({"head_dim": 64}, 128, 128, 6),
    ({"head_dim": 256}, 128, 64, 2),
    ({"num_new": 16}, 64, 128, 3),
    ({"head_dim": 192}, 128, 64, 3),
], ids=str)  # fmt: skip
def test_picked_tiles_fill_shared_memory(settings, rows, tokens, stages):
    call = dataclasses.replace(LLAMA, **settings)
    config = pick_mosaic_prefill_config(call, H100)
    assert config == MosaicPrefillConfig(tile_rows=rows, tile_tokens=tokens, num_stages=stages)
    assert config.smem_bytes(call.head_dim) <= H100.smem_per_block


def test_refused_configs():
    good = MosaicPrefillConfig(tile_rows=64, tile_tokens=64, num_stages=1)
    for name, value in (("tile_rows", 96), ("tile_tokens", 32), ("num_stages", 0)):
        with pytest.raises(ValueError, match=f"{name} is {value}; must be"):
            dataclasses.replace(good, **{name: value})
    with pytest.raises(ValueError, match="block_size is 48"):
        pick_mosaic_prefill_config(dataclasses.replace(LLAMA, block_size=48), H100)
