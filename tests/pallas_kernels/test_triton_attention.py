"""The Pallas Triton kernel of `paged_attention`: in its interpreter, and lowered for a GPU."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.devices import A10, A100, H100, H200, L4, Device
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.triton import (
    BLOCK_SIZES,
    HEAD_DIMS,
    paged_attention_triton,
    unsupported,
)
from pallas_kernels.paged_attention.triton_config import TritonConfig

SMALL = TritonConfig(rows=16, tokens=16, splits=3, num_warps=4, num_stages=2)
LONG = TritonConfig(rows=16, tokens=64, splits=1, num_warps=4, num_stages=2)
BASE = Case(block_size=8, head_dim=64, num_kv_heads=2, group=3, max_new=2)
NEW = (1, 3, 17, 64)

AXES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_dtype": (None, None, "int8", "float8_e4m3fn"),
    "block_size": (8, 16, 32, 128),
    "heads": ((1, 1), (2, 3), (1, 8), (1, 7), (4, 2)),
    "head_dim": HEAD_DIMS,
    "max_new": (1, 2, 8),
    "window": (None, 1, 9, 40),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "garbage": (math.nan, math.inf, -1e4),
    "config": (SMALL, LONG, None),
}


@functools.partial(
    jax.jit, static_argnames=("score_fn", "return_lse", "config", "scale", "interpret")
)
def triton(q, *args, scale=None, score_fn=None, return_lse=True, interpret=True, **kwargs):
    assert score_fn is None
    assert return_lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kwargs = {"window": None, "soft_cap": None, "sinks": None, "kv_scales": None, **kwargs}
    return paged_attention_triton(
        q, *args, scale=scale, score_fn=None, interpret=interpret, **kwargs
    )


def check(config: TritonConfig | None = SMALL, **settings) -> None:
    case = dataclasses.replace(BASE, **settings)
    attention_cases.check(functools.partial(triton, config=config), case)


def check_row(row: dict) -> None:
    num_kv_heads, group = row.pop("heads")
    scale = 0.1 if row["soft_cap"] else None
    check(num_kv_heads=num_kv_heads, group=group, scale=scale, **row)


@pytest.mark.parametrize("row", attention_cases.pairwise(**AXES)[::3], ids=str)
def test_pairs_of_settings(row):
    check_row(dict(row))


@pytest.mark.long
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_geometry(block_size, head_dim):
    """The full product of what moves indices; what changes scores takes turns."""
    turns = ("dtype", "kv_dtype", "soft_cap", "sinks", "garbage", "config")
    axes = {name: AXES[name] for name in ("heads", "max_new", "window")}
    for i, row in enumerate(attention_cases.product(**axes)):
        options = {
            name: AXES[name][(i + k * (i // 3)) % len(AXES[name])] for k, name in enumerate(turns)
        }
        check_row({**row, **options, "block_size": block_size, "head_dim": head_dim})
    jax.clear_caches()


@pytest.mark.parametrize("config", [None, dataclasses.replace(SMALL, rows=32, tokens=32)])
def test_every_context_of_a_chunk(config):
    """Rows of 1 to 64 new tokens after 0 to 5S + 2 positions, in tiles that end in mid-token."""
    rows = [(context + new, new) for new in NEW for context in (0, 1, 8, 42)] + [(0, 0), (9, 0)]
    kv_lens, q_lens = zip(*rows, strict=True)
    check(config, max_new=64, kv_lens=kv_lens, q_lens=q_lens, dtype="bfloat16")


def test_a_windowed_chunk_skips_the_blocks_before():
    check(max_new=64, kv_lens=(130, 64, 20), q_lens=(64, 64, 3), window=21, sinks=True)


def test_splits_do_not_change_the_answer():
    case = dataclasses.replace(BASE, kv_lens=(200, 3, 90), sinks=True, soft_cap=3.0)
    for splits in (1, 2, 32):
        check(dataclasses.replace(SMALL, splits=splits), **dataclasses.asdict(case))


@pytest.mark.parametrize("config", [SMALL, LONG])
def test_a_table_that_ends_in_the_pools_last_block(config):
    """The tile that holds it reaches past the table and past the pool."""
    case = dataclasses.replace(BASE, kv_lens=(61,), max_new=1, garbage=0.0)
    arrays = attention_cases.make(case)
    q, pool, tables, kv_lens, q_lens = arrays.args
    used, last = tables[:, :8], pool.shape[0] - 1
    order = np.arange(last + 1)
    order[[last, used[0, -1]]] = used[0, -1], last  # its own inverse
    swapped, ids = pool[order], order[used].astype(np.int32)
    for ending in (swapped, np.where(np.isin(np.arange(last + 1), ids)[:, None, None, None, None],
                                     swapped, np.nan)):  # fmt: skip
        out, lse = triton(q, ending.astype(pool.dtype), ids, kv_lens, q_lens, config=config)
        np.testing.assert_allclose(out, arrays.out, atol=1e-5)
        np.testing.assert_allclose(lse, arrays.lse, atol=1e-5)


def test_scale_window_and_soft_cap_may_be_traced():
    case = dataclasses.replace(BASE, kv_lens=(70, 5), window=20, soft_cap=4.0, scale=0.2)
    arrays = attention_cases.make(case)
    given = {"scale": 0.2, "window": np.int32(20), "soft_cap": np.float32(4.0)}

    @jax.jit
    def run(given):
        return paged_attention_triton(
            *map(jnp.asarray, arrays.args),
            **given,
            sinks=None,
            kv_scales=None,
            score_fn=None,
            interpret=True,
            config=SMALL,
        )

    np.testing.assert_allclose(run(given)[0], arrays.out, atol=1e-5)
    huge = {**given, "window": np.int32(2**31 - 1)}
    far = {**given, "window": np.int32(1000)}
    np.testing.assert_array_equal(run(huge)[0], run(far)[0])


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [("float32", "bfloat16"), ("float16", "float32")])
def test_query_dtype_may_differ_from_the_pools(q_dtype, kv_dtype):
    arrays = attention_cases.make(dataclasses.replace(BASE, dtype="bfloat16"))
    q, pool, *rest = arrays.args
    out, _ = triton(q.astype(q_dtype), pool.astype(kv_dtype), *rest, config=SMALL)
    assert out.dtype == q_dtype
    np.testing.assert_allclose(out.astype(np.float32), arrays.out, atol=2e-3)


def test_through_the_op():
    arrays = attention_cases.make(BASE)
    args = map(jnp.asarray, arrays.args)
    out, lse = paged_attention(*args, backend="triton", interpret=True, return_lse=True)
    np.testing.assert_allclose(out, arrays.out, atol=1e-5)
    np.testing.assert_allclose(lse, arrays.lse, atol=1e-5)


def call(**settings) -> AttentionCall:
    defaults = {
        "num_rows": 8,
        "num_new": 1,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "block_size": 16,
        "table_width": 128,
        "num_blocks": 2048,
        "q_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    }
    return AttentionCall(**{**defaults, **settings})


T4 = Device(kind="Tesla T4", compute_capability=(7, 5))
UNSUPPORTED = [
    (H100, {}, None),
    (A100, {"kv_dtype": "int8"}, None),
    (L4, {"kv_dtype": "float8_e4m3fn"}, None),
    (H200, {"kv_dtype": "int8", "num_blocks": 2**18}, None),
    (H100, {"has_score_fn": True}, "score_fn"),
    (T4, {}, "compute capability"),
    (A10, {"kv_dtype": "float8_e4m3fn"}, "8.9"),
    (H100, {"head_dim": 72}, "head dim 72"),
    (H100, {"block_size": 4}, "block size 4"),
    (H200, {"kv_dtype": "int8", "num_blocks": 2**16}, "32-bit offsets"),
]


@pytest.mark.parametrize(("device", "settings", "reason"), UNSUPPORTED)
def test_unsupported_says_why(device, settings, reason):
    said = unsupported(call(**settings), device)
    assert (said is None) == (reason is None)
    assert reason is None or reason in said


LOWERED = [
    {},
    {"T": 4, "window": True, "soft_cap": True, "sinks": True},
    {"T": 512, "D": 256},
    {"D": 80, "S": 8, "G": 7, "K": 1},
    {"D": 96, "S": 128, "M": 4, "sinks": True},
    {"D": 64, "q": "float16", "kv": "int8", "T": 64},
    {"kv": "float8_e4m3fn", "K": 1, "G": 64, "T": 8},
    {"q": "float32", "kv": "float32"},
    {"q": "float32", "kv": "bfloat16"},
    {"N": 2**17, "M": 2048},
]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("settings", LOWERED, ids=str)
@pytest.mark.parametrize("device", [A100, H100], ids=["a100", "h100"])
def test_lowers_for_a_gpu_that_is_not_here(device, settings):
    if device is A100 and settings.get("kv") == "float8_e4m3fn":
        return
    lowered = lower(device.kind, **settings)
    assert "__gpu$xla.gpu.triton" in lowered


def lower(kind: str, *, B=8, T=1, G=4, K=8, D=128, S=16, M=128, N=2048, q="bfloat16", kv=None,
          window=False, soft_cap=False, sinks=False) -> str:  # fmt: skip
    """The StableHLO of a call with these shapes."""
    kv = kv or q
    spec = jax.ShapeDtypeStruct
    scaled = kv in ("int8", "float8_e4m3fn")
    args = {
        "q": spec((B, T, G * K, D), q),
        "kv_blocks": spec((N, 2, K, S, D), kv),
        "block_tables": spec((B, M), jnp.int32),
        "kv_lens": spec((B,), jnp.int32),
        "q_lens": spec((B,), jnp.int32),
        "window": spec((), jnp.int32) if window else None,
        "soft_cap": spec((), jnp.float32) if soft_cap else None,
        "sinks": spec((G * K,), jnp.float32) if sinks else None,
        "kv_scales": spec((N, 2, K, S), jnp.float32) if scaled else None,
    }
    order = ("q", "kv_blocks", "block_tables", "kv_lens", "q_lens")

    @jax.jit
    def run(args):
        rest = {name: x for name, x in args.items() if name not in order}
        return paged_attention_triton(
            *(args[name] for name in order), scale=D**-0.5, score_fn=None, **rest
        )

    device = AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return run.trace(args).lower(lowering_platforms=("cuda",)).as_text()
