"""Greedy decoding of the real model from 8-bit keys and values, against the golden tokens.

Teacher-forced: every step is fed the golden token, so one disagreement does not lead to the next.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from suites.fixed_batch import FixedBatch

from paged_jax.pool import KVPool

GOLDEN = Path(__file__).parents[2] / "data" / "golden_smollm2.json"
LEAST_AGREEMENT = {"int8": 0.95, "float8_e4m3fn": 0.85}

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("smollm2")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How one run compares with float32.

    Attributes:
      forced: share of teacher-forced steps whose best token is the golden one.
      free: share of tokens of a free run that are the golden ones, position by position.
      max_error: largest absolute difference of a logit.
      mean_error: mean absolute difference of the logits.
    """

    forced: float
    free: float
    max_error: float
    mean_error: float


def make_batch(model, items, num_tokens, kv_dtype):
    capacity = max(len(item["prompt_ids"]) for item in items) + num_tokens
    batch = FixedBatch(model, "paged", num_rows=len(items), capacity=capacity, fill=float("nan"))
    batch.store = KVPool.create(
        model.spec,
        num_blocks=batch.store.num_blocks,
        block_size=batch.store.block_size,
        dtype=kv_dtype,
        fill=float("nan"),
    )
    return batch


def forced_logits(model, items, num_tokens, kv_dtype):
    """Logits [num_tokens, B, V] of steps that are fed the golden tokens."""
    batch = make_batch(model, items, num_tokens, kv_dtype)
    golden = np.array([item["greedy_ids"][:num_tokens] for item in items], np.int32)
    logits = [batch.prefill([item["prompt_ids"] for item in items], chunk=64)]
    for step in range(num_tokens - 1):
        logits.append(batch.run(golden[:, step : step + 1], np.ones(len(items)))[:, 0])
    return np.stack(logits)


def agreement(model, items, num_tokens, kv_dtype):
    golden = np.array([item["greedy_ids"][:num_tokens] for item in items], np.int32)
    exact = forced_logits(model, items, num_tokens, "float32")
    logits = forced_logits(model, items, num_tokens, kv_dtype)
    batch = make_batch(model, items, num_tokens, kv_dtype)
    prompts = [item["prompt_ids"] for item in items]
    free = batch.decode_greedy(batch.prefill(prompts, chunk=64), num_tokens)
    error = np.abs(logits - exact)
    return Agreement(
        forced=float((golden == logits.argmax(-1).T).mean()),
        free=float((free == golden).mean()),
        max_error=float(error.max()),
        mean_error=float(error.mean()),
    )


@pytest.mark.parametrize(
    ("kv_dtype", "num_prompts", "num_tokens"),
    [
        ("int8", 4, 12),
        pytest.param("int8", None, 64, marks=pytest.mark.long),
        pytest.param("float8_e4m3fn", None, 64, marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_agree_with_float_keys_and_values(smollm2, kv_dtype, num_prompts, num_tokens):
    items = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"][:num_prompts]
    found = agreement(smollm2, items, num_tokens, kv_dtype)
    print(kv_dtype, found)
    assert found.forced >= LEAST_AGREEMENT[kv_dtype]
    assert found.max_error < 10.0
