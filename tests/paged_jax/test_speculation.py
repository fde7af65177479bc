"""Speculation changes how many tokens a step yields and nothing else: exact with hash models.

Every test runs the same requests through an engine that speculates and one that does not: tokens,
finish reasons and log-probabilities must be equal, greedy or sampled.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites import hash_model, looping_model
from suites.engine_runs import check_step, drive, fill_pool, make_engine, run_all
from suites.small_models import letters, nan_model, scripted_model

from paged_jax import (
    Engine,
    NgramSpeculation,
    RequestOutput,
    SamplingParams,
    count_compilations,
)

ON = NgramSpeculation(num_draft_tokens=4, min_ngram_len=1, max_ngram_len=3)
BLOCK_SIZE = 4
MIDDLE = 13.0  # the tune is followed about four times in five


def hot(max_tokens: int = 12, **fields) -> SamplingParams:
    """Warm enough that samples differ, cool enough that the tune is heard.

    Every request has a bias and log-probabilities, so that all batches run the same few programs.
    """
    common = {"temperature": 1.5, "logit_bias": {1: 0.5}, "logprobs": 2}
    return SamplingParams(**{**common, "max_tokens": max_tokens, **fields})


def cold(max_tokens: int | None = 12, **fields) -> SamplingParams:
    """Greedy."""
    return hot(max_tokens, temperature=0.0, **fields)


def looping_engine(favour: float, speculation: NgramSpeculation | None) -> Engine:
    """One geometry, so that all of them share programs; four short requests fit, no more."""
    model = looping_model.make_model(favour, tokenizer=letters(hash_model.VOCAB_SIZE))
    engine = make_engine(model, speculation=speculation, num_blocks=24, max_num_batched_tokens=8)
    fill_pool(engine, np.nan)
    return engine


@functools.cache
def pair(favour: float) -> tuple[Engine, Engine]:
    """An engine that speculates and one that does not."""
    return looping_engine(favour, ON), looping_engine(favour, None)


def tune_prompts(seed: int, lens: list[int]) -> list[list[int]]:
    """Pieces of the tune, where it stands in them, with a wrong note here and there."""
    rng, tune = random.Random(seed), looping_model.TUNE
    return [
        [tune[(i - 1) % len(tune)] if rng.random() < 0.9 else rng.randrange(250) for i in range(n)]
        for n in lens
    ]


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.stop_reason == other.stop_reason
            assert (one.logprobs is None) == (other.logprobs is None)
            for entry, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert (entry.token_id, entry.rank) == (wanted.token_id, wanted.rank)
                assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [t for t, _ in entry.top] == [t for t, _ in wanted.top]


def check(favour: float, prompts: list[list[int]], params, **options) -> list[RequestOutput]:
    """Both engines; returns the outputs, which are equal."""
    speculating, plain = pair(favour)
    for engine in (speculating, plain):
        engine.stats.reset()
    expected = run_all(plain, prompts, params, **options)
    got = run_all(speculating, prompts, params, **options)
    assert_same(got, expected)
    return got


@pytest.mark.parametrize("favour", [0, MIDDLE, 20])
def test_accepted_wholly_in_part_and_not_at_all(favour):
    prompts = tune_prompts(0, [16, 9, 18])
    check(favour, prompts, cold(15))  # no preemption
    speculating, plain = pair(favour)
    stats, num_steps = speculating.stats, plain.stats.num_steps
    print(f"{favour}: {stats.num_accepted_tokens} of {stats.num_drafted_tokens} accepted")
    assert stats.num_output_tokens == plain.stats.num_output_tokens
    assert plain.stats.num_drafted_tokens == 0
    assert stats.num_drafted_tokens > 5
    if favour == 0:
        assert stats.acceptance_rate < 0.1
    elif favour == MIDDLE:
        assert 0.2 < stats.acceptance_rate < 0.9
    else:
        assert stats.acceptance_rate > 0.7  # wrong notes of the prompt are copied too
        assert stats.num_steps < 0.5 * num_steps


@pytest.mark.parametrize("prompt_len", range(8, 8 + BLOCK_SIZE))
def test_drafts_begin_and_end_at_every_place_of_a_block(prompt_len):
    """And ``max_tokens`` falls on every place of a draft."""
    prompts = tune_prompts(prompt_len, [prompt_len] * 6)
    params = [cold(max_tokens) for max_tokens in (1, 2, 3, 5, 7, 12)]
    check(20, prompts, params)
    check(MIDDLE, prompts, params)


@pytest.mark.parametrize(
    "fields",
    [pytest.param({}, marks=pytest.mark.long), {"top_k": 9, "top_p": 0.9}, {"min_p": 0.01}],
    ids=str,
)
def test_sampled_with_seeds_and_logprobs(fields):
    prompts = tune_prompts(1, [17, 12, 30])
    params = [hot(30, seed=seed, **fields) for seed in range(3)]
    outputs = check(MIDDLE, prompts, params)
    assert len({output.token_ids[-8:] for output in outputs}) > 1
    assert pair(MIDDLE)[0].stats.num_accepted_tokens > 5


@pytest.mark.long
def test_all_kinds_of_requests_together():
    """Those with penalties or before ``min_tokens`` take plain rows in the same steps."""
    prompts = tune_prompts(2, [19, 14, 16, 9, 25, 11])
    params = [
        cold(25),
        hot(20, seed=1, n=3),
        hot(20, seed=2, repetition_penalty=1.3, frequency_penalty=0.2),
        cold(18, min_tokens=9, stop_token_ids=[9]),
        hot(22, seed=3, logit_bias={5: 3.0, 9: -5.0}),
        hot(9, seed=4, best_of=3),
    ]
    check(MIDDLE, prompts, params)
    stats = pair(MIDDLE)[0].stats
    assert stats.num_accepted_tokens > 10


def test_stops_inside_accepted_drafts():
    tune, prompts = looping_model.TUNE, tune_prompts(3, [16] * 5)
    text = "".join(letters(hash_model.VOCAB_SIZE).decode([token]) for token in tune)
    params = [
        cold(30, stop_token_ids=[2]),
        cold(30, stop=text[2:5]),
        cold(30, stop=text[3] + text[4], include_stop_str_in_output=True),
        cold(8, stop=text[6]),
        cold(30, stop=text[3:5], stop_token_ids=[9]),
    ]
    outputs = check(20, prompts, params)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert {output.stop_reason for output in outputs} >= {2, text[2:5]}
    for output in outputs:
        assert len(output.token_ids) < 10


def test_tiny_pools_preempt_and_the_tokens_stay():
    for seed in range(4):
        prompts = tune_prompts(seed, [14, 5, 17, 9])
        params = [cold(22), hot(20, seed=seed, n=2), hot(25, seed=1), cold(40)]
        check(MIDDLE, prompts, params)
        stats = pair(MIDDLE)[0].stats
        assert stats.num_preemptions > 0
        assert stats.num_accepted_tokens > 10


def test_a_cancel_while_drafts_are_in_flight():
    engine = pair(20)[0]
    prompts = tune_prompts(4, [16, 18])
    keep = engine.add_request(prompts[0], cold(20))
    victim = engine.add_request(prompts[1], cold(20))

    def act(_: int) -> None:
        plan = engine._in_flight[0] if engine._in_flight else None
        if plan is not None and any(
            row.sequence.request.request_id == victim for row in plan.verify_rows
        ):
            engine.cancel(victim)

    outputs = drive(engine, before_step=act)
    assert outputs[victim][-1].finish_reason == "cancelled"
    (alone,) = run_all(pair(20)[1], prompts[:1], cold(20))
    assert outputs[keep][-1].token_ids == alone.token_ids


def test_rejected_slots_reach_nobody():
    """Right after each step, all slots past the kept positions are poisoned: nothing changes."""
    speculating, plain = pair(MIDDLE)
    prompts = tune_prompts(5, [13, 22])
    expected = run_all(plain, prompts, cold(25))
    manager, pool = speculating.block_manager, speculating.executor.pool
    speculating.reset_prefix_cache()  # what idles in the cache is poisoned too
    ids = speculating.add_requests(prompts, cold(25))
    outputs, num_poisoned = {}, 0
    while speculating.has_unfinished:
        for output in speculating.step():
            outputs[output.request_id] = output
        check_step(speculating)
        speculating._ready += speculating._collect()
        blocks = np.array(speculating.executor.pool.blocks)
        kept = np.zeros((blocks.shape[1], BLOCK_SIZE), bool)
        for sequence in speculating.scheduler.running:
            table = manager.table_array(sequence.seq_id)
            for position in range(sequence.num_computed):
                kept[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        num_poisoned += np.isfinite(blocks[0, ~kept.any(axis=1)]).sum()
        poison = np.broadcast_to(~kept[None, :, None, None, :, None], blocks.shape)
        speculating.executor.pool = type(pool)(np.where(poison, np.float32(np.nan), blocks))
    speculating.reset_prefix_cache()
    assert_same([outputs[request_id] for request_id in ids], expected)
    assert num_poisoned > 0


def test_the_longest_text_of_a_model_fits():
    """Drafts never go past ``max_model_len``, nor past a pool that one request fills."""
    model = looping_model.make_model(20)
    engine = make_engine(model, speculation=ON, num_blocks=6, max_model_len=20, max_num_seqs=1)
    (prompt,) = tune_prompts(6, [13])
    (output,) = run_all(engine, [prompt], cold(None))
    assert len(output.token_ids) == 20 - 13
    assert engine.stats.num_accepted_tokens > 0


def test_nan_in_verified_logits_is_named():
    engine = make_engine(nan_model(), speculation=ON, max_num_batched_tokens=8)
    engine.add_request([1, 1, 1], SamplingParams(temperature=0.0, max_tokens=9), request_id="bad")
    while not (engine._in_flight and engine._in_flight[0].verify_rows):
        engine.step()
    engine._in_flight[1].check_logits = True
    with pytest.raises(FloatingPointError, match="NaN logits for bad"):
        engine.step()


def test_the_number_of_programs_is_bounded():
    """One T whatever the drafts' lengths; row counts as few as the buckets."""
    engine = make_engine(
        scripted_model([1, 2, 3], vocab_size=7),
        speculation=ON,
        max_num_seqs=5,
        num_blocks=80,
        max_num_batched_tokens=8,
    )
    # Shared programs of other engines count as compiled: so this counts new ones only.
    with count_compilations() as counted:
        for count in (1, 2, 3, 5):
            for max_tokens in (3, 5, 20):
                run_all(engine, [[0, 1, 2, 3] * 2] * count, cold(max_tokens))
    plain = make_engine(max_num_seqs=5, max_num_batched_tokens=8).executor.max_plain_programs
    assert engine.executor.max_plain_programs == plain + len((1, 2, 4, 5))
    assert 0 < counted.count <= engine.executor.max_plain_programs
    with count_compilations() as counted:
        run_all(engine, [[0, 1, 2, 3] * 2] * 4, cold(13))
    assert counted.count == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(1, 25),  # max_tokens
        st.sampled_from([1, 1, 2, 4]),  # n
        st.integers(0, 9),  # the step at which it arrives
        st.one_of(st.none(), st.none(), st.integers(0, 20)),  # the step at which it is cancelled
        st.sampled_from(["greedy", "sampled", "penalties", "late", "stops"]),
    ),
    min_size=1,
    max_size=6,
)


def params_of(kind: str, max_tokens: int, n: int, seed: int) -> SamplingParams:
    fields = {
        "greedy": {"temperature": 0.0},
        "sampled": {"seed": seed},
        "penalties": {"seed": seed, "presence_penalty": 0.5},
        "late": {"temperature": 0.0, "min_tokens": max_tokens // 2, "stop_token_ids": [9]},
        "stops": {"seed": seed, "stop": "eb", "stop_token_ids": [2]},
    }
    return hot(max_tokens, n=n, **fields[kind])


def check_random_mix(requests: list, seed: int, favour: float) -> None:
    engine, plain = pair(favour)
    prompts = tune_prompts(seed, [length for length, *_ in requests])
    params = [params_of(kind, most, n, seed) for _, most, n, _, _, kind in requests]
    running: dict[str, int] = {}

    def act(index: int) -> bool:
        for number, (*_, arrives, _, _) in enumerate(requests):
            if arrives == index:
                prompt_len, max_tokens, n, *_ = requests[number]
                shared = prompt_len // BLOCK_SIZE
                if (shared + (23 - shared) // n) * BLOCK_SIZE >= prompt_len + max_tokens:
                    running[engine.add_request(prompts[number], params[number])] = number
        for request_id, number in running.items():
            if requests[number][4] == index:
                engine.cancel(request_id)
        return index <= 9

    outputs = drive(engine, before_step=act)
    expected = run_all(
        plain, [prompts[i] for i in running.values()], [params[i] for i in running.values()]
    )
    for request_id, theirs in zip(running, expected, strict=True):
        for mine, other in zip(outputs[request_id][-1].outputs, theirs.outputs, strict=True):
            count = len(mine.token_ids)
            assert mine.token_ids == other.token_ids[:count]
            if mine.finish_reason != "cancelled":
                assert mine.token_ids == other.token_ids
                assert (mine.finish_reason, mine.stop_reason, mine.text) == (
                    other.finish_reason,
                    other.stop_reason,
                    other.text,
                )


SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.long
@settings(SETTINGS, max_examples=20)
@given(requests=REQUESTS, seed=st.integers(0, 9), favour=st.sampled_from([MIDDLE, 20]))
def test_random_mixes_with_cancels_at_random_steps(requests, seed, favour):
    check_random_mix(requests, seed, favour)


@pytest.mark.long
@settings(SETTINGS, max_examples=1000)
@given(requests=REQUESTS, seed=st.integers(0, 99), favour=st.sampled_from([0, MIDDLE, 20]))
def test_many_random_mixes(requests, seed, favour):
    check_random_mix(requests, seed, favour)
