"""Every refusal of `paged_attention` that no field report covers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import attention_cases
from suites.attention_cases import Case

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.validate import check_kv_blocks

NAMES = ("q", "kv_blocks", "block_tables", "kv_lens", "q_lens")
ARGS = attention_cases.make(Case(kv_lens=(5, 8), block_size=4, garbage=0.0)).args
GOOD = dict(zip(NAMES, ARGS, strict=True))

REFUSED = [
    ({"q": GOOD["q"].astype(np.float64)}, "q has dtype float64; must be one of float32"),
    ({"q": GOOD["q"][0]}, r"q has shape \(1, 4, 16\); must be \[B, T, H, D\]"),
    (
        {"q": np.concatenate([GOOD["q"], GOOD["q"]], axis=-1)},
        "q has head dim 32; must be at most the 16 of kv_blocks",
    ),
    ({"kv_blocks": GOOD["kv_blocks"][0]}, r"kv_blocks has shape .*; must be \[N, 2, K, S, D\]"),
    ({"kv_blocks": GOOD["kv_blocks"][:, :1]}, "kv_blocks has shape"),
    ({"kv_blocks": GOOD["kv_blocks"].astype(np.int8)}, "kv_scales is None; a pool of int8 needs"),
    ({"kv_blocks": GOOD["kv_blocks"].astype(np.int16)}, "kv_blocks has dtype int16"),
    (
        {"kv_scales": np.ones(GOOD["kv_blocks"].shape[:4], np.float32)},
        "kv_scales is given but kv_blocks has dtype float32; only pools of int8 or float8",
    ),
    (
        {
            "kv_blocks": GOOD["kv_blocks"].astype(np.int8),
            "kv_scales": np.ones(GOOD["kv_blocks"].shape[:3], np.float32),
        },
        r"kv_scales is float32.*; must be float32",
    ),
    ({"block_tables": np.int32([1, 2])}, r"block_tables has shape \(2,\); must be \[B, M\]"),
    ({"block_tables": np.zeros((3, 2), np.int32)}, r"block_tables has shape \(3, 2\)"),
    ({"kv_lens": np.int32([5])}, r"kv_lens has shape \(1,\); must be \(2,\)"),
    ({"q_lens": np.int64([1, 1])}, "q_lens has dtype int64; must be int32"),
    ({"q_lens": np.int32([1, 2])}, r"q_lens\[1\] is 2; must be within 0\.\.min\(T=1"),
    ({"q_lens": np.int32([-1, 1])}, r"q_lens\[0\] is -1"),
    ({"block_tables": np.int32([[1, 2], [3, -1]])}, r"block_tables\[1, 1\] is -1 and in use"),
    ({"block_tables": np.int32([[99, 2], [3, 4]])}, r"block_tables\[0, 0\] is 99 and in use"),
    ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\); must be \(4,\)"),
    ({"sinks": np.zeros(4, np.int32)}, "sinks has dtype int32"),
    ({"window": 0}, "window is 0; must be at least 1"),
    ({"window": 1.5}, "window has dtype .*; must be an integer"),
    ({"window": np.int32([1])}, r"window has shape \(1,\); must be a scalar"),
    ({"soft_cap": 0.0}, r"soft_cap is 0\.0; must be above 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**GOOD, **change})


def test_a_pool_beyond_int32_is_refused():
    with pytest.raises(ValueError, match=r"N \* 2 \* K \* S must be under 2\*\*31"):
        check_kv_blocks(jax.ShapeDtypeStruct((2**20, 2, 8, 128, 64), jnp.bfloat16))


def test_shapes_are_checked_while_tracing():
    with pytest.raises(ValueError, match="q_lens has shape"):
        jax.eval_shape(paged_attention, **{**GOOD, "q_lens": np.int32([1])})


def test_values_of_tracers_are_not_read():
    shape = jax.eval_shape(paged_attention, **{**GOOD, "kv_lens": np.int32([999, -1])})
    assert shape.shape == GOOD["q"].shape
