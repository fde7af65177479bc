"""Verification rows: their slots, what is kept of them, and who has none."""

from __future__ import annotations

import pytest
from suites.host_simulation import Oracle, SimulatedServer, make_request, tokens_alone

from paged_jax.scheduling.plan import NEEDS_VALUES, Plan
from paged_jax.scheduling.sequence import Sequence


class Fixed:
    """The same guess whenever there is room, cut to it."""

    def __init__(self, drafts: list[int]) -> None:
        self.drafts = drafts
        self.limits: list[int] = []
        self.forgotten: list[Sequence] = []

    def propose(self, sequence: Sequence, *, limit: int) -> list[int]:
        self.limits.append(limit)
        return self.drafts[:limit]

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


def make_server(drafter, *, num_blocks=40, block_size=4, **limits) -> SimulatedServer:
    return SimulatedServer(num_blocks=num_blocks, block_size=block_size, drafter=drafter, **limits)


def decode_plan(server: SimulatedServer) -> Plan:
    """The plan after the prompts, with the values that it needs."""
    server.step()
    assert server.scheduler.schedule() is NEEDS_VALUES
    server.collect()
    plan = server.scheduler.schedule()
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("prompt_len", range(2, 7))
def test_the_leading_right_drafts_and_one_more_are_kept(num_right, prompt_len):
    """Wherever in a block the row begins; the blocks of rejected drafts are free again."""
    drafter = Fixed([])
    server = make_server(drafter)
    sequence = server.add(make_request("x", prompt_len, 9))
    right, _ = tokens_alone(sequence.request, max_tokens=9)
    drafter.drafts = [*right[1 : 1 + num_right], 99, 99, 99][:3]
    (row,) = decode_plan(server).verify_rows
    assert row == (sequence, prompt_len, 4, True, True, tuple(drafter.drafts))
    assert (row.num_sampled, row.token_ids) == (4, [right[0], *drafter.drafts])
    assert (sequence.num_computed, sequence.num_pending) == (prompt_len + 4, 4)
    manager, scheduler = server.manager, server.scheduler
    assert manager.num_tokens(sequence.seq_id) == prompt_len + 4
    scheduler.check_integrity()
    plan = Plan(2, verify_rows=[row])
    sampled = [*right[1 : 2 + num_right], 7, 7, 7][:4]
    kept = sampled[: num_right + 1]
    assert scheduler.update(plan, sampled) == [(sequence, token) for token in kept]
    assert sequence.output_token_ids == right[: num_right + 2]
    assert (sequence.num_computed, sequence.num_pending) == (prompt_len + num_right + 1, 0)
    assert manager.num_tokens(sequence.seq_id) == prompt_len + num_right + 1
    scheduler.check_integrity()
    counts = scheduler.speculation.num_drafted_tokens, scheduler.speculation.num_accepted_tokens
    assert counts == (3, num_right)


def test_a_stop_token_among_the_accepted_ends_the_output_there():
    server = make_server(Fixed([5, 6, 7]))
    sequence = server.add(make_request("x", 3, 9, stop_token_ids=[6]))
    plan = decode_plan(server)
    assert server.scheduler.update(plan, [5, 6, 7, 8]) == [(sequence, 5), (sequence, 6)]
    assert sequence.output_token_ids[1:] == [5, 6]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 6)
    assert server.manager.num_free == server.manager.num_usable
    assert server.scheduler.speculation._drafter.forgotten == [sequence]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_stop_string_among_the_accepted_ends_the_output_there(place):
    server = make_server(Fixed([5, 6, 7]))
    sequence = server.add(make_request("x", 3, 5, stop_token_ids=[7]))
    plan, asked = decode_plan(server), []

    def take_token(one: Sequence, token: int) -> str | None:
        assert one is sequence
        asked.append(token)
        return "END" if len(asked) == place + 1 else None

    emitted = server.scheduler.update(plan, [5, 6, 8, 9], take_token=take_token)
    assert [token for _, token in emitted] == asked == [5, 6, 8][: place + 1]
    assert sequence.output_token_ids[1:] == asked
    if place < 3:
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")
    else:
        assert sequence.finish_reason is None


def test_max_tokens_cuts_drafts_and_the_last_token_has_none():
    drafter = Fixed([1] * 9)
    server = make_server(drafter)
    server.add(make_request("x", 3, 5))
    server.drain()
    # One token comes with the prompt: the draft may hold all but the last of the other four.
    assert drafter.limits[0] == 3
    assert all(limit >= 1 for limit in drafter.limits)
    server = make_server(drafter := Fixed([1] * 9))
    server.add(make_request("x", 3, 2))
    server.drain()
    assert drafter.limits == []


def test_drafts_take_only_blocks_that_nobody_else_takes():
    """Never a preemption, and a waiting prompt starts as early as without."""
    for num_drafts in (0, 8):
        drafter = Fixed([1] * num_drafts)
        server = make_server(drafter, num_blocks=6, max_num_batched_tokens=8)
        first = server.add(make_request("first", 4, 9))
        server.step()
        server.collect()
        server.add(make_request("second", 8, 2))
        plan = server.step()
        # 5 blocks: the first holds 2 now, the prompt 2 and one for its next token.
        assert {row.sequence.request.request_id for row in plan.prefill_rows} == {"second"}
        assert [row.num_new for row in plan.verify_rows] == ([1 + 7] if num_drafts else [])
        assert server.manager.num_blocks(first.seq_id) == (3 if num_drafts else 2)
        server.drain()
        assert server.scheduler.preemptor.num_preemptions == 0


def test_who_waits_for_values_and_who_has_no_drafts():
    drafter = Fixed([3])
    server = make_server(drafter)
    server.add(make_request("penalties", 3, 6, needs_penalties=True))
    server.step()
    for _ in range(2):  # one step in flight as ever
        plan = server.scheduler.schedule()
        assert [row.from_host for row in plan.decode_rows] == [False]
        assert not plan.verify_rows
        server.executor.execute(plan)
    assert drafter.limits == []


def test_bans_before_min_tokens_and_drafts_after():
    drafter = Fixed([3])
    server = make_server(drafter)
    sequence = server.add(make_request("x", 3, 9, min_tokens=4, ignore_eos=True))
    lens = []
    while server.scheduler.has_unfinished:
        plan = server.step()
        if plan is not None and plan.verify_rows:
            lens.append(sequence.num_output)
    assert min(lens) == 4


def test_a_cancel_while_drafts_are_verified():
    server = make_server(Fixed([5, 6]))
    sequence = server.add(make_request("x", 3, 9))
    plan = decode_plan(server)
    assert server.scheduler.cancel("x")
    assert server.manager.num_free == server.manager.num_usable
    assert server.scheduler.update(plan, [5, 6, 7]) == []
    assert sequence.num_output == 1
    assert server.scheduler.speculation.num_drafted_tokens == 0


def test_update_wants_a_token_for_each_sampled_position():
    server = make_server(Fixed([5, 6]))
    server.add(make_request("x", 3, 9))
    plan = decode_plan(server)
    with pytest.raises(ValueError, match=r"has 1 tokens, it must have 3 for the 1 sampling rows"):
        server.scheduler.update(plan, [5])


def test_right_drafts_save_steps():
    """Everything that the oracle drafts is checked by the executor, wrong drafts too."""
    num_steps = {}
    for num_drafts in (0, 6):
        server = make_server(Oracle(num_drafts) if num_drafts else None, num_blocks=200)
        for index in range(6):
            server.add(make_request(index, 5 + index, 40, num_samples=1 + index % 3))
        server.drain()
        num_steps[num_drafts] = server.num_steps
    assert num_steps[6] < 0.7 * num_steps[0]
    speculation = server.scheduler.speculation
    assert 0.3 < speculation.num_accepted_tokens / speculation.num_drafted_tokens < 0.9
