"""Greedy decoding of the real model equals what Hugging Face transformers gave (float32)."""

import json
from pathlib import Path

import numpy as np
import pytest
from suites.fixed_batch import FixedBatch

GOLDEN = Path(__file__).parents[2] / "data" / "golden_smollm2.json"
LOGIT_TOLERANCE = 2e-3
MARGIN_TOLERANCE = 2e-3


@pytest.mark.weights
@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [("paged", 64), ("dense", 16), pytest.param("dense", 64, marks=pytest.mark.long)],
)
def test_golden_tokens(smollm2, kind, num_tokens):
    items = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]
    prompts = [item["prompt_ids"] for item in items]
    capacity = max(map(len, prompts)) + num_tokens
    batch = FixedBatch(smollm2, kind, num_rows=len(items), capacity=capacity, fill=float("nan"))
    logits = batch.prefill(prompts, chunk=64)
    for row, item in enumerate(items):
        top = item["first_top10"]
        assert np.argsort(-logits[row])[:10].tolist() == top["ids"]
        np.testing.assert_allclose(logits[row, top["ids"]], top["logits"], atol=LOGIT_TOLERANCE)
    tokens = batch.decode_greedy(logits, num_tokens)
    near_ties = 0
    for row, item in zip(tokens, items, strict=True):
        differs = np.nonzero(row != item["greedy_ids"][:num_tokens])[0]
        if differs.size:
            step, margin = differs[0], item["margins"][differs[0]]
            near_ties += 1
            print(f"{item['text'][:40]!r} differs from step {step} on, margin {margin}")
            assert margin < MARGIN_TOLERANCE
    print(f"{kind}: {near_ties} of {len(items)} differ after a near tie")
