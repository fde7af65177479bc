import re

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from paged_jax.sampling.logprobs import prompt_logprobs, token_logprobs


def check(result, logits, tokens, num_logprobs):
    expected = log_softmax(logits.astype(np.float64), axis=1)
    for row, token in enumerate(tokens):
        order = np.lexsort((np.arange(logits.shape[1]), -logits[row]))[:num_logprobs]
        assert result.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(result.top_logprobs[row], expected[row, order], atol=2e-5)
        np.testing.assert_allclose(result.logprob[row], expected[row, token], atol=2e-5)
        assert result.rank[row] == (logits[row] > logits[row, token]).sum() + 1


def test_equals_log_softmax_and_a_full_sort():
    rng = np.random.default_rng(1)
    logits = np.round(rng.normal(size=(8, 200)) * 4).astype(np.float32)  # many ties
    logits[3, 5:50] = -np.inf
    logits[4] *= 1000
    tokens = rng.integers(0, 5, 8).astype(np.int32)
    for num_logprobs in (0, 5, 20):
        result = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), num_logprobs=num_logprobs)
        check(result, logits, tokens, num_logprobs)


def test_a_small_vocabulary_gives_what_it_has():
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    result = token_logprobs(jnp.asarray(logits), jnp.array([0], jnp.int32), num_logprobs=20)
    check(result, logits, [0], 3)
    assert result.top_ids.shape == (1, 3)


def test_prompt_positions_score_the_token_after_them():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 4, 50)).astype(np.float32)
    tokens = rng.integers(0, 50, (3, 4)).astype(np.int32)
    result = prompt_logprobs(jnp.asarray(logits), jnp.asarray(tokens), num_logprobs=5)
    assert result.top_ids.shape == (3, 4, 5)
    assert result.rank.shape == result.logprob.shape == (3, 4)
    for row in range(3):
        part = jax.tree.map(lambda field, row=row: field[row], result)
        check(part, logits[row], tokens[row], 5)


def test_the_vocabulary_is_not_sorted():
    def best_only(logits, tokens):
        return prompt_logprobs(logits, tokens, num_logprobs=5).top_ids[..., 0]

    compiled = jax.jit(best_only).lower(jnp.zeros((2, 3, 5003)), jnp.zeros((2, 3), jnp.int32))
    assert not re.search(r"5003.* sort\(", compiled.compile().as_text())
