"""Several completions of a prompt: one prefill, shared blocks, streams of their own; exact.

With the integer-hash model every branch must equal, token for token, the request that samples with
the same seed and sample index alone, whatever runs beside it and however often it is preempted.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites import hash_model
from suites.engine_runs import (
    check_logprobs,
    drive,
    expected_tokens,
    fill_pool,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)
from suites.small_models import letters

from paged_jax import Engine, RequestOutput, SamplingParams, count_compilations

BLOCK_SIZE = 4


def hot(max_tokens: int = 8, **fields) -> SamplingParams:
    """Warm enough that branches part at once."""
    return SamplingParams(**{"temperature": 4.0, "max_tokens": max_tokens, **fields})


@functools.cache
def roomy_engine() -> Engine:
    return make_engine(max_num_seqs=6, num_blocks=200)


@functools.cache
def tokens_alone(prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[int, ...]]:
    """What samples 0 .. 5 of a request yield as requests of one sequence, where all have room."""
    engine = roomy_engine()
    ids = engine.add_requests([list(prompt)] * 6, dataclasses.replace(params, n=1, best_of=None))
    for index, request_id in enumerate(ids):
        engine._by_id[request_id].sequence.sample_index = index
    outputs = drive(engine)
    assert not any(outputs[request_id][-1].num_preemptions for request_id in ids)
    return [outputs[request_id][-1].token_ids for request_id in ids]


def check_alone(output: RequestOutput, params: SamplingParams) -> None:
    """Every completion equals that sample alone; a cancelled one begins like it."""
    assert len(output.outputs) == params.n
    alone = tokens_alone(output.prompt_token_ids, params)
    for completion in output.outputs:
        tokens = alone[completion.index]
        if completion.finish_reason == "cancelled":
            tokens = tokens[: len(completion.token_ids)]
        assert completion.token_ids == tokens, completion


def check_all(outputs: list[RequestOutput], params: list[SamplingParams]) -> None:
    for output, one in zip(outputs, params, strict=True):
        check_alone(output, one)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = make_engine(max_num_seqs=6, num_blocks=40)
    fill_pool(engine, np.nan)
    return engine


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("prompt_len", [1, 4, 7, 8, 9, 21])
def test_each_branch_is_what_it_would_be_alone(engine, n, prompt_len):
    (prompt,) = random_prompts(prompt_len, [prompt_len])
    params = hot(11, n=n, seed=prompt_len)
    (output,) = run_all(engine, [prompt], params)
    check_alone(output, params)
    assert [completion.index for completion in output.outputs] == list(range(n))
    assert len({completion.token_ids for completion in output.outputs}) == n
    first = output.outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == (
        first.token_ids,
        first.text,
        "length",
    )
    assert output.finished


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("prompt_len", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK_SIZE])
def test_b30_every_clone_has_all_its_tokens(engine, n, prompt_len, max_tokens):
    (prompt,) = random_prompts(30, [prompt_len])
    params = hot(max_tokens, n=n, seed=30, ignore_eos=True)
    request_id = engine.add_request(prompt, params)
    engine.step()
    for completion in engine._by_id[request_id].completions:
        sequence = completion.sequence
        assert (sequence.num_computed, sequence.num_pending) == (prompt_len, 1)
        assert engine.block_manager.num_tokens(sequence.seq_id) == prompt_len
    output = drive(engine)[request_id][-1]
    assert [len(completion.token_ids) for completion in output.outputs] == [max_tokens] * n
    check_alone(output, params)


def test_prompt_blocks_are_held_once_and_the_last_one_copied_by_all_writers_but_one(engine):
    engine.stats.reset()
    (prompt,) = random_prompts(1, [4 * BLOCK_SIZE + 2])
    engine.add_request(prompt, hot(3, n=5, seed=1))
    used, saved = [], []

    def look(index: int) -> None:
        stats = engine.block_manager.stats()
        used.append(stats.used)
        saved.append(stats.saved)

    drive(engine, before_step=look)
    # 18 tokens over two steps of 16, fork; then each of the five writes to the shared block.
    assert used[1:4] == [4, 5, 4 + 5]
    assert saved[1:4] == [0, 4 * 5, 4 * 4]
    assert engine.stats.num_copied_blocks == 4
    assert engine.stats.num_prompt_tokens == len(prompt)
    assert engine.stats.num_output_tokens == 15


def test_greedy_branches_are_equal_and_stop_alike(engine):
    prompts = random_prompts(2, [9, 4])
    for output in run_all(engine, prompts, greedy(9, n=2)):
        first, second = output.outputs
        assert first.token_ids == second.token_ids
        assert (list(first.token_ids), first.finish_reason) == expected_tokens(
            output.prompt_token_ids, greedy(9)
        )


def test_seeds_reproduce_whatever_the_batch(engine):
    prompts = random_prompts(3, [9, 14, 3, 6])
    seeded, free = hot(12, n=3, seed=7), hot(12, n=2)
    (alone,) = run_all(engine, prompts[:1], seeded)
    crowd = run_all(engine, prompts, [seeded, free, greedy(20), free])[0]
    last = run_all(engine, prompts[::-1], [free, greedy(9), free, seeded])[3]
    check_alone(alone, seeded)
    for other in (crowd, last):
        assert [c.token_ids for c in other.outputs] == [c.token_ids for c in alone.outputs]


def test_requests_without_a_seed_differ(engine):
    (prompt,) = random_prompts(4, [9])
    runs = [run_all(engine, [prompt], hot(9, n=2))[0] for _ in range(2)]
    assert len({c.token_ids for run in runs for c in run.outputs}) == 4


def test_each_branch_stops_by_itself():
    engine = make_engine(
        dataclasses.replace(hash_model.make_model(), tokenizer=letters(hash_model.VOCAB_SIZE)),
        max_num_seqs=6,
    )
    (prompt,) = random_prompts(5, [6])
    base = hot(12, n=4, seed=3)
    (free,) = run_all(engine, [prompt], base)
    stop_id, stop_text = free.outputs[1].token_ids[2], free.outputs[2].text[4:6]
    params = dataclasses.replace(base, stop_token_ids=[stop_id], stop=stop_text)
    request_id = engine.add_request(prompt, params)
    outputs = drive(engine)[request_id]
    last = outputs[-1].outputs
    for branch, whole in zip(last, free.outputs, strict=True):
        at_id = whole.token_ids.index(stop_id) + 1 if stop_id in whole.token_ids else 99
        at_text = whole.text.find(stop_text) + 2 if stop_text in whole.text else 99
        count = min(at_id, at_text, 12)
        assert branch.token_ids == whole.token_ids[:count]
        if count == at_text:
            assert (branch.stop_reason, branch.text) == (stop_text, whole.text[: count - 2])
        else:
            assert branch.stop_reason == (stop_id if count == at_id else None)
            assert branch.finish_reason == ("stop" if count == at_id else "length")
    assert {branch.stop_reason for branch in last} == {None, stop_id, stop_text}
    ended = [output.outputs[1].finish_reason is not None for output in outputs]
    assert any(ended[:-1])
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_logprobs_penalties_and_biases_of_each_branch(engine):
    (prompt,) = random_prompts(6, [10])
    fields = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {5: 30.0}}
    params = hot(8, n=3, seed=2, logprobs=2, prompt_logprobs=1, min_tokens=3, **fields)
    (output,) = run_all(engine, [prompt], params)
    check_alone(output, params)
    assert all(5 in completion.token_ids for completion in output.outputs)
    for completion in output.outputs:
        one = dataclasses.replace(output, outputs=(completion,))
        check_logprobs(one, params)
        total = sum(entry.logprob for entry in completion.logprobs or ())
        assert completion.cumulative_logprob == pytest.approx(total)


def test_best_of_gives_the_likeliest_per_token_and_only_at_the_end(engine):
    (prompt,) = random_prompts(7, [9])
    ends = list(range(0, hash_model.VOCAB_SIZE, 9))
    every = hot(9, n=6, seed=5, stop_token_ids=ends, logprobs=0)
    (whole,) = run_all(engine, [prompt], every)
    ranked = sorted(whole.outputs, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    assert len({len(c.token_ids) for c in ranked}) > 1
    params = dataclasses.replace(every, n=2, best_of=6, logprobs=None)
    request_id = engine.add_request(prompt, params)
    (only,) = drive(engine)[request_id]
    assert [c.index for c in only.outputs] == [c.index for c in ranked[:2]]
    assert [c.token_ids for c in only.outputs] == [c.token_ids for c in ranked[:2]]
    assert only.outputs[0].logprobs is None
    assert only.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)
    request_id = engine.add_request(prompt, params)
    engine.step()
    assert engine.cancel(request_id)
    (only,) = drive(engine)[request_id]
    assert {c.finish_reason for c in only.outputs} == {"cancelled"}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_cancel_ends_all_branches_at_once(engine, num_steps):
    """Waiting, in the middle of the prompt, at the fork, after it."""
    prompts = random_prompts(8, [20, 5])
    keep = engine.add_request(prompts[1], hot(9, n=2, seed=1))
    params = hot(9, n=4, seed=1)
    victim = engine.add_request(prompts[0], params)

    def act(index: int) -> None:
        if index == num_steps:
            assert engine.cancel(victim)
            assert not engine.cancel(victim)
            engine.scheduler.check_integrity()

    outputs = drive(engine, before_step=act)
    assert [c.finish_reason for c in outputs[victim][-1].outputs] == ["cancelled"] * 4
    check_alone(outputs[victim][-1], params)
    check_alone(outputs[keep][-1], hot(9, n=2, seed=1))


def test_refusals():
    engine = make_engine()  # 16 blocks of 4, four sequences
    with pytest.raises(ValueError, match=r"n=5 sequences \(n or best_of\) must be at most max_num"):
        engine.add_request([1], hot(n=5))
    with pytest.raises(ValueError, match=r"n=5 sequences .* must be at most max_num_seqs=4"):
        engine.add_request([1], hot(best_of=5))
    # 13 full blocks are shared; 3 are left for 4 sequences.
    with pytest.raises(ValueError, match="52 token slots for each of its 4 sequences"):
        engine.add_request([1] * 54, hot(n=4))
    for n, max_tokens in ((3, 2), (2, 2), (1, 10)):
        params = hot(50, n=n, seed=1)
        (output,) = run_all(engine, [[1] * 54], params)
        assert [len(c.token_ids) for c in output.outputs] == [max_tokens] * n


def test_the_number_of_programs_is_bounded():
    geometry = {"num_blocks": 90, "max_model_len": 110, "max_num_seqs": 12, "prefill_row_len": 16}
    geometry["prefix_cache"] = False  # hits make other prompt shapes, of the same few
    prompts = random_prompts(9, range(1, 60))
    with count_compilations() as counted:
        engine = make_engine(max_num_batched_tokens=32, **geometry)
        for n in (1, 2, 12, 7):
            for count in (1, 5):
                run_all(engine, prompts[:: len(prompts) // count], greedy(3, n=n))
    assert 0 < counted.count <= engine.executor.max_plain_programs + 2 * 2
    with count_compilations() as counted:
        for start in range(12):
            run_all(engine, prompts[start : start + 3], greedy(4, n=1 + start))
    assert counted.count == 0


def test_groups_that_do_not_fit_together_are_preempted_and_resume_whole():
    engine = make_engine(max_num_seqs=10, num_blocks=26)
    fill_pool(engine, np.nan)
    for seed in range(8):
        rng = random.Random(seed)
        prompts = random_prompts(seed, [rng.randint(1, 12) for _ in range(5)])
        params = [hot(rng.randint(9, 14), n=rng.randint(1, 4), seed=seed) for _ in prompts]
        params[2] = greedy(20)
        outputs = run_all(engine, prompts, params)
        check_all(outputs, params)
    print(engine.stats)
    assert engine.stats.num_preemptions > 10
    assert engine.stats.num_copied_blocks > 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(1, 20),  # max_tokens
        st.integers(1, 6),  # n
        st.integers(0, 9),  # the step at which it arrives
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step at which it is cancelled
        st.booleans(),  # greedy
    ),
    min_size=1,
    max_size=6,
)
ENGINES = {
    chunk_len: make_engine(max_num_seqs=6, num_blocks=20, prefill_chunk_len=chunk_len)
    for chunk_len in (3, None)
}


def check_random_mix(requests: list, seed: int, chunk_len: int | None) -> None:
    engine = ENGINES[chunk_len]
    prompts = random_prompts(seed, [length for length, *_ in requests])
    running: dict[str, int] = {}
    params = [
        greedy(max_tokens, n=n) if is_greedy else hot(max_tokens, n=n, seed=seed)
        for _, max_tokens, n, _, _, is_greedy in requests
    ]

    def act(index: int) -> bool:
        for number, (*_, arrives, _, _) in enumerate(requests):
            if arrives == index:
                prompt_len, _, n, *_ = requests[number]
                shared = prompt_len // BLOCK_SIZE
                if (shared + (19 - shared) // n) * BLOCK_SIZE > prompt_len:
                    running[engine.add_request(prompts[number], params[number])] = number
                else:
                    with pytest.raises(ValueError, match="must leave room"):
                        engine.add_request(prompts[number], params[number])
        for request_id, number in running.items():
            if requests[number][4] == index:
                engine.cancel(request_id)
        return index <= 9

    outputs = drive(engine, before_step=act)
    assert set(outputs) == set(running)
    for request_id, number in running.items():
        last = outputs[request_id][-1]
        most = max(len(completion.token_ids) for completion in last.outputs)
        assert most <= params[number].max_tokens  # less where the pool has no room for more
        # Only max_tokens ends these requests, so one longer run is the measure of all.
        longest = dataclasses.replace(params[number], n=1, max_tokens=20, seed=seed)
        alone = tokens_alone(last.prompt_token_ids, longest)
        for completion in last.outputs:
            count = len(completion.token_ids)
            assert completion.token_ids == alone[completion.index][:count]
            assert count == most or completion.finish_reason == "cancelled"


SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.long
@settings(SETTINGS, max_examples=20)
@given(requests=REQUESTS, seed=st.integers(0, 9), chunk_len=st.sampled_from(list(ENGINES)))
def test_random_mixes_with_cancels_at_random_steps(requests, seed, chunk_len):
    check_random_mix(requests, seed, chunk_len)


@pytest.mark.long
@settings(SETTINGS, max_examples=1000)
@given(requests=REQUESTS, seed=st.integers(0, 99), chunk_len=st.sampled_from(list(ENGINES)))
def test_many_random_mixes(requests, seed, chunk_len):
    check_random_mix(requests, seed, chunk_len)
