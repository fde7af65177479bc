"""The Mosaic prefill kernel in its interpreter, with race detection, and lowered for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.devices import A100, B200, H100, H200
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_prefill import (
    paged_attention_mosaic_prefill,
    unsupported_prefill,
)
from pallas_kernels.paged_attention.mosaic_prefill_config import (
    MosaicPrefillConfig,
    pick_mosaic_prefill_config,
    pick_tile_tokens,
)

BASE = Case(
    dtype="bfloat16", block_size=16, num_kv_heads=1, group=4, head_dim=64, max_new=20,
    kv_lens=(37,), q_lens=(20,),
)  # fmt: skip
NEW, CONTEXT = (1, 3, 17, 64), (0, 1, 16, 82)


@functools.partial(
    jax.jit, static_argnames=("score_fn", "return_lse", "config", "scale", "soft_cap", "interpret")
)
def prefill(q, *args, scale=None, score_fn=None, return_lse=True, interpret=True, **kwargs):
    assert score_fn is None
    assert return_lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return paged_attention_mosaic_prefill(q, *args, scale=scale, interpret=interpret, **kwargs)


def check(case: Case, config: MosaicPrefillConfig | None = None) -> None:
    attention_cases.check(functools.partial(prefill, config=config), case)


def test_every_context_of_a_chunk():
    """Rows of 1 to 64 new tokens after 0 to 82 positions, in one call of two query tiles."""
    rows = [(context + new, new) for new in NEW for context in CONTEXT] + [(0, 0)]
    kv_lens, q_lens = zip(*rows, strict=True)
    check(dataclasses.replace(BASE, group=2, max_new=64, kv_lens=kv_lens, q_lens=q_lens))


@pytest.mark.parametrize("row", [
    dict(group=7, num_kv_heads=2, block_size=8, dtype="float16", sinks=True, window=9),
    dict(group=1, head_dim=128, block_size=64, soft_cap=3.0, scale=-0.3, max_new=70,
         q_lens=(70, 13, 1)),
    dict(group=64, block_size=128, max_new=3, kv_lens=(5, 131), q_lens=(3, 2), sinks=True),
    dict(group=8, head_dim=256, block_size=128, max_new=3, kv_lens=(70, 140), q_lens=(3, 3)),
    dict(window=20, block_size=32, kv_lens=(300, 40), q_lens=(20, 7), soft_cap=2.0),
], ids=str)  # fmt: skip
def test_settings(row):
    row = {"kv_lens": (96, 13, 150), "q_lens": (20, 13, 1), **row}
    check(dataclasses.replace(BASE, **row))


@pytest.mark.parametrize("config", [
    MosaicPrefillConfig(tile_rows=64, tile_tokens=16, num_stages=2),
    MosaicPrefillConfig(tile_rows=128, tile_tokens=32, num_stages=1),
], ids=str)  # fmt: skip
def test_small_tiles_and_rings(config):
    """Tiles turn over many times, and most of a window's start inside a tile."""
    case = dataclasses.replace(BASE, kv_lens=(150, 64), q_lens=(20, 20), window=33)
    check(case, config)
