"""Beam search in the engine; with the integer-hash model exactly that of the definition.

The reference (``suites.dense_beam``) scores whole token lists and knows no cache, so one wrong,
missing, foreign or stale slot, a wrong parent or a block that two beams write changes the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from suites import dense_beam, hash_model
from suites.engine_runs import (
    check_greedy,
    fill_pool,
    make_engine,
    random_prompts,
    run_all,
)

from paged_jax import Engine, RequestOutput, SamplingParams

BLOCK_SIZE = 4
# End tokens that searches meet early and often: one in five.
ENDS = tuple(range(0, hash_model.VOCAB_SIZE, 5))
# The scores of float32 on the device; those of the reference are float64.
TOLERANCE = 1e-4


def beams(width: int, max_tokens: int | None = 9, **fields) -> SamplingParams:
    return SamplingParams(**{"beam_width": width, "n": width, "max_tokens": max_tokens, **fields})


@functools.cache
def logprobs_after(tokens: tuple[int, ...], bias: tuple, banned: tuple[int, ...]) -> np.ndarray:
    logits = hash_model.expected_logits(tokens)[-1].astype(np.float64)
    for token, value in bias:
        logits[token] += value
    logits[list(banned)] = -np.inf
    return logits - np.log(np.exp(logits).sum())


@functools.cache
def dense_states(prompt: tuple[int, ...], params: SamplingParams) -> list[dense_beam.State]:
    """The reference's states, for requests that the engine caps nowhere."""
    assert params.beam_width is not None
    assert params.max_tokens is not None
    ends = tuple(params.stop_token_ids)

    def logprobs_of(outputs: list[list[int]]) -> np.ndarray:
        banned = ends if len(outputs[0]) < params.min_tokens else ()
        return np.stack(
            [logprobs_after((*prompt, *one), params.bias_pairs, banned) for one in outputs]
        )

    search = dense_beam.Search(
        width=params.beam_width,
        max_tokens=params.max_tokens,
        ends=ends,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    return dense_beam.run(search, logprobs_of)


def check_found(output: RequestOutput, expected: Sequence[dense_beam.Found]) -> None:
    """Tokens are equal, sums and scores close, reasons right."""
    assert [one.token_ids for one in output.outputs] == [one.tokens for one in expected]
    for index, (mine, theirs) in enumerate(zip(output.outputs, expected, strict=True)):
        assert mine.index == index
        assert mine.cumulative_logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
        assert mine.score == pytest.approx(theirs.score, abs=TOLERANCE)
        end = theirs.tokens[-1] if theirs.has_ended else None
        assert mine.stop_reason == end
        if mine.finish_reason != "cancelled":
            assert mine.finish_reason == ("length" if end is None else "stop")


def check_dense(output: RequestOutput, params: SamplingParams) -> None:
    """The output is the result of the reference, or what it has when the request is cancelled."""
    states = dense_states(output.prompt_token_ids, params)
    if "cancelled" not in {one.finish_reason for one in output.outputs}:
        check_found(output, states[-1].hypotheses[: params.n])
        return
    length = max(len(o.token_ids) for o in output.outputs if o.finish_reason == "cancelled")
    state = states[length]
    expected = sorted([*state.hypotheses, *state.beams], key=lambda one: -one.score)
    check_found(output, expected[: params.n])
    for mine, theirs in zip(output.outputs, expected, strict=False):
        assert mine.finish_reason == ("stop" if theirs.has_ended else "cancelled")


def check_alone(output: RequestOutput, params: SamplingParams) -> None:
    """A request of any kind is what it is alone in a pool that never fills."""
    if params.beam_width is not None:
        check_dense(output, params)
    elif params.n == 1 and params.is_greedy:
        check_greedy([output], [params])
    else:
        (alone,) = run_all(roomy_engine(), [list(output.prompt_token_ids)], params)
        for mine, theirs in zip(output.outputs, alone.outputs, strict=True):
            count = len(mine.token_ids) if mine.finish_reason == "cancelled" else None
            assert mine.token_ids == theirs.token_ids[:count]


@functools.cache
def roomy_engine() -> Engine:
    return make_engine(max_num_seqs=6, num_blocks=200)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = make_engine(max_num_seqs=6, num_blocks=60)
    fill_pool(engine, np.nan)
    return engine


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
def test_equals_the_dense_search(engine, width, early_stopping):
    prompts = random_prompts(width, [1, 4, 7, 21])
    for length_penalty in (-1.0, 0.0, 1.0, 2.0):
        params = beams(
            width, early_stopping=early_stopping, length_penalty=length_penalty, stop_token_ids=ENDS
        )
        for prompt in prompts:
            (output,) = run_all(engine, [prompt], params)
            check_dense(output, params)
