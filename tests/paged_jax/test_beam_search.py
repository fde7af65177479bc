"""Beam search in the engine; with the integer-hash model exactly that of the definition.

The reference (``suites.dense_beam``) scores whole token lists and knows no cache, so one wrong,
missing, foreign or stale slot, a wrong parent or a block that two beams write changes the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites import dense_beam, hash_model
from suites.engine_runs import (
    check_greedy,
    check_logprobs,
    drive,
    fill_pool,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)
from suites.small_models import letters, nan_model, rigged_model

from paged_jax import Engine, RequestOutput, SamplingParams, count_compilations

BLOCK_SIZE = 4
# End tokens that searches meet early and often: one in five.
ENDS = tuple(range(0, hash_model.VOCAB_SIZE, 5))
# The scores of float32 on the device; those of the reference are float64.
TOLERANCE = 1e-4


def hot(max_tokens: int = 9, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 4.0, "max_tokens": max_tokens, **fields})


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


def check_dense(
    output: RequestOutput, params: SamplingParams, *, was_cancelled: bool = False
) -> None:
    """The output is the result of the reference; cancelled, what it had at some step."""
    states = dense_states(output.prompt_token_ids, params)
    if not was_cancelled:
        check_found(output, states[-1].hypotheses[: params.n])
        return
    tokens = [one.token_ids for one in output.outputs]
    for state in states[:-1]:
        best = sorted([*state.hypotheses, *state.beams], key=lambda one: -one.score)[: params.n]
        if [one.tokens for one in best] == tokens:
            check_found(output, best)
            for mine, theirs in zip(output.outputs, best, strict=True):
                assert mine.finish_reason == ("stop" if theirs.has_ended else "cancelled")
            return
    raise AssertionError(f"no step of the reference has {tokens}")


def check_alone(output: RequestOutput, params: SamplingParams) -> None:
    """A request of any kind is what it is alone in a pool that never fills."""
    if params.beam_width is not None:
        check_dense(output, params)
    elif params.n == 1 and params.is_greedy:
        check_greedy([output], [params])
    else:
        (alone,) = run_all(roomy_engine(), [list(output.prompt_token_ids)], params)
        for mine, theirs in zip(output.outputs, alone.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids


@functools.cache
def roomy_engine() -> Engine:
    return make_engine(max_num_seqs=6, num_blocks=200)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = make_engine(max_num_seqs=6, num_blocks=40)
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


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_shortest_searches(engine, max_tokens):
    for width in (1, 4):
        params = beams(width, max_tokens, stop_token_ids=ENDS)
        (output,) = run_all(engine, random_prompts(3, [8]), params)
        check_dense(output, params)


def test_both_ways_to_end_are_met():
    """The tests above would show little if every search ended in the same way."""
    reasons, lens = set(), set()
    for width in (2, 4, 6):
        for prompt in random_prompts(width, [1, 4, 7, 21]):
            params = beams(width, stop_token_ids=ENDS)
            for one in dense_states(tuple(prompt), params)[-1].hypotheses:
                reasons.add(one.has_ended)
                lens.add(len(one.tokens))
    assert reasons == {True, False}
    assert len(lens) > 4


def test_biases_least_lengths_and_prompt_logprobs(engine):
    (prompt,) = random_prompts(5, [10])
    params = beams(
        4, 8, stop_token_ids=ENDS, min_tokens=4, logit_bias={7: 6.0, 8: -50.0}, prompt_logprobs=1
    )
    (output,) = run_all(engine, [prompt], params)
    check_dense(output, params)
    assert all(len(one.token_ids) > 4 for one in output.outputs)
    assert any(7 in one.token_ids for one in output.outputs)
    check_logprobs(output, params)
    (plain,) = run_all(engine, [prompt], dataclasses.replace(params, logit_bias=None))
    assert plain.outputs[0].token_ids != output.outputs[0].token_ids


def test_only_the_best_are_given_back_and_only_at_the_end():
    tokenizer = letters(hash_model.VOCAB_SIZE)
    model = dataclasses.replace(hash_model.make_model(), tokenizer=tokenizer)
    engine = make_engine(model, max_num_seqs=6, num_blocks=40)
    (prompt,) = random_prompts(6, [7])
    params = beams(5, 8, n=2, stop_token_ids=ENDS)
    request_id = engine.add_request(prompt, params)
    (output,) = drive(engine)[request_id]
    check_dense(output, params)
    for one in output.outputs:
        text = one.token_ids[: -1 if one.finish_reason == "stop" else None]
        assert one.text == tokenizer.decode(text)
    assert output.first_token_time is not None
    assert engine.stats.num_output_tokens == sum(len(one.token_ids) for one in output.outputs)


def test_the_models_end_tokens_end_beams_unless_ignored():
    engine = make_engine(hash_model.make_model(eos_token_ids=ENDS), max_num_seqs=6, num_blocks=40)
    (prompt,) = random_prompts(7, [6])
    (output,) = run_all(engine, [prompt], beams(3))
    check_dense(output, beams(3, stop_token_ids=ENDS))
    (output,) = run_all(engine, [prompt], beams(3, ignore_eos=True))
    check_dense(output, beams(3))


def every_kind(seed: int) -> list[SamplingParams]:
    return [
        greedy(12),
        beams(4, 12, stop_token_ids=ENDS, early_stopping="never"),
        hot(10, seed=seed),
        hot(9, n=3, seed=seed),
        beams(2, 14, n=1, length_penalty=2.0, stop_token_ids=ENDS),
        beams(6, 8, early_stopping=True, stop_token_ids=ENDS),
        greedy(15, n=2),
    ]


@pytest.mark.long
def test_all_kinds_of_requests_in_one_step():
    engine = make_engine(max_num_seqs=20, num_blocks=200, max_num_batched_tokens=64)
    fill_pool(engine, np.nan)
    execute, mixes = engine.executor.execute, []

    def look(plan):
        rows = [row.sequence.request.params for row in plan.decode_rows]
        mixes.append({(one.beam_width, one.is_greedy, one.n > 1) for one in rows})
        return execute(plan)

    engine.executor.execute = look
    params = every_kind(seed=4)
    outputs = run_all(engine, random_prompts(9, [5, 9, 3, 12, 8, 1, 4]), params)
    for output, one in zip(outputs, params, strict=True):
        check_alone(output, one)
    assert max(len(mix) for mix in mixes) == 7


def test_recomputed_again_and_again():
    """Searches that each want most of the pool, beside others, preempt each other."""
    engine = make_engine(max_num_seqs=6, num_blocks=20)
    fill_pool(engine, np.nan)
    long = {"length_penalty": 2.0, "early_stopping": "never", "stop_token_ids": ENDS}
    params = [greedy(40), beams(3, 16, **long), beams(2, 20, **long)]
    for seed in range(3):
        outputs = run_all(engine, random_prompts(seed, [5, 9, 3]), params)
        for output, one in zip(outputs, params, strict=True):
            check_alone(output, one)
        assert outputs[2].num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_cancel_gives_the_best_so_far(engine, num_steps):
    prompts = random_prompts(80 + num_steps, [20, 5])  # not cached
    params = beams(4, 9, n=3, stop_token_ids=ENDS, early_stopping="never")
    keep = engine.add_request(prompts[1], beams(2, n=2))
    victim = engine.add_request(prompts[0], params)

    def act(index: int) -> None:
        if index == num_steps:
            assert engine.cancel(victim)
            assert not engine.cancel(victim)
            engine.scheduler.check_integrity()

    outputs = drive(engine, before_step=act)
    (output,) = outputs[victim]
    assert "cancelled" in {one.finish_reason for one in output.outputs}
    check_dense(output, params, was_cancelled=True)
    check_dense(outputs[keep][-1], beams(2, n=2))


def test_logits_that_are_no_numbers_end_a_search():
    engine = make_engine(nan_model())
    (output,) = run_all(engine, [[1, 2]], beams(2, 5))
    assert [(one.token_ids, one.finish_reason) for one in output.outputs] == [((), "length")]


@pytest.mark.parametrize("vocab_size", [1, 2, 3])
def test_vocabularies_smaller_than_the_width(vocab_size):
    """Fewer beams than the width, fewer hypotheses than asked for."""
    logits = np.linspace(0, 1, vocab_size)
    engine = make_engine(rigged_model(logits), max_num_seqs=6)
    logprobs = logits - np.log(np.exp(logits).sum())
    for ends in ((), (vocab_size - 1,)):
        params = beams(4, 3, stop_token_ids=ends, length_penalty=0.0)
        (output,) = run_all(engine, [[0]], params)
        search = dense_beam.Search(width=4, max_tokens=3, ends=ends, length_penalty=0.0)
        states = dense_beam.run(search, lambda outputs: np.tile(logprobs, (len(outputs), 1)))
        scores = [one.score for one in states[-1].hypotheses]
        np.testing.assert_allclose([one.score for one in output.outputs], scores, atol=TOLERANCE)
        assert len({one.token_ids for one in output.outputs}) == len(scores)


def test_refusals():
    engine = make_engine()  # 16 blocks of 4, four sequences
    with pytest.raises(ValueError, match="beam_width=5 must be at most max_num_seqs=4"):
        engine.add_request([1], beams(5))
    with pytest.raises(ValueError, match="52 token slots for each of its 4 sequences"):
        engine.add_request([1] * 54, beams(4))


def test_the_number_of_programs_is_bounded():
    engine = make_engine(max_num_seqs=12, num_blocks=91, max_model_len=112, prefill_row_len=16)
    rng = np.random.default_rng(0)
    with count_compilations() as plain:
        run_all(engine, random_prompts(1, [3, 40, 9]), greedy(4))
    with count_compilations() as counted:
        for width in range(1, 8):
            lens = rng.integers(1, 60, size=3)
            run_all(engine, random_prompts(width, lens), beams(width, 5))
    # One padded number of candidates (8), decode rows padded to 1, 8, 12, one prefill row of 16,
    # and the block copy.
    assert plain.count <= engine.executor.max_plain_programs
    assert counted.count <= 5
    with count_compilations() as again:
        run_all(engine, random_prompts(2, [5, 33, 12]), [beams(7, 9), beams(3, 4), beams(1, 6)])
    assert again.count == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt length
        st.integers(1, 14),  # max_tokens
        st.integers(2, 6),  # beams, completions
        st.sampled_from(["beams", "beams", "greedy", "sampled", "parallel"]),
        st.integers(0, 9),  # the step at which it arrives
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step at which it is cancelled
    ),
    min_size=1,
    max_size=5,
)
ENGINES = {
    chunk_len: make_engine(max_num_seqs=6, num_blocks=20, prefill_chunk_len=chunk_len)
    for chunk_len in (3, None)
}


def params_of(kind: str, max_tokens: int, width: int, seed: int) -> SamplingParams:
    if kind == "beams":
        early = (True, False, "never")[seed % 3]
        return beams(width, max_tokens, early_stopping=early, stop_token_ids=ENDS)
    if kind == "greedy":
        return greedy(max_tokens)
    return hot(max_tokens, n=width if kind == "parallel" else 1, seed=seed)


def check_random_mix(requests: list, seed: int, chunk_len: int | None) -> None:
    engine = ENGINES[chunk_len]
    prompts = random_prompts(seed, [length for length, *_ in requests])
    params = [
        params_of(kind, max_tokens, width, seed) for _, max_tokens, width, kind, *_ in requests
    ]
    running: dict[str, int] = {}

    def fits(number: int) -> bool:
        shared = len(prompts[number]) // BLOCK_SIZE
        room = (shared + (19 - shared) // params[number].num_samples) * BLOCK_SIZE
        return room >= len(prompts[number]) + (params[number].max_tokens or 0)

    def act(index: int) -> bool:
        for number, (*_, arrives, _) in enumerate(requests):
            if arrives == index and fits(number):
                running[engine.add_request(prompts[number], params[number])] = number
        for request_id, number in running.items():
            if requests[number][-1] == index:
                engine.cancel(request_id)
        return index <= 9

    outputs = drive(engine, before_step=act)
    assert set(outputs) == set(running)
    for request_id, number in running.items():
        last = outputs[request_id][-1]
        if "cancelled" not in {one.finish_reason for one in last.outputs}:
            check_alone(last, params[number])
        elif params[number].beam_width is not None:
            check_dense(last, params[number], was_cancelled=True)


SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.long
@settings(SETTINGS, max_examples=12)
@given(requests=REQUESTS, seed=st.integers(0, 9), chunk_len=st.sampled_from(list(ENGINES)))
def test_random_mixes_with_cancels_at_random_steps(requests, seed, chunk_len):
    check_random_mix(requests, seed, chunk_len)


@pytest.mark.long
@settings(SETTINGS, max_examples=500)
@given(requests=REQUESTS, seed=st.integers(0, 12), chunk_len=st.sampled_from(list(ENGINES)))
def test_many_random_mixes(requests, seed, chunk_len):
    check_random_mix(requests, seed, chunk_len)
