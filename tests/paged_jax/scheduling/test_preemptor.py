"""Swapping, priorities and the order of preemption, over the slot-checking executor."""

from __future__ import annotations

import random

import pytest
from suites.host_simulation import SimulatedServer, make_request

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.plan import NEEDS_VALUES, Plan
from paged_jax.scheduling.preemptor import Preemptor, num_to_recompute
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


def swap_server(num_blocks: int = 9, block_size: int = 2, **settings) -> SimulatedServer:
    arguments = {"mode": "swap", "num_host_blocks": num_blocks, **settings}
    return SimulatedServer(num_blocks=num_blocks, block_size=block_size, **arguments)


def step_until_preempted(server: SimulatedServer, sequence: Sequence) -> Plan:
    """The plan in which it lost its blocks."""
    while True:
        plan = server.step()
        assert plan is not None
        if sequence.status is SequenceStatus.PREEMPTED:
            return plan


def decoding(plan: Plan | None) -> list[Sequence]:
    assert plan is not None
    return [row.sequence for row in plan.decode_rows]


def test_a_swapped_request_goes_on_where_it_was():
    server = swap_server()
    first, second = (server.add(make_request(i, 4, 12, ignore_eos=True)) for i in range(2))
    plan = step_until_preempted(server, second)
    num_computed, num_output = second.num_computed, second.num_output
    # Both held half of the pool and wanted more: 4 blocks go, and come with the next step.
    assert (len(plan.swap_outs), plan.swap_ins, plan.prefill_rows) == (4, [], [])
    assert [preemption[:] for preemption in plan.preemptions] == [((second,), True, False)]
    assert decoding(plan) == []
    assert not plan.is_empty
    assert num_computed == second.num_tokens - 1 == 8
    assert (second.num_pending, second.state_slot) == (0, -1)
    assert server.manager.num_swapped == 1
    assert decoding(server.step()) == [first]
    while second.status is SequenceStatus.PREEMPTED:
        assert (second.num_computed, second.num_output) == (num_computed, num_output)
        plan = server.step()
    assert plan is not None
    assert len(plan.swap_ins) == 4
    (row,) = plan.decode_rows
    assert (row.sequence, row.start, row.from_host) == (second, num_computed, True)
    assert plan.admitted == [second]
    server.drain()
    preemptor = server.scheduler.preemptor
    assert (preemptor.num_preemptions, preemptor.num_recomputed_tokens) == (1, 0)


def test_values_in_flight_come_first_they_may_end_someone():
    server = swap_server()
    server.add(make_request(0, 4, 6, ignore_eos=True))
    server.add(make_request(1, 4, 5, ignore_eos=True))
    plans = [server.scheduler.schedule() for _ in range(5)]
    assert server.manager.num_free == 0
    assert server.scheduler.schedule() is NEEDS_VALUES
    for plan in plans:
        assert isinstance(plan, Plan)
        server.scheduler.update(plan, [1] * len(plan.sampling_rows))
    plan = server.scheduler.schedule()
    assert isinstance(plan, Plan)
    assert (plan.swap_outs, plan.preemptions) == ([], [])
    assert len(plan.decode_rows) == 1


def test_in_the_step_that_swaps_all_others_decode_or_nobody():
    """Two running requests stay; the blocks that the third leaves come with the next step."""
    for num_blocks, num_decoding in ((9, 0), (10, 2)):
        server = swap_server(num_blocks=num_blocks, block_size=4)
        sizes = (8, 8, 12)
        first, second, third = (
            server.add(make_request(i, size, 9, ignore_eos=True)) for i, size in enumerate(sizes)
        )
        server.step()
        plan = step_until_preempted(server, third)
        assert plan.swap_outs
        assert len(decoding(plan)) == num_decoding
        assert decoding(server.step()) == [first, second]
        server.drain()


def test_half_a_prompt_is_kept():
    server = swap_server(num_blocks=13, block_size=2, prefill_chunk_len=1)
    first = server.add(make_request(0, 1, 20, ignore_eos=True))
    second = server.add(make_request(1, 14, 3, ignore_eos=True, num_samples=2))
    step_until_preempted(server, second)
    computed = second.num_computed
    assert 0 < computed < second.num_prompt
    assert server.manager.is_swapped(second.seq_id)
    rows = []
    while second.num_computed < second.num_prompt:
        plan = server.step()
        assert plan is not None
        rows += [row for row in plan.prefill_rows if row.sequence is second]
    assert rows[0].start == computed
    assert rows[-1].samples
    server.drain()
    assert first.num_output == 20
    assert server.scheduler.preemptor.num_recomputed_tokens == 0


def test_a_group_goes_and_comes_whole_without_those_that_ended():
    server = swap_server(num_blocks=13, block_size=2)
    server.add(make_request(0, 6, 12, ignore_eos=True))
    second = server.add(make_request(1, 5, 12, ignore_eos=True, num_samples=3))
    server.step()
    group = server.scheduler._lineup.group_of(second)
    server.scheduler.finish(group.sequences[1], "stop", "END")
    plan = step_until_preempted(server, second)
    live = [group.sequences[0], group.sequences[2]]
    assert [list(preemption.sequences) for preemption in plan.preemptions] == [live]
    assert [sequence.num_preemptions for sequence in group.sequences] == [1, 0, 1]
    # The full prompt blocks are shared: they travel once.
    own = [-(-s.num_computed // 2) - 2 for s in live]
    assert len(plan.swap_outs) == 2 + sum(own)
    while second.status is SequenceStatus.PREEMPTED:
        plan = server.step()
        assert plan is not None
    assert plan.admitted == live
    assert [row.sequence for row in plan.decode_rows if row.from_host] == live
    while server.scheduler.has_unfinished:
        server.step()
    server.collect()
    for sequence in (*live, *(s for s in server.emitted if s.request.request_id == 0)):
        server.check_output(sequence)


@pytest.mark.parametrize("num_host_blocks", [0, 2, 4])
def test_without_room_on_the_host_a_request_is_recomputed(num_host_blocks):
    server = swap_server(num_host_blocks=num_host_blocks)
    second = [server.add(make_request(i, 4, 12, ignore_eos=True)) for i in range(2)][1]
    plan = step_until_preempted(server, second)
    assert [preemption[1:] for preemption in plan.preemptions] == [(False, True)]
    assert (second.num_computed, plan.swap_outs) == (0, [])
    server.drain()
    assert server.scheduler.preemptor.num_recomputed_tokens == 8


@pytest.mark.parametrize(("block_size", "is_swap"), [(1, False), (2, True), (4, True)])
def test_auto_takes_the_faster_way(block_size, is_swap):
    """By the simulation's ``COSTS``, which make blocks of one token dear to swap."""
    num_blocks = 16 // block_size + 1
    server = swap_server(num_blocks, block_size, mode="auto")
    second = [server.add(make_request(i, 4, 12, ignore_eos=True)) for i in range(2)][1]
    plan = step_until_preempted(server, second)
    assert [preemption[1:] for preemption in plan.preemptions] == [(is_swap, False)]
    server.drain()


def test_auto_needs_costs():
    with pytest.raises(ValueError, match="mode='auto' must come with costs and block_nbytes"):
        Preemptor(BlockManager(num_blocks=3, block_size=4), mode="auto")


def test_a_shared_prompt_is_recomputed_once():
    server = swap_server(num_blocks=30, block_size=4)
    leader = server.add(make_request(0, 9, 9, ignore_eos=True, num_samples=3))
    group = server.scheduler._lineup.group_of(leader)
    assert num_to_recompute(group) == 0
    for _ in range(3):
        server.step()
    assert num_to_recompute(group) == 9 + 3 * 2


STATES = ["waiting", "first chunk", "middle chunk", "last chunk", "running", "swapped", "back",
          "finished"]  # fmt: skip


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_b40_cancel_in_every_state_with_swapping(state, num_samples):
    server = swap_server(num_blocks=13, block_size=4, prefill_chunk_len=4)
    other = server.add(make_request("other", 5, 30, ignore_eos=True))
    server.step()
    victim = server.add(make_request("victim", 12, 16, ignore_eos=True, num_samples=num_samples))
    num_steps = {"waiting": 0, "first chunk": 1, "middle chunk": 2, "last chunk": 3, "running": 5}
    for _ in range(num_steps.get(state, 0)):
        server.step()
    if state in ("swapped", "back"):
        step_until_preempted(server, victim)
        assert server.manager.num_swapped == num_samples
    if state == "back":
        while victim.status is SequenceStatus.PREEMPTED:
            server.step()
    if state == "finished":
        server.drain()
    assert server.scheduler.cancel("victim") is (state != "finished")
    assert not server.scheduler.cancel("victim")
    assert server.manager.num_swapped == 0
    server.scheduler.check_integrity()
    server.drain()
    assert other.num_output == 30


@pytest.mark.parametrize("priority", [0, 7])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b39_newcomers_do_not_overtake_who_was_preempted(mode, priority):
    """First come, first served, and with equal priorities: A, B, C run, C is preempted, D and E."""
    server = SimulatedServer(num_blocks=13, block_size=2, mode=mode, num_host_blocks=20)
    a, b, c = (
        server.add(make_request(name, 4, 8, priority=priority, ignore_eos=True)) for name in "ABC"
    )
    step_until_preempted(server, c)
    assert {a.status, b.status} == {SequenceStatus.RUNNING}
    d, e = (
        server.add(make_request(name, 1, 2, priority=priority, ignore_eos=True)) for name in "DE"
    )
    order: list[Sequence] = []
    while server.scheduler.has_unfinished:
        plan = server.step()
        order += [s for s in plan.admitted if s not in order] if plan else []
    server.drain()
    assert order == [c, d, e]
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 0, 1)


def test_the_least_urgent_is_preempted_and_the_most_urgent_passes():
    server = swap_server(num_blocks=14, block_size=2)
    low, high, middle = (
        server.add(make_request(name, 4, 12, priority=priority, ignore_eos=True))
        for name, priority in (("low", 2), ("high", -1), ("middle", 0))
    )
    server.step()
    assert server.scheduler.running == (high, middle, low)
    step_until_preempted(server, low)  # it came first
    like = server.add(make_request("like", 1, 1, priority=2))
    urgent = server.add(make_request("urgent", 1, 1, priority=1))
    order: list[Sequence] = []
    while server.scheduler.has_unfinished:
        plan = server.step()
        order += [s for s in plan.admitted if s not in order] if plan else []
    server.drain()
    assert [s for s in order if s is not middle] == [urgent, low, like]
    assert high.num_preemptions == 0


def test_more_urgent_requests_wait_for_room_like_others():
    """Nobody is preempted so that another can start."""
    server = swap_server(num_blocks=6, block_size=2)
    low = server.add(make_request("low", 4, 5, priority=1, ignore_eos=True))
    server.step()
    high = server.add(make_request("high", 6, 2, priority=0, ignore_eos=True))
    server.step()
    assert (low.status, high.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    server.drain()
    assert low.num_preemptions == 0


def test_b35_random_traffic_never_stalls_while_swapping():
    num_preemptions = 0
    for seed in range(4):
        rng = random.Random(seed)
        server = swap_server(
            num_blocks=rng.randint(12, 30),
            block_size=rng.choice([1, 2, 4]),
            num_host_blocks=rng.choice([2, 9, 40]),
            mode=rng.choice(["swap", "auto"]),
            max_num_seqs=rng.randint(3, 8),
            prefill_chunk_len=rng.choice([None, 5]),
        )
        longest = server.manager.num_usable * server.manager.block_size // 3
        for request_id in range(100):
            sizes = rng.randint(1, longest // 2), rng.randint(1, min(longest, 40))
            num_samples = rng.choice([1, 1, 2])
            server.add(make_request(request_id, *sizes, num_samples=num_samples, ignore_eos=True))
            while rng.random() < 0.6:
                server.step()
            if rng.random() < 0.1:
                server.scheduler.cancel(rng.randint(0, request_id))
        server.drain()
        assert max(sequence.num_preemptions for sequence in server.emitted) <= 2
        num_preemptions += server.scheduler.preemptor.num_preemptions
    assert num_preemptions > 20
