"""One call compares the paged engine with a dense cache, ours or another's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import stranger_linen
from suites.fixed_batch import FixedBatch

from models.llama import LlamaConfig, as_model, random_params
from paged_jax import BaselineRun, EngineConfig, compare
from paged_jax.baselines import lockstep_baseline
from paged_jax.integrations import linen

CONFIG = EngineConfig(num_blocks=33, block_size=4)
PROMPTS = [[5, 9, 3, 77, 1], [8], [4, 4, 30]]
COUNTS = [6, 3, 5]


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig.tiny()
    return as_model(config, random_params(config, 0))


def full_context(model):
    """A baseline without any cache: each step computes its whole context from nothing."""

    def run(prompts, max_tokens):
        tokens, logits = [], []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            ids, steps = list(prompt), []
            for _ in range(count):
                steps.append(_last_logits(model, ids))
                ids.append(int(steps[-1].argmax()))
            tokens.append(ids[len(prompt) :])
            logits.append(np.stack(steps))
        return BaselineRun(token_ids=tokens, logits=logits, cache_nbytes=0, seconds=1.0)

    return run


def _last_logits(model, ids):
    batch = FixedBatch(model, "dense", num_rows=1, capacity=len(ids))
    return batch.run([ids], [len(ids)])[0, 0]


def test_paged_against_our_dense_cache(model):
    result = compare(model, PROMPTS, max_tokens=COUNTS, config=CONFIG)
    assert (result.num_requests, result.num_equal, result.num_tokens) == (3, 3, 14)
    assert result.is_equal
    assert 0 < result.max_logit_difference < 1e-4
    # 5 + 5 positions a row: the last token's keys and values are never needed.
    assert result.dense_bytes == 3 * 10 * 4 * model.spec.kv_values_per_token
    assert 0 < result.paged_bytes < result.dense_max_bytes


@pytest.mark.long
def test_paged_against_another_cache(model):
    result = compare(model, PROMPTS, max_tokens=COUNTS, config=CONFIG, baseline=full_context(model))
    assert result.is_equal
    assert result.max_logit_difference < 1e-4
    assert (result.dense_bytes, result.dense_seconds) == (0, 1.0)


def test_a_difference_is_found(model):
    def other(prompts, max_tokens):
        count, vocab_size = max_tokens[0], model.spec.vocab_size
        logits = np.zeros((count, vocab_size), np.float32)
        logits[:, 0] = 7.0
        return BaselineRun(token_ids=[[0] * count], logits=[logits], cache_nbytes=1, seconds=1.0)

    result = compare(model, [[5, 9, 3]], max_tokens=4, config=CONFIG, baseline=other)
    assert result.num_equal == 0
    assert not result.is_equal
    assert result.near_ties == ((0, 0, 7.0),)
    assert result.max_logit_difference > 1


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"token_ids": [[1]]}, r"token_ids have the lengths \[1\], must be \[2\]"),
        ({"logits": [np.zeros((2, 5))]}, r"logits have the shapes \[\(2, 5\)\], must be"),
    ],
)
def test_a_baseline_must_do_what_was_asked(model, run, message):
    whole = {"token_ids": [[1, 2]], "logits": [np.zeros((2, model.spec.vocab_size))]}
    baseline = lambda *_: BaselineRun(**whole | run, cache_nbytes=1, seconds=1.0)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        compare(model, [[1]], max_tokens=2, config=CONFIG, baseline=baseline)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": [3]}, "one a prompt"),
        ({"config": CONFIG, "engine": "an engine"}, "config and engine"),
    ],
)
def test_bad_arguments(model, options, message):
    with pytest.raises(ValueError, match=message):
        compare(model, PROMPTS, **options)


def test_paged_against_flax_own_decode_cache():
    module = stranger_linen.GPT()
    params = stranger_linen.weights(module)
    decoder = stranger_linen.GPT(decode=True)

    def init_cache(num_rows, capacity):
        ids = jnp.zeros((num_rows, capacity), jnp.int32)
        shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), ids, ids))["cache"]
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def step(cache, tokens, position):
        positions = jnp.broadcast_to(position, tokens.shape)
        logits, state = decoder.apply(
            params | {"cache": cache}, tokens, positions, mutable=["cache"]
        )
        return logits[:, 0], state["cache"]

    model = linen.as_model(module.apply, params, max_position=stranger_linen.MAX_LEN)
    prompts = [[5, 9, 3, 7, 1], [8], [4, 4, 30]]  # 40 tokens
    baseline = lockstep_baseline(init_cache, step)
    result = compare(model, prompts, max_tokens=COUNTS, config=CONFIG, baseline=baseline)
    assert result.num_equal == 3
    assert 0 < result.max_logit_difference < 1e-4
    # Keys and values of 10 positions, three rows.
    num_bytes = 3 * 10 * 4 * model.spec.kv_values_per_token
    assert num_bytes <= result.dense_bytes < num_bytes + 100  # the rest: indices
