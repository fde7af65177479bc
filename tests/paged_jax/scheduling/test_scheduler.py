"""Admission, chunked prefill, decode, stops and refusals."""

from __future__ import annotations

import pytest
from absl import logging
from suites.host_simulation import SimulatedServer, make_request

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.plan import NEEDS_VALUES, NeedsValues
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


def make_scheduler(num_blocks: int = 100, block_size: int = 4, **limits: int | None) -> Scheduler:
    arguments = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "prefill_row_len": 8,
        "prefill_chunk_len": None,
        "max_model_len": 1000,
        **limits,
    }
    return Scheduler(BlockManager(num_blocks=num_blocks, block_size=block_size), **arguments)


def rows_of(rows) -> list[tuple[int, int, int, bool]]:
    return [(row.sequence.seq_id, row.start, row.num_new, row.samples) for row in rows]


def test_prompt_is_cut_into_rows_and_only_the_last_samples():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 20)).leader
    plan = scheduler.schedule()
    assert rows_of(plan.prefill_rows) == [(0, 0, 8, False), (0, 8, 8, False), (0, 16, 4, True)]
    assert (plan.decode_rows, plan.admitted, plan.num_new_tokens) == ([], [sequence], 20)
    assert plan.sampling_rows == plan.prefill_rows[-1:]
    assert (sequence.num_computed, sequence.num_pending, sequence.num_tokens) == (20, 1, 21)
    scheduler.check_integrity()


def test_decode_runs_one_step_ahead():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 5, max_tokens=3)).leader
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert rows_of(second.decode_rows) == [(0, 5, 1, True)]
    assert sequence.num_pending == 2
    assert scheduler.update(first, [4]) == [(sequence, 4)]
    assert (sequence.output_token_ids, sequence.num_pending) == ([4], 1)
    third = scheduler.schedule()
    assert rows_of(third.decode_rows) == [(0, 6, 1, True)]
    # All three tokens are on their way: nothing more may be computed.
    assert scheduler.schedule() is NEEDS_VALUES
    scheduler.update(second, [5])
    assert isinstance(scheduler.schedule(), NeedsValues)
    scheduler.update(third, [6])
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    assert sequence.output_token_ids == [4, 5, 6]
    assert scheduler.schedule().is_empty
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


def test_decodes_come_beside_prompts_within_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=16, prefill_chunk_len=12)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 30))
    scheduler.add(make_request(2, 3))
    plan = scheduler.schedule()
    # Two rows a step at most: request 1 gets the second one, request 2 waits.
    assert rows_of(plan.prefill_rows) == [(0, 0, 4, True), (1, 0, 8, False)]
    plan = scheduler.schedule()
    assert rows_of(plan.decode_rows) == [(0, 4, 1, True)]
    assert rows_of(plan.prefill_rows) == [(1, 8, 8, False), (1, 16, 4, False)]
    plan = scheduler.schedule()
    assert rows_of(plan.prefill_rows) == [(1, 20, 8, False), (1, 28, 2, True)]
    plan = scheduler.schedule()
    assert rows_of(plan.prefill_rows) == [(2, 0, 3, True)]
    assert [row.sequence.seq_id for row in plan.decode_rows] == [0, 1]
    scheduler.check_integrity()


def test_first_come_first_served_no_small_request_overtakes():
    scheduler = make_scheduler(num_blocks=11)
    scheduler.add(make_request(0, 20))
    scheduler.add(make_request(1, 24))
    scheduler.add(make_request(2, 2))
    plan = scheduler.schedule()
    assert {row.sequence.seq_id for row in plan.prefill_rows} == {0}
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_running_is_limited_by_state_slots():
    scheduler = make_scheduler(max_num_seqs=3)
    sequences = [scheduler.add(make_request(i, 2)).leader for i in range(5)]
    scheduler.schedule()
    assert [s.state_slot for s in sequences] == [0, 1, 2, -1, -1]
    scheduler.cancel(1)
    scheduler.schedule()
    assert [s.state_slot for s in sequences] == [0, -1, 2, 1, -1]
    assert scheduler.running == (sequences[0], sequences[2], sequences[3])
    scheduler.check_integrity()


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_b42_first_token_only_after_the_last_chunk(num_chunks, extra):
    outputs = []
    for chunk_len in (6, None):
        server = SimulatedServer(num_blocks=80, block_size=4, prefill_chunk_len=chunk_len)
        server.add(make_request("decoding", 3, 20))
        server.step()
        sequence = server.add(make_request("x", 6 * num_chunks + extra, 5))
        for _ in range(-(-sequence.num_prompt // (chunk_len or 64))):
            assert sequence.num_pending == sequence.num_output == 0
            server.step()
        assert sequence.num_pending == 1
        server.drain()
        outputs.append(sequence.output_token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("max_tokens", [1, 0, None])
def test_b57_prompts_around_the_context_limit(max_tokens):
    limit = 16
    server = SimulatedServer(num_blocks=50, block_size=4, max_model_len=limit)
    below = server.add(make_request("M-1", limit - 1, max_tokens))
    at_limit = make_request("M", limit, max_tokens)
    if max_tokens == 0:
        assert server.add(at_limit).max_tokens == 0
    else:
        with pytest.raises(ValueError, match=r"'M': a prompt of 16 tokens .* max_model_len=16"):
            server.add(at_limit)
    with pytest.raises(ValueError, match=r"a prompt of 17 tokens must leave room"):
        server.add(make_request("M+1", limit + 1, max_tokens))
    server.drain()
    assert (below.finish_reason, below.num_output) == ("length", 0 if max_tokens == 0 else 1)


def test_b60_cache_of_16_prompt_of_10(monkeypatch):
    for limits in ({"num_blocks": 50, "max_model_len": 16}, {"num_blocks": 5}):
        warnings: list[str] = []
        monkeypatch.setattr(
            logging, "warning", lambda text, *args, to=warnings: to.append(text % args)
        )
        server = SimulatedServer(block_size=4, **limits)
        sequence = server.add(make_request("x", 10, 20))
        server.drain()
        assert (sequence.finish_reason, sequence.num_output) == ("length", 6)
        assert len(warnings) == 1
        assert "request 'x': max_tokens=20 capped to 6" in warnings[0]
        server.add(make_request("y", 10, None))
        server.add(make_request("z", 10, 6))
        assert len(warnings) == 1


def test_b32_prompt_that_can_never_fit_is_refused_and_others_go_on():
    server = SimulatedServer(num_blocks=9, block_size=4)
    with pytest.raises(ValueError, match=r"a prompt of 33 tokens .* the pool's 32 token slots"):
        server.add(make_request("never", 33, 1))
    capped = server.add(make_request("capped", 20, 40))
    small = [server.add(make_request(i, 3, 4)) for i in range(6)]
    server.drain(max_steps=60)
    assert (capped.finish_reason, capped.num_output) == ("length", 12)
    assert all(sequence.num_output == 4 for sequence in small)


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"request 'x': prompt_token_ids=\[\]"):
        make_scheduler().add(make_request("x", []))


def test_scoring_request_ends_after_prefill_without_a_token():
    server = SimulatedServer(num_blocks=5, block_size=4, prefill_chunk_len=5)
    sequence = server.add(make_request("x", 16, 0))
    plans = [server.step() for _ in range(4)]
    assert not any(row.samples for plan in plans for row in plan.prefill_rows)
    assert (sequence.num_computed, sequence.status) == (16, SequenceStatus.RUNNING)
    server.drain()
    assert (sequence.finish_reason, sequence.output_token_ids) == ("length", [])


STOPS = {"eos_token_ids": {2, 7}, "stop_token_ids": [9]}


def run_with_tokens(tokens: list[int], **params) -> Sequence:
    """A request whose model emits ``tokens``."""
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 3, 12, **STOPS, **params)).leader
    for token in tokens:
        scheduler.update(scheduler.schedule(), [token])
        if sequence.is_finished:
            break
    scheduler.check_integrity()
    return sequence


def test_b74_every_end_token_ends_and_is_named():
    for token in (2, 7, 9):
        sequence = run_with_tokens([1, token, 3])
        assert sequence.output_token_ids == [1, token]
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", token)


def test_b74_ignore_eos_ignores_all_end_tokens_but_no_stop_token():
    sequence = run_with_tokens([2, 7, 1, 9, 4], ignore_eos=True)
    assert sequence.output_token_ids == [2, 7, 1, 9]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 9)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b74_nothing_stops_before_min_tokens(ignore_eos):
    sequence = run_with_tokens([2, 7, 9, 9, 7, 9, 1], ignore_eos=ignore_eos, min_tokens=5)
    assert sequence.output_token_ids == [2, 7, 9, 9, 7, 9]
    assert sequence.finish_reason == "stop"


def test_token_past_a_stop_is_dropped_and_its_slot_given_back():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 3, stop_token_ids=[9])).leader
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update(first, [9]) == [(sequence, 9)]
    assert scheduler.update(second, [4]) == []
    assert (sequence.output_token_ids, sequence.num_tokens) == ([9], 4)
    assert scheduler.schedule().is_empty


def test_finish_by_stop_string():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 3)).leader
    plan = scheduler.schedule()
    assert scheduler.finish(sequence, "stop", "END")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")
    assert scheduler.update(plan, [4]) == []
    assert not scheduler.finish(sequence, "cancelled")
    assert sequence.finish_reason == "stop"


def test_stop_string_completed_by_the_last_token_wins_over_length():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("x", 3, 1)).leader
    scheduler.update(scheduler.schedule(), [4])
    assert sequence.finish_reason == "length"
    assert not scheduler.finish(sequence, "stop", "END")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")


def test_update_wants_one_token_a_sampling_row():
    scheduler = make_scheduler()
    scheduler.add(make_request("x", 3))
    plan = scheduler.schedule()
    with pytest.raises(
        ValueError, match=r"sampled_token_ids has 2 tokens, .* 1 sampling rows of step 1"
    ):
        scheduler.update(plan, [1, 2])


@pytest.mark.parametrize(
    "name",
    ["max_num_seqs", "max_num_batched_tokens", "prefill_row_len", "prefill_chunk_len",
     "max_model_len"],
)  # fmt: skip
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be >= 1"):
        make_scheduler(**{name: 0})


def test_token_slice_spans_prompt_and_output():
    sequence = make_scheduler().add(make_request("x", [10, 11, 12])).leader
    sequence.output_token_ids += [20, 21]
    everything = [10, 11, 12, 20, 21]
    for start in range(6):
        for stop in range(start, 6):
            assert sequence.token_slice(start, stop) == everything[start:stop]
    assert "request_id='x'" in repr(sequence)
    assert repr(NEEDS_VALUES) == "NEEDS_VALUES"
