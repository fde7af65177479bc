"""A fixed batch over either cache, against numpy."""

import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import random_prompts
from suites.small_models import scripted_model

from paged_jax.baselines import run_static_batch

PROMPTS = random_prompts(0, [1, 9, 4, 17])
MAX_TOKENS = [5, 1, 8, 3]
MODEL = hash_model.make_model()


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ("dense", {}),
        ("paged", {"block_size": 4}),
        ("paged", {"block_size": 32, "capacity": 33}),
    ],
)
def test_tokens_are_exactly_those_of_each_prompt_alone(cache, options):
    run = run_static_batch(MODEL, PROMPTS, MAX_TOKENS, cache=cache, **options)
    for prompt, count, tokens in zip(PROMPTS, MAX_TOKENS, run.token_ids, strict=True):
        assert tokens == hash_model.expected_greedy(prompt, count)
    assert run.logits == []
    positions = options.get("capacity", 17 + 8 - 1)
    if cache == "paged":
        positions = -(-positions // options["block_size"]) * options["block_size"]
    null_block = options["block_size"] if cache == "paged" else 0
    assert run.cache_nbytes == (4 * positions + null_block) * MODEL.spec.kv_values_per_token * 4
    assert run.prefill_seconds > 0
    assert run.decode_seconds > 0


def test_logits_and_margins_of_every_step():
    run = run_static_batch(MODEL, PROMPTS[:2], [4, 4], cache="dense", keep_logits=True)
    assert len(run.logits) == 4
    assert run.margins.shape == (2, 4)
    for row, prompt in enumerate(PROMPTS[:2]):
        tokens = prompt + run.token_ids[row]
        expected = hash_model.expected_logits(tokens)[len(prompt) - 1 : -1]
        kept = np.stack([logits[row] for logits in run.logits])
        np.testing.assert_array_equal(kept, expected)
        best = np.sort(expected, axis=1)
        np.testing.assert_array_equal(run.margins[row], best[:, -1] - best[:, -2])


def test_forced_tokens_are_fed_instead_of_its_own():
    forced = [[7, 8, 9, 1], [3]]
    run = run_static_batch(
        MODEL, PROMPTS[:2], [4, 4], cache="paged", forced=forced, keep_logits=True
    )
    for row, fed in enumerate([[7, 8, 9], [3, 3, 3]]):
        expected = hash_model.expected_logits([*PROMPTS[row], *fed])[-4:]
        np.testing.assert_array_equal([logits[row] for logits in run.logits], expected)


def test_one_step_is_enough_for_one_token():
    run = run_static_batch(scripted_model([3, 1], vocab_size=4), [[0], [0, 0]], [1, 1])
    assert run.token_ids == [[3], [1]]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "options", "message"),
    [
        ([[1]], [1, 2], {}, r"max_tokens has 2 entries, must have one a prompt \(1 > 0\)"),
        ([], [], {}, "max_tokens has 0 entries"),
        ([[1], []], [1, 1], {}, "prompts must not be empty"),
        ([[1]], [0], {}, "max_tokens=0 must be >= 1"),
        ([[1] * 5], [3], {"capacity": 6}, "capacity=6 must hold the longest row's 7"),
        ([[1]], [1], {"cache": "sparse"}, "cache='sparse' must be 'dense' or 'paged'"),
    ],
)
def test_refusals(prompts, max_tokens, options, message):
    with pytest.raises(ValueError, match=message):
        run_static_batch(MODEL, prompts, max_tokens, **options)
