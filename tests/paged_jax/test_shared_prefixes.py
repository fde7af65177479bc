"""The prefix cache in the engine: the same tokens as without it, exactly, and less computed.

With the integer-hash model one wrong, stale or foreign slot changes every later logit, so a hit
that gives the expected tokens has read exactly what the cold run computed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites import hash_model
from suites.engine_runs import (
    check_greedy,
    check_logprobs,
    drive,
    fill_pool,
    greedy,
    make_engine,
    num_cached,
    random_prompts,
    run_all,
)
from suites.small_models import letters

from paged_jax import Engine, KVPool, RequestOutput, SamplingParams

SIZE = 4


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One for all tests that have room: each draws prompts of its own."""
    return make_engine(max_num_seqs=6, num_blocks=40)


def run_one(engine: Engine, prompt: list[int], params: SamplingParams | None = None, **options):
    """Run alone and check greedy tokens; returns the output."""
    params = params or greedy()
    request_id = engine.add_request(prompt, params, **options)
    output = drive(engine)[request_id][-1]
    check_greedy([output], [params])
    return output


def poison_all_but_cached(engine: Engine) -> None:
    """NaN in every block that the cache does not keep."""
    assert not engine.has_unfinished
    pool = engine.block_manager._pool
    blocks = np.array(engine.executor.pool.blocks)
    for block in range(engine.num_blocks):
        if not pool.is_kept(block):
            blocks[:, block] = np.nan
    engine.executor.pool = KVPool(jnp.asarray(blocks))


def overwrite_cached(engine: Engine) -> None:
    """Other numbers in every block that the cache keeps."""
    pool = engine.block_manager._pool
    blocks = np.array(engine.executor.pool.blocks)
    for block in range(engine.num_blocks):
        if pool.is_kept(block):
            blocks[:, block] += 1
    engine.executor.pool = KVPool(jnp.asarray(blocks))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 21])
def test_a_second_request_computes_only_what_is_new(engine, length):
    (prompt,) = random_prompts(length, [length])
    (other,) = random_prompts(100 + length, [6])
    full = length // SIZE * SIZE
    # The last token of a prompt is always computed; of another beginning only full blocks are kept.
    for again, least, most in (
        (prompt, 0, 0),
        (prompt, length - 1, length - 1),
        (prompt + other, full, length),
    ):
        engine.stats.reset()
        output = run_one(engine, again)
        assert least <= output.num_cached_tokens <= most
        assert engine.stats.num_prompt_tokens == len(again) - output.num_cached_tokens
        assert engine.stats.prefix_cache_queries == len(again)
        assert engine.stats.prefix_cache_hits == output.num_cached_tokens
    assert engine.stats.prefix_cache_hit_rate == output.num_cached_tokens / (length + 6)


def test_the_next_turn_of_a_chat_finds_prompt_and_answer(engine):
    (prompt, question) = random_prompts(1, [10, 7])
    answer = list(run_one(engine, prompt, greedy(9)).token_ids)
    turn = prompt + answer + question
    # The last token of the answer was never fed to the model, so its block is not full.
    assert run_one(engine, turn).num_cached_tokens == 16
    branches = [prompt + answer + other for other in random_prompts(2, [5, 3, 9])]
    for output in run_all(engine, branches, greedy()):
        assert output.num_cached_tokens >= 16
        assert list(output.token_ids) == hash_model.expected_greedy(output.prompt_token_ids, 8)


def test_hits_read_the_cache_and_nothing_else(engine):
    (prompt,) = random_prompts(3, [18])
    run_one(engine, prompt)
    poison_all_but_cached(engine)
    assert run_one(engine, prompt).num_cached_tokens == 17
    overwrite_cached(engine)
    request_id = engine.add_request(prompt, greedy())
    wrong = drive(engine)[request_id][-1]
    assert list(wrong.token_ids) != hash_model.expected_greedy(prompt, 8)
    engine.reset_prefix_cache()
    assert run_one(engine, prompt).num_cached_tokens == 0


def test_logprobs_and_penalties_of_a_hit_are_those_of_the_cold_run(engine):
    """Raw log-probabilities are exact; penalties count the prompt, cached or not."""
    (prompt,) = random_prompts(4, [15])
    params = greedy(6, logprobs=4, repetition_penalty=1.5, presence_penalty=0.5)
    outputs = [run_one(engine, prompt, params) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 14]
    assert outputs[0].logprobs == outputs[1].logprobs
    check_logprobs(outputs[1], params)


def test_prompt_logprobs_are_computed_at_every_position(engine):
    (prompt,) = random_prompts(5, [13])
    for max_tokens in (0, 4):
        params = greedy(max_tokens, prompt_logprobs=2)
        for _ in range(2):
            output = run_one(engine, prompt, params)
            assert output.num_cached_tokens == 0
            check_logprobs(output, params)
    # They are found by others, and a request that scores nothing ends at once.
    assert run_one(engine, prompt, greedy(0)).num_cached_tokens == 12


def test_all_branches_of_a_request_share_what_the_first_one_found(engine):
    (prompt,) = random_prompts(6, [14])
    params = SamplingParams(temperature=4.0, max_tokens=7, n=4, seed=6)
    cold, hit = (run_all(engine, [prompt], params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 13)
    assert [c.token_ids for c in hit.outputs] == [c.token_ids for c in cold.outputs]
    # Whatever branch a chat goes on with.
    for completion in cold.outputs:
        turn = [*prompt, *completion.token_ids, 5, 6]
        assert run_one(engine, turn).num_cached_tokens >= (14 + 6) // SIZE * SIZE


def test_without_it_every_request_runs_cold():
    engine = make_engine(prefix_cache=False)
    (prompt,) = random_prompts(8, [14])
    for _ in range(2):
        assert run_one(engine, prompt).num_cached_tokens == 0
    assert engine.stats.num_prompt_tokens == 28
    assert engine.stats.prefix_cache_queries == engine.stats.prefix_cache_hits == 0
    assert engine.stats.prefix_cache_hit_rate == 0.0
    assert engine.block_manager.stats().cached == 0


def test_a_request_that_shares_starts_where_a_cold_one_would_wait():
    """13 of 16 blocks are held; what is shared of the third prompt takes none of the rest."""
    engine = make_engine()
    prompt, strange = random_prompts(9, [48, 30])
    ids = [engine.add_request(prompt, greedy(12))]

    def act(index: int) -> None:
        if index == 5:
            ids.append(engine.add_request(strange, greedy(1)))
        if index == 6:
            assert engine.scheduler.num_waiting == 1
            engine.cancel(ids[1])
            ids.append(engine.add_request(prompt[:46], greedy(2)))
        if index == 7:
            assert engine.scheduler.num_running == 2

    outputs = drive(engine, before_step=act)
    last = [outputs[ids[number]][-1] for number in (0, 2)]
    check_greedy(last, [greedy(12), greedy(2)])
    assert last[1].num_cached_tokens == 45


def test_a_preempted_request_finds_its_own_blocks():
    engine = make_engine()
    prompts = random_prompts(11, [30, 4, 17, 9])
    outputs = run_all(engine, prompts, greedy(34))
    check_greedy(outputs, [greedy(34)] * 4)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.prefix_cache_hits > 0
    assert not any(output.num_cached_tokens for output in outputs)


def test_the_token_after_a_stop_is_never_published(engine):
    """The step in flight writes the stop token, and with 7 + 1 tokens it would fill a block."""
    (prompt,) = random_prompts(12, [5])
    output = hash_model.expected_greedy(prompt, 8)
    for num_tokens in (3, 4):
        params = greedy(8, stop_token_ids=[output[num_tokens - 1]])
        stopped = run_one(engine, prompt, params)
        assert stopped.token_ids == tuple(output[:num_tokens])
        known = prompt + output
        # Positions 0 .. 5 + num_tokens - 2 were fed to the model by steps before the stop.
        assert num_cached(engine, known) == (5 + num_tokens - 1) // SIZE * SIZE
    engine.reset_prefix_cache()
    texts = dataclasses.replace(hash_model.make_model(), tokenizer=letters(hash_model.VOCAB_SIZE))
    reader = make_engine(texts, max_num_seqs=6, num_blocks=40)
    stop = texts.tokenizer.decode(output[1:3])
    request_id = reader.add_request(prompt, greedy(8, stop=stop))
    assert drive(reader)[request_id][-1].stop_reason == stop
    assert num_cached(reader, prompt + output) == 4


def test_nothing_is_published_before_its_step_has_returned(engine):
    """A step computes 16 tokens; the one before it returns while it runs."""
    (prompt,) = random_prompts(13, [40])
    seen = []

    def act(index: int) -> None:
        seen.append(num_cached(engine, prompt))

    engine.add_request(prompt, greedy(3))
    drive(engine, before_step=act)
    assert seen[:5] == [0, 0, 16, 32, 40]


def test_two_salts_share_nothing(engine):
    (prompt,) = random_prompts(14, [19])
    tables: dict[str | None, set[int]] = {}
    for salt in (None, "a", "b"):
        output = run_one(engine, prompt, cache_salt=salt)
        assert output.num_cached_tokens == 0
        match = engine.block_manager.lookup(engine._namespace(salt), prompt)
        tables[salt] = set(match.blocks)
        assert len(tables[salt]) == 4
    assert len(set.union(*tables.values())) == 12
    for salt in (None, "a", "b"):
        assert run_one(engine, prompt, cache_salt=salt).num_cached_tokens == 18
    assert num_cached(engine, prompt, cache_salt="c") == 0
    (generated,) = engine.generate(prompt, greedy(2), cache_salt="c")
    assert generated.num_cached_tokens == 0
    (streamed,) = [out for out in engine.stream(prompt, greedy(2), cache_salt="c") if out.finished]
    assert streamed.num_cached_tokens == 18


@pytest.mark.parametrize("salt", ["", 7, b"a"])
def test_salts_are_strings(engine, salt):
    with pytest.raises(ValueError, match=r"cache_salt=.* must be a string that is not empty"):
        engine.add_request([1, 2], greedy(), cache_salt=salt)
    with pytest.raises(ValueError, match="cache_salt="):
        engine.register_prefix([1, 2], cache_salt=salt)


def test_eviction_changes_nothing_but_hits():
    """A pool of 16 blocks, 12 prompts of 5 blocks in turns: some are found, some evicted."""
    engine = make_engine()
    fill_pool(engine, np.nan)
    common = random_prompts(15, [8])[0]
    prompts = [common + tail for tail in random_prompts(16, [12] * 6)]
    hits = [run_one(engine, prompt).num_cached_tokens for prompt in prompts * 3]
    assert engine.block_manager.prefix_stats().evictions > 10
    # The common beginning was used last by everyone, so it stays.
    assert hits[0] == 0
    assert all(hit >= 8 for hit in hits[1:])


# --- random mixes


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(0, 30),  # of it shared
        st.integers(0, 16),  # max_tokens
        st.integers(1, 4),  # n
        st.integers(0, 12),  # the step at which it arrives
        st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step at which it is cancelled
        st.sampled_from([None, None, "a"]),  # salt
    ),
    min_size=2,
    max_size=8,
)
ENGINES = {
    chunk_len: make_engine(max_num_seqs=6, num_blocks=20, prefill_chunk_len=chunk_len)
    for chunk_len in (3, None)
}
HITS = dict.fromkeys(ENGINES, 0)


@functools.cache
def cold_engine() -> Engine:
    return make_engine(max_num_seqs=6, num_blocks=200, prefix_cache=False)


@functools.cache
def tokens_alone(prompt: tuple[int, ...], n: int, seed: int) -> list[tuple[int, ...]]:
    """What every sample yields in a pool that never fills, without the cache."""
    (output,) = run_all(cold_engine(), [list(prompt)], hot(16, n, seed))
    return [completion.token_ids for completion in output.outputs]


def hot(max_tokens: int, n: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=4.0, max_tokens=max_tokens, n=n, seed=seed)


def check_random_mix(requests: list, seed: int, chunk_len: int | None) -> None:
    engine = ENGINES[chunk_len]
    common, *own = random_prompts(seed, [30] * (len(requests) + 1))
    running: dict[str, int] = {}

    def act(index: int) -> bool:
        for number, (length, shared, max_tokens, n, arrives, _, salt) in enumerate(requests):
            if arrives == index:
                prompt = [*common[:shared], *own[number][shared:]][:length]
                n = 1 if max_tokens == 0 else n
                full = length // SIZE
                if (full + (19 - full) // n) * SIZE > length:
                    params = hot(max_tokens, n, seed)
                    running[engine.add_request(prompt, params, cache_salt=salt)] = number
        for request_id, number in running.items():
            if requests[number][5] == index:
                engine.cancel(request_id)
        return index <= 12

    outputs = drive(engine, before_step=act)
    assert set(outputs) == set(running)
    HITS[chunk_len] += engine.stats.prefix_cache_hits
    engine.stats.reset()
    for output in (some[-1] for some in outputs.values()):
        check_alone(output, seed)


def check_alone(output: RequestOutput, seed: int) -> None:
    alone = tokens_alone(output.prompt_token_ids, len(output.outputs), seed)
    most = max(len(completion.token_ids) for completion in output.outputs)
    for completion, tokens in zip(output.outputs, alone, strict=True):
        count = len(completion.token_ids)
        assert completion.token_ids == tokens[:count]
        assert count == most or completion.finish_reason == "cancelled"


SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def test_random_mixes_equal_each_request_alone_without_the_cache():
    @settings(SETTINGS, max_examples=10)
    @given(requests=REQUESTS, seed=st.integers(0, 3), chunk_len=st.sampled_from(list(ENGINES)))
    def run(requests, seed, chunk_len):
        check_random_mix(requests, seed, chunk_len)

    run()
    print(HITS)
    assert sum(HITS.values()) > 200


@pytest.mark.long
@settings(SETTINGS, max_examples=400)
@given(requests=REQUESTS, seed=st.integers(0, 99), chunk_len=st.sampled_from(list(ENGINES)))
def test_many_random_mixes(requests, seed, chunk_len):
    check_random_mix(requests, seed, chunk_len)
