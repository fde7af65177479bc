"""The executor: which tokens belong to which row, programs, copies, counts."""

import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import (
    check_greedy,
    drive,
    greedy,
    make_engine,
    random_prompts,
    run_all,
    sampled,
)
from suites.small_models import nan_model

from paged_jax import Engine, count_compilations
from paged_jax.executor import COPY_BUCKET
from paged_jax.scheduling.plan import NeedsValues, Plan

# (prompt length, asks for prompt logprobs): rows of both kinds in every order.
MIXES = [
    [(5, True), (3, False), (7, True)],
    [(3, False), (5, True), (2, False)],
    [(20, True), (5, False), (6, False), (3, True)],
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.mark.parametrize("mix", MIXES)
def test_tokens_reach_their_requests_when_only_some_ask_for_prompt_logprobs(engine, mix):
    """Rows with prompt logprobs run in a program of their own, so not in the plan's order."""
    prompts = random_prompts(1, [length for length, _ in mix])
    params = [greedy(6, prompt_logprobs=1 if asks else None) for _, asks in mix]
    outputs = run_all(engine, prompts, params)
    check_greedy(outputs, params)
    for output, (length, asks) in zip(outputs, mix, strict=True):
        assert (output.prompt_logprobs is not None) == asks
        assert not asks or len(output.prompt_logprobs) == length


def test_more_scored_rows_than_one_program_takes():
    engine = make_engine(prefill_row_len=2, max_num_batched_tokens=16)
    prompts = random_prompts(2, [9, 7, 1])
    params = [greedy(2, prompt_logprobs=0)] * 3
    outputs = run_all(engine, prompts, params)
    check_greedy(outputs, params)
    for output in outputs:
        expected = log_softmax(hash_model.expected_logits(output.prompt_token_ids))
        entries = output.prompt_logprobs
        assert entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            token = output.prompt_token_ids[position]
            assert entry.token_id == token
            assert abs(entry.logprob - expected[position - 1, token]) < 1e-5


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_copies_go_to_the_device_in_fixed_launches(engine):
    pool = engine.executor.pool
    before = np.array(pool.blocks)
    engine.executor.execute(Plan(step=1, copies=[(3, 9), (3, 8), (5, 2)]))
    expected = before.copy()
    expected[:, [9, 8, 2]] = before[:, [3, 3, 5]]
    np.testing.assert_array_equal(engine.executor.pool.blocks, expected)
    with count_compilations() as counted:
        engine.executor.execute(Plan(step=2, copies=[(9, 3)]))
    assert counted.count == 0
    with pytest.raises(ValueError, match=r"dst has values 17..17; must be within 0..16"):
        engine.executor.execute(Plan(step=3, copies=[(9, 17)]))


def test_more_copies_than_a_launch_takes():
    engine = make_engine(num_blocks=2 * COPY_BUCKET + 60, max_model_len=64)
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.arange(1, engine.num_blocks))[: 2 * COPY_BUCKET + 20]
    sources, targets = ids.reshape(2, -1)
    pool = engine.executor.pool
    values = rng.normal(size=pool.blocks.shape).astype(np.float32)
    engine.executor.pool = type(pool)(pool.blocks + values)
    engine.executor.execute(Plan(step=1, copies=list(zip(sources, targets, strict=True))))
    expected = values.copy()
    expected[:, targets] = values[:, sources]
    np.testing.assert_array_equal(engine.executor.pool.blocks, expected)


def test_an_empty_plan_computes_nothing(engine):
    handle = engine.executor.execute(Plan(step=1))
    assert handle.num_positions == handle.num_real_positions == 0
    result = handle.result()
    assert (result.token_ids, result.logprobs, result.prompt_logprobs) == ([], [], [])


def test_token_counts_live_exactly_while_a_request_uses_penalties(engine):
    assert engine.executor.state.output_counts is None
    engine.add_request([1, 2, 3], greedy(4, presence_penalty=1.0))
    engine.step()
    counts = np.array(engine.executor.state.output_counts)
    assert counts.shape == (5, hash_model.VOCAB_SIZE)
    engine.executor.execute(Plan(step=99))  # a step without rows, as those that only swap
    np.testing.assert_array_equal(engine.executor.state.output_counts, counts)
    drive(engine)
    engine.add_request([1, 2, 3], greedy(4))
    drive(engine)
    assert engine.executor.state.output_counts is None


def test_positions_and_padding_are_counted(engine):
    engine.add_request(range(100, 111), greedy(2))  # not cached
    engine.stats.reset()
    drive(engine)
    # Two rows of 8 for 11 tokens, then one decode row: 16 + 1 positions, 5 of them padding.
    assert (engine.stats.num_positions, engine.stats.num_padding_positions) == (17, 5)


def test_nan_logits_name_the_requests():
    engine = make_engine(nan_model(), check_logits=True)
    engine.add_request([1], greedy(2), request_id="bad")
    plan = engine.scheduler.schedule()
    assert isinstance(plan, Plan)
    handle = engine.executor.execute(plan)
    with pytest.raises(
        FloatingPointError, match="NaN logits for bad: the model's weights or a bug"
    ):
        handle.result()


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_gpu_backend_without_a_gpu_is_refused_when_the_engine_is_made(backend):
    with pytest.raises(NotImplementedError, match=f"attention_backend='{backend}' needs an NVIDIA"):
        make_engine(attention_backend=backend)


def test_rows_that_start_from_the_host_yield_the_same_tokens():
    """As after a swap or a beam's fork: token, random stream and counts come with the row."""
    prompts = random_prompts(8, [9, 3, 6])
    params = [
        sampled(10, seed=3, repetition_penalty=1.3, frequency_penalty=0.3),
        sampled(12, seed=4),
        sampled(9, seed=5, n=2),
    ]
    expected = run_all(make_engine(num_blocks=60), prompts, params)
    engine = make_engine(num_blocks=60)
    schedule = engine.scheduler.schedule
    ready = []

    def from_host():
        ready.extend(engine._collect())
        engine._ready, ready[:] = engine._ready + ready, []
        plan = schedule()
        if not isinstance(plan, NeedsValues):
            plan.decode_rows = [row._replace(from_host=True) for row in plan.decode_rows]
        return plan

    engine.scheduler.schedule = from_host
    outputs = run_all(engine, prompts, params)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in mine.outputs] == [one.token_ids for one in theirs.outputs]
