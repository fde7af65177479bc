"""Faults that users of similar systems met (tests/data/field_reports.json): limits and cancels."""

import itertools

import pytest
from suites import hash_model
from suites.engine_runs import (
    assert_idle,
    check_greedy,
    check_step,
    drive,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.scheduling.sequence import SequenceStatus

ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


# --- length limits


@pytest.fixture(scope="module")
def sixteen() -> Engine:
    """A cache of 16 positions."""
    return make_engine(num_blocks=5, max_model_len=16, **ONE_AT_A_TIME)


@pytest.mark.parametrize("max_tokens", [1, 0, None])
def test_b57_prompts_around_the_limit(sixteen, max_tokens):
    prompts = random_prompts(57, [15, 16, 17])
    params = greedy(max_tokens, prompt_logprobs=0 if max_tokens == 0 else None)
    (output,) = run_all(sixteen, prompts[:1], params)
    assert (len(output.token_ids), output.finish_reason) == (max_tokens != 0, "length")
    if max_tokens == 0:  # scoring needs no room
        (output,) = run_all(sixteen, prompts[1:2], params)
        assert (output.token_ids, output.finish_reason) == ((), "length")
        assert len(output.prompt_logprobs or ()) == 16
    for prompt in prompts[1 + (max_tokens == 0) :]:
        with pytest.raises(ValueError, match=f"prompt of {len(prompt)} tokens must leave room"):
            sixteen.add_request(prompt, params)
    assert_idle(sixteen)


def test_b59_the_limit_is_the_prompts_own_length_not_its_padding():
    engine = make_engine(
        max_num_seqs=1, max_model_len=40, prefill_row_len=64, max_num_batched_tokens=64
    )
    (prompt,) = random_prompts(59, [33])
    (request_id,) = engine.add_requests(prompt, greedy(7))
    engine.step()
    sequence = engine._by_id[request_id].sequence
    assert sequence.num_computed == engine.block_manager.num_tokens(sequence.seq_id) == 33
    assert engine.num_used_blocks == 9
    outputs = drive(engine)
    check_greedy([outputs[request_id][-1]], [greedy(7)])


def test_b60_the_cache_ends_with_a_reason_and_no_slot_is_written_twice(sixteen):
    (prompt,) = random_prompts(60, [10])
    outputs = run_all(sixteen, [prompt], greedy(20))
    check_greedy(outputs, [greedy(6)])
    assert outputs[0].finish_reason == "length"


# --- cancel or finish leaks


@pytest.mark.parametrize(
    "state", ["waiting", "first", "middle", "last", "running", "preempted", "finished", "unknown"]
)
def test_b40_cancel_in_every_state(state):
    engine = make_engine(prefill_chunk_len=5)
    others = random_prompts(40, [9, 12])
    other_ids = engine.add_requests(others, greedy(40))
    for _ in range(0 if state == "preempted" else 2):
        engine.step()
    (prompt,) = random_prompts(41, [14])
    target = engine.add_request(prompt, greedy(2 if state == "finished" else 30))
    sequence = engine._by_id[target].sequence
    reached = {
        "waiting": lambda: sequence.status is SequenceStatus.WAITING,
        "first": lambda: sequence.num_computed == 5,
        "middle": lambda: sequence.num_computed == 10,
        "last": lambda: sequence.num_computed == 14,
        "running": lambda: sequence.num_output >= 3,
        "preempted": lambda: sequence.status is SequenceStatus.PREEMPTED,
        "finished": lambda: sequence.is_finished,
        "unknown": lambda: True,
    }[state]
    for _ in range(60):
        if reached():
            break
        engine.step()
    assert reached()
    is_live = state not in ("finished", "unknown")
    assert engine.cancel("nobody" if state == "unknown" else target) == is_live
    assert not engine.cancel("nobody" if state == "unknown" else target)
    engine.scheduler.check_integrity()
    finals: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        finals.update({output.request_id: output for output in engine.step()})
        check_step(engine)
    assert_idle(engine)
    if is_live:
        assert finals[target].finish_reason == "cancelled"
    check_greedy([finals[request_id] for request_id in other_ids], [greedy(40)] * 2)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 7])
def test_b42_the_first_token_comes_after_the_last_chunk(engine, num_chunks):
    chunked = make_engine(prefill_chunk_len=8)
    for extra in (-1, 0, 1):
        (prompt,) = random_prompts(42 + extra, [8 * num_chunks + extra])
        ids = chunked.add_requests([[5], prompt], greedy(3))
        outputs, steps = {}, {}
        for index in itertools.count():
            for output in chunked.step():
                steps.setdefault(output.request_id, index)
                outputs[output.request_id] = output
            if not chunked.has_unfinished:
                break
        check_greedy([outputs[i] for i in ids], [greedy(3)] * 2)
        # One step in flight: a token of step n is seen in step n + 1.
        assert steps[ids[1]] == -(-len(prompt) // 8)
        assert outputs[ids[1]].token_ids == run_all(engine, [prompt], greedy(3))[0].token_ids


# --- parallel sampling: one sample a request for now


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
def test_b30_exactly_max_tokens_around_a_page(max_tokens):
    engine = make_engine(hash_model.make_model(eos_token_ids=tuple(range(0, 251, 2))))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = run_all(engine, random_prompts(30, [3, 4, 5]), params)
    assert [len(output.token_ids) for output in outputs] == [max_tokens] * 3
