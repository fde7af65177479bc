"""Preempted by recomputation or by swapping, a request's output is what it would be alone: exactly.

The hash model's tokens change with any wrong, missing or foreign slot; pools begin with NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import drive, greedy, make_engine, random_prompts, run_all, sampled

from paged_jax import Engine, Model, RequestOutput, SamplingParams, count_compilations
from paged_jax.pool import KVPool
from paged_jax.scheduling.preemption import PreemptionCosts

BLOCK_SIZE = 4
# Swapping costs as much as 3.5 tokens a block: well-filled blocks are swapped, others recomputed.
COSTS = PreemptionCosts(
    prefill_tokens_per_second=1e3, swap_bytes_per_second=1e12, swap_seconds_per_block=1.75e-3
)
POLICIES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap"},
    "swap to 2 host blocks": {"preemption": "swap", "num_host_blocks": 2},
    "swap to 6 host blocks": {"preemption": "swap", "num_host_blocks": 6},
    "auto": {"preemption": "auto", "preemption_costs": COSTS, "scheduling": "priority"},
}


@dataclasses.dataclass
class ByteCache:
    """Hands a model's values on as integers that 8 bits hold exactly, with 127 among them."""

    inner: Any

    def attend(self, layer: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ByteCache]:
        v = jnp.floor(v / 2).at[..., 0].set(127)
        out, inner = self.inner.attend(layer, q, k, v, **options)
        return out, ByteCache(inner)


def apply_in_bytes(
    params: Any, tokens: Any, positions: Any, cache: Any, *, logits_at: Any
) -> tuple[Any, Any]:
    """The hash model for int8 pools: scales are 1 and its arithmetic is exact."""
    logits, cache = hash_model.apply(
        params, tokens, positions, ByteCache(cache), logits_at=logits_at
    )
    return logits, cache.inner


@functools.cache
def model_for(kv_dtype: str) -> Model:
    model = hash_model.make_model()
    return model if kv_dtype == "float32" else dataclasses.replace(model, apply=apply_in_bytes)


def make(kv_dtype: str = "float32", **config: Any) -> Engine:
    """An engine whose pools hold NaN before anything is written."""
    settings = {"max_num_seqs": 6, "num_blocks": 20, **config}
    engine = make_engine(model_for(kv_dtype), kv_dtype=kv_dtype, **settings)
    pool, host = engine.executor.pool, engine.executor.host_pool
    if pool.scales is None:
        engine.executor.pool = KVPool(jnp.full_like(pool.blocks, jnp.nan))
    else:
        engine.executor.pool = KVPool(pool.blocks, jnp.full_like(pool.scales, jnp.nan))
    if host is not None:
        (host.blocks if host.scales is None else host.scales)[:] = np.nan
    return engine


@functools.cache
def lonely(kv_dtype: str) -> Engine:
    """An engine that runs one request at a time, which always has room; the same programs."""
    return make(kv_dtype)


@functools.cache
def alone(kv_dtype: str, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    (output,) = run_all(lonely(kv_dtype), [list(prompt)], params)
    assert output.num_preemptions == 0
    return output


def check_alone(output: RequestOutput, params: SamplingParams, kv_dtype: str) -> None:
    """Every completion begins like that of the request alone, and ends there unless cancelled."""
    expected = alone(kv_dtype, output.prompt_token_ids, params)
    for mine, theirs in zip(output.outputs, expected.outputs, strict=True):
        count = len(mine.token_ids)
        assert mine.token_ids == theirs.token_ids[:count]
        if mine.finish_reason != "cancelled":
            assert (count, mine.finish_reason) == (len(theirs.token_ids), theirs.finish_reason)
        if mine.logprobs is not None:
            for entry, other in zip(mine.logprobs, theirs.logprobs or (), strict=False):
                assert entry.token_id == other.token_id
                assert abs(entry.logprob - other.logprob) < 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A request of a random mix."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    cancelled: int | None
    priority: int


def random_case(rng: random.Random, max_priority: int) -> Case:
    n = rng.choice([1, 1, 2, 2, 3, 6])
    prompt_len = rng.randint(1, 12)
    # What the pool's 19 blocks have room for, so that no output is capped.
    shared = prompt_len // BLOCK_SIZE
    room = (shared + (19 - shared) // n) * BLOCK_SIZE - prompt_len
    max_tokens = min(rng.randint(8, 30), room)
    (prompt,) = random_prompts(rng.randint(0, 99), [prompt_len])
    kinds = [
        sampled(max_tokens, n=n, temperature=0.0),
        sampled(max_tokens, n=n, seed=rng.randint(0, 9), temperature=3.0),
        sampled(
            max_tokens, n=n, seed=1, repetition_penalty=1.4, frequency_penalty=0.3,
            stop_token_ids=list(range(0, 250, 9)),
        ),
    ]  # fmt: skip
    cancelled = rng.randint(0, 40) if rng.random() < 0.2 else None
    return Case(
        prompt, rng.choice(kinds), rng.randint(0, 4), cancelled, rng.randint(0, max_priority)
    )


def check_mix(engine: Engine, seed: int) -> None:
    """Random requests with cancels at random steps, all at once against each alone."""
    rng = random.Random(seed)
    is_by_priority = engine.config.scheduling == "priority"
    cases = [random_case(rng, 2 if is_by_priority else 0) for _ in range(rng.randint(5, 8))]
    running: dict[str, Case] = {}

    def act(index: int) -> bool:
        for case in cases:
            if case.arrives == index:
                name = engine.add_request(case.prompt, case.params, priority=case.priority)
                running[name] = case
        for request_id, case in running.items():
            if case.cancelled == index:
                engine.cancel(request_id)
        return index <= 6

    outputs = drive(engine, before_step=act)
    assert engine.block_manager.num_swapped == 0
    assert len(outputs) == len(cases)
    for request_id, case in running.items():
        check_alone(outputs[request_id][-1], case.params, engine.config.kv_dtype)


def check_mixes(policy: str, kv_dtype: str, seeds: range) -> None:
    engine = make(kv_dtype, **POLICIES[policy])
    for seed in seeds:
        check_mix(engine, seed)
    stats = engine.stats
    print(policy, kv_dtype, stats)
    num_recomputed = stats.num_preemptions - stats.num_swap_preemptions
    assert stats.num_preemptions > 5
    assert (num_recomputed > 0) == (policy != "swap")
    assert (stats.num_swap_refusals > 0) == policy.endswith("host blocks")
    if policy != "swap to 2 host blocks":  # which hold one block, and few requests
        assert (stats.num_swap_preemptions > 0) == (policy != "recompute")
    num_swapped = stats.num_swapped_out_blocks + stats.num_swapped_in_blocks
    assert stats.swapped_bytes == num_swapped * engine.executor.pool.block_nbytes
    # Those that were cancelled meanwhile did not come back.
    assert stats.num_swapped_in_blocks <= stats.num_swapped_out_blocks


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "recompute" else [])
        for name in POLICIES
    ],
)
def test_random_mixes_equal_each_request_alone(policy):
    check_mixes(policy, "float32", range(8))


@pytest.mark.long
def test_random_mixes_in_an_8_bit_pool():
    check_mixes("swap", "int8", range(5))


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_many_random_mixes(policy, kv_dtype):
    check_mixes(policy, kv_dtype, range(100, 200))


@contextmanager
def preempting(engine: Engine, request_id: str, when: Collection[int]) -> Iterator[list[int]]:
    """Preempt the latest request each time that it is about to compute one of these positions."""
    scheduler, planner = engine.scheduler, type(engine.scheduler._planner)
    make_room, done = planner._make_room, []
    group = scheduler._lineup.live[request_id]

    def make_room_and_preempt(
        self: Any, plan: Any, decoding: list, prefilling: list, is_in_flight: bool
    ) -> bool:
        position = group.leader.num_computed if group.live else -1
        if position in when and position not in done and group in scheduler._lineup.running:
            if is_in_flight:
                return False
            done.append(position)
            for sequences in (decoding, prefilling):
                sequences[:] = [s for s in sequences if s not in group.live]
            scheduler.preemptor.preempt(group, plan)
            scheduler._lineup.put_back(group)
        return make_room(self, plan, decoding, prefilling, is_in_flight)

    planner._make_room = make_room_and_preempt
    yield done
    planner._make_room = make_room


@pytest.fixture(scope="module", params=["recompute", "swap"])
def engine(request) -> Engine:
    return make(**POLICIES[request.param])


@pytest.mark.parametrize(
    "params",
    [
        sampled(12, temperature=0.0),
        sampled(12, seed=3, temperature=3.0, frequency_penalty=0.5),
        sampled(12, seed=3, temperature=3.0, frequency_penalty=0.5, n=3),
    ],
    ids=["greedy", "seeded", "n=3"],
)
def test_b36_preempted_at_every_index_nothing_is_cut_or_given_twice(engine, params):
    (prompt,) = random_prompts(36, [9])
    for position in range(9, 20):
        engine.add_request(prompt, sampled(5, temperature=0.0))
        request_id = engine.add_request(prompt, params)
        with preempting(engine, request_id, [position]) as done:
            outputs = drive(engine)[request_id]  # deltas add up to the whole
        assert done == [position]
        assert outputs[-1].num_preemptions == 1
        assert [len(c.token_ids) for c in outputs[-1].outputs] == [12] * params.n
        check_alone(outputs[-1], params, "float32")


def test_b38_preempted_twice_the_hosts_tokens_stay_what_they_are(engine):
    """Once in the middle of its prompt, once while it decodes."""
    (prompt,) = random_prompts(38, [30])
    params = sampled(12, temperature=0.0)
    request_id = engine.add_request(prompt, params)
    sequence = engine._by_id[request_id].sequence
    num_known = []

    def look(index: int) -> None:
        assert sequence.prompt_token_ids == prompt
        num_known.append(sequence.num_output)
        assert sequence.num_tokens == 30 + sequence.num_output + sequence.num_pending

    with preempting(engine, request_id, [16, 35]) as done:
        (*_, last) = drive(engine, before_step=look)[request_id]
    assert done == [16, 35]
    assert last.num_preemptions == 2
    assert set(np.diff(num_known)) <= {0, 1}
    check_alone(last, params, "float32")


@pytest.mark.parametrize("num_steps", range(3, 18, 2))
def test_b40_cancel_at_any_step_of_swapping_leaves_nothing_behind(num_steps):
    engine = _small_swap_engine()
    prompts = random_prompts(40, [9, 14, 11])
    params = [sampled(24, seed=1), sampled(20, seed=2, n=2), sampled(22, seed=3)]
    ids = engine.add_requests(prompts, params)

    def act(index: int) -> None:
        if index == num_steps:
            assert engine.cancel(ids[1])
            assert not engine.cancel(ids[1])
            assert not engine.block_manager.is_swapped(ids.index(ids[1]))
            engine.scheduler.check_integrity()

    outputs = drive(engine, before_step=act)
    for request_id, one in zip(ids, params, strict=True):
        check_alone(outputs[request_id][-1], one, "float32")
    assert engine.block_manager.num_swapped == 0
    assert engine.block_manager.num_free_host == 19


@functools.cache
def _small_swap_engine() -> Engine:
    return make(preemption="swap")


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_b42_chunks_of_a_prompt_that_is_swapped_out_between_them(num_chunks, extra):
    engine = _chunked_swap_engine()
    prompt_len = 6 * num_chunks + extra
    prompts = random_prompts(42 + extra, [5, prompt_len])
    params = [sampled(9, temperature=0.0), sampled(5, temperature=0.0)]
    other, request_id = engine.add_requests(prompts, params)
    sequence = engine._by_id[request_id].sequence
    ends = range(6, prompt_len, 6)

    def look(index: int) -> None:
        if sequence.num_computed < prompt_len:
            assert sequence.num_output == sequence.num_pending == 0

    with preempting(engine, request_id, ends) as done:
        outputs = drive(engine, before_step=look)
    assert done == list(ends)
    assert outputs[request_id][-1].num_preemptions == len(ends)
    for name, one in zip((other, request_id), params, strict=True):
        check_alone(outputs[name][-1], one, "float32")


@functools.cache
def _chunked_swap_engine() -> Engine:
    return make(preemption="swap", prefill_chunk_len=6, prefix_cache=False)


def test_the_number_of_programs_is_bounded_with_swapping():
    prompts = random_prompts(9, [9, 14, 11, 3])
    with count_compilations() as counted:
        small = {"num_blocks": 14, "max_num_seqs": 2, "max_num_batched_tokens": 8}
        small["prefix_cache"] = False
        engine = make_engine(**small, preemption="swap", max_model_len=50)
        run_all(engine, prompts, greedy(24))
    assert engine.stats.num_swap_preemptions > 0
    assert 0 < counted.count <= engine.executor.max_plain_programs
    with count_compilations() as counted:
        run_all(engine, prompts[::-1], greedy(26))
    assert counted.count == 0


def test_without_a_size_the_host_pool_is_the_pools():
    engine = make_engine(preemption="auto")
    assert engine.executor.host_pool is not None
    assert engine.executor.host_pool.blocks.shape == engine.executor.pool.blocks.shape
    assert engine.block_manager.num_free_host == engine.block_manager.num_usable
    assert make_engine().executor.host_pool is None


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (1, "priority=1 must be 0 with scheduling='fcfs'"),
        (True, "priority=True must be an integer"),
        (0.0, "priority=0.0 must be an integer"),
    ],
)
def test_a_priority_that_nobody_reads_is_refused(priority, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], greedy(1), priority=priority)
    assert not engine.has_unfinished


def test_priorities_reach_the_scheduler():
    engine = make_engine(scheduling="priority")
    priorities = (3, 0, -2, 0)
    ids = [engine.add_request([1, 2], greedy(3), priority=priority) for priority in priorities]
    waiting = [group.request.request_id for group in engine.scheduler._lineup.waiting]
    assert waiting == [ids[2], ids[1], ids[3], ids[0]]
