"""Beam search on the real weights equals one that shares no cache: every step computes all tokens.

In float32; sums that nearly tie could fall either way, so the prompts are fixed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import dense_beam

from paged_jax import DenseKVCache, Engine, EngineConfig, KVPool, Model, SamplingParams

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("smollm2")]

CAPACITY = 48
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small boat that",
    "To make bread you need flour, water,",
    "The three largest planets are",
]


class WholeForward:
    """Log-probabilities after whole token lists, at one padded shape, without any reuse."""

    def __init__(self, model: Model, prompt: list[int], *, width: int) -> None:
        self._prompt, self._width = prompt, width
        self._run = jax.jit(functools.partial(_last_logprobs, model))

    def __call__(self, outputs: list[list[int]]) -> np.ndarray:
        tokens = np.zeros((self._width, CAPACITY), np.int32)
        num_tokens = len(self._prompt) + len(outputs[0])
        for row, output in enumerate(outputs):
            tokens[row, :num_tokens] = [*self._prompt, *output]
        lens = np.full(self._width, num_tokens, np.int32)
        return np.asarray(self._run(tokens, lens), np.float64)[: len(outputs)]


def _last_logprobs(model: Model, tokens: jax.Array, lens: jax.Array) -> jax.Array:
    cache = DenseKVCache.create(model.spec, batch_size=tokens.shape[0], capacity=CAPACITY)
    positions = jnp.broadcast_to(jnp.arange(CAPACITY, dtype=jnp.int32), tokens.shape)
    cache = cache.at(jnp.zeros_like(lens), lens)
    logits, _ = model.apply(model.params, tokens, positions, cache, logits_at=lens[:, None] - 1)
    return jax.nn.log_softmax(logits[:, 0].astype(jnp.float32))


def check(model: Model, prompts: list[str], **fields) -> None:
    engine = Engine(
        model,
        config=EngineConfig(
            num_blocks=80, block_size=4, max_num_seqs=8, max_model_len=64, debug_integrity=True
        ),
    )
    engine.executor.pool = KVPool.create(
        model.spec, num_blocks=engine.num_blocks, block_size=4, fill=np.nan
    )
    params = SamplingParams(**fields)
    assert params.beam_width is not None
    assert params.max_tokens is not None
    for output in engine.generate(prompts, params):
        search = dense_beam.Search(
            width=params.beam_width,
            max_tokens=params.max_tokens,
            ends=[*model.eos_token_ids, *params.stop_token_ids],
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        forward = WholeForward(model, list(output.prompt_token_ids), width=search.width)
        expected = dense_beam.run(search, forward)[-1].hypotheses[: params.n]
        assert [one.token_ids for one in output.outputs] == [one.tokens for one in expected]
        for mine, theirs in zip(output.outputs, expected, strict=True):
            assert mine.score == pytest.approx(theirs.score, abs=1e-4)
    assert engine.stats.num_copied_blocks > 0
    assert engine.num_used_blocks == 0


@pytest.mark.long
def test_equals_a_search_without_a_cache(smollm2):
    period = smollm2.tokenizer.encode(".")
    check(smollm2, PROMPTS[:1], beam_width=4, n=4, max_tokens=10, stop_token_ids=period)


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 3, 6])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_more_prompts_and_widths(smollm2, width, early_stopping):
    check(
        smollm2,
        PROMPTS,
        beam_width=width,
        n=width,
        max_tokens=24,
        stop_token_ids=smollm2.tokenizer.encode("."),
        early_stopping=early_stopping,
        length_penalty=0.6,
    )
