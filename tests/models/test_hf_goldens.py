"""Every family against Hugging Face transformers, on small random weights, paged and dense."""

import dataclasses

import numpy as np
import pytest
from suites.fixed_batch import FixedBatch
from suites.hf_golden import CASES, Golden

from models.loading import load_model, open_model
from models.registry import FAMILIES

NUM_PROMPT = 25  # the other 50 tokens are decoded
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {name: Golden.load(name).write_folder(root / name) for name in CASES}


def load(name, folder):
    """The model, for the contexts that the case names."""
    longest = CASES[name].get("served_max_position")
    if longest is None:
        return load_model(folder, progress=False)
    stored = open_model(folder)
    config = stored.config.with_max_position(longest)
    return dataclasses.replace(stored, config=config).load("float32")


def run(model, golden, kind, *, chunk):
    """Logits of all tokens: the prompt in chunks, the rest one by one."""
    batch = FixedBatch(
        model,
        kind,
        num_rows=1,
        capacity=len(golden.tokens),
        block_size=4,
        fill=np.nan if kind == "paged" else 0.0,
    )
    found = []
    for start in range(0, NUM_PROMPT, chunk):
        num_new = min(chunk, NUM_PROMPT - start)
        tokens = np.zeros((1, chunk), np.int32)
        tokens[0, :num_new] = golden.tokens[start : start + num_new]
        logits = batch.run(tokens, [num_new], np.arange(chunk)[None])
        found.append(logits[0, :num_new])
    for token in golden.tokens[NUM_PROMPT:]:
        found.append(batch.run([[token]], [1])[0])
    return np.concatenate(found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        ("paged", 7),
        pytest.param("dense", 7, marks=pytest.mark.long),
        pytest.param("paged", NUM_PROMPT, marks=pytest.mark.long),
        pytest.param("dense", NUM_PROMPT, marks=pytest.mark.long),
    ],
)
def test_logits_are_those_of_transformers(folders, name, kind, chunk):
    golden = Golden.load(name)
    found = run(load(name, folders[name]), golden, kind, chunk=chunk)
    assert np.ptp(golden.logits) > 1
    np.testing.assert_allclose(found, golden.logits, atol=TOLERANCE, rtol=0)


def test_every_family_has_a_case():
    assert {case["family"] for case in CASES.values()} == set(FAMILIES)
