"""Contiguous reservations: regions, copies instead of sharing, and where memory goes."""

from __future__ import annotations

import random

import pytest

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.block_moves import BlockCopy
from paged_jax.blocks.contiguous import ContiguousManager
from paged_jax.blocks.events import BlockEvent
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.blocks.replay import BlockReplay
from paged_jax.blocks.reservation import RESERVATION_POLICIES, Demand, make_manager, num_reserved

SIZE = 4
CONTIGUOUS = RESERVATION_POLICIES[1:]


def make(policy="orca_oracle", *, num_blocks=65, max_model_len=64, **options):
    return make_manager(
        policy, max_model_len=max_model_len, num_blocks=num_blocks, block_size=SIZE, **options
    )


def start(manager, *seq_ids, num_prompt=6, num_output=5) -> bool:
    demand = Demand(seq_ids, num_prompt, num_output)
    return manager.allocate(seq_ids[0], num_tokens=num_prompt, demand=demand)


@pytest.mark.parametrize("policy", RESERVATION_POLICIES)
def test_each_policy_makes_its_manager(policy):
    manager = make(policy)
    assert isinstance(manager, ContiguousManager) is (policy != "paged")
    assert manager.shares is (policy == "paged")
    assert start(manager, 0)
    assert manager.table_array(0).tolist() == [1, 2]
    # 6 tokens of 2 blocks; reserved are 16 blocks, 6 + 8 tokens, 6 + 5 tokens.
    used = {"paged": 2, "orca_max": 16, "orca_pow2": 4, "orca_oracle": 4}[policy]
    assert manager.num_usable - manager.num_free == manager.stats().used == used
    assert manager.stats().filled == 6
    manager.check_integrity()


@pytest.mark.parametrize(
    ("num_output", "reserved"), [(0, 101), (1, 101), (2, 102), (25, 132), (32, 132), (33, 164)]
)
def test_pow2_reserves_outputs_rounded_up(num_output, reserved):
    demand = Demand((0,), 100, num_output)
    assert num_reserved("orca_pow2", demand, max_model_len=2048) == reserved
    assert num_reserved("orca_pow2", demand, max_model_len=110) == min(reserved, 110)
    assert num_reserved("orca_oracle", demand, max_model_len=2048) == 100 + num_output


def test_memory_use_is_the_papers_figure_2():
    """Of 64 positions: a max policy's region is 64 long, 11 of it needed, 7 filled so far."""
    manager = make("orca_max", num_blocks=33)
    start(manager, 0)
    manager.begin_step()
    manager.append(0)
    assert manager.memory_use()._asdict() == {
        "total": 128, "filled": 7, "reserved": 4, "internal": 53, "external": 0, "free": 64,
        "saved": 0,
    }  # fmt: skip
    pow2 = make("orca_pow2", num_blocks=33, max_model_len=128)
    start(pow2, 0, num_prompt=9, num_output=5)  # 17 reserved: 5 blocks, in a region of 8
    assert pow2.memory_use()._asdict() == {
        "total": 128, "filled": 9, "reserved": 5, "internal": 3, "external": 15, "free": 96,
        "saved": 0,
    }  # fmt: skip
    paged = make("paged", num_blocks=33)
    start(paged, 0, num_prompt=9)
    paged.fork(0, 1)
    assert paged.memory_use()._asdict() == {
        "total": 128, "filled": 9, "reserved": 0, "internal": 3, "external": 0, "free": 116,
        "saved": 12,
    }  # fmt: skip


def test_admission_is_for_a_whole_group_and_needs_consecutive_blocks():
    manager = make(num_blocks=17)
    assert start(manager, 0)
    assert start(manager, 1)
    assert start(manager, 2)
    assert start(manager, 3)  # 16 blocks in regions of 4
    manager.free(0)
    manager.free(2)
    wide = Demand((4, 5, 6), 6, 5)
    long = Demand((4,), 20, 5)  # 7 blocks: 8 are free, and no two regions are neighbours
    assert manager.num_free == 8
    for demand in (wide, long):
        assert not manager.can_admit(demand, num_blocks=0)
        assert not manager.allocate(4, num_tokens=6, demand=demand)
        manager.check_integrity()
    manager.free(1)
    assert manager.can_admit(wide, num_blocks=0)
    assert manager.can_admit(long, num_blocks=0)
    assert manager.num_free == 12
    assert manager.allocate(4, num_tokens=6, demand=long)
    assert manager.table_array(4).tolist() == [1, 2]


def test_a_fork_is_a_copy_made_at_its_first_append():
    manager = make()
    start(manager, 0, 1, 2)
    manager.fork(0, 1)
    manager.fork(1, 2)  # 1 has nothing of its own yet: copied from 0
    assert manager.step_copies == ()
    with pytest.raises(ValueError, match="must wait for the next step"):
        manager.append(1)
    manager.begin_step()
    parent, child, third = (manager.table_array(i).tolist() for i in range(3))
    assert not set(parent) & set(child) | set(child) & set(third)
    assert manager.append(0) == ()
    assert manager.append(1) == tuple(map(BlockCopy, parent, child))
    assert manager.append(2) == tuple(map(BlockCopy, parent, third))
    assert len(manager.step_copies) == 4
    manager.check_integrity()
    manager.begin_step()
    assert manager.step_copies == ()
    assert manager.append(1) == ()


def test_a_region_that_is_still_read_outlives_its_sequence():
    manager = make(tracks_freed=True)
    start(manager, 0, 1)
    source = manager.table_array(0).tolist()
    manager.fork(0, 1)
    manager.free(0, reason="stop")
    assert manager.take_freed().device == []
    assert manager.num_free == 64 - 8
    manager.begin_step()
    assert [copy.src for copy in manager.append(1)] == source
    manager.check_integrity()
    assert manager.take_freed().device == []  # not before the copy is done
    manager.begin_step()
    assert manager.take_freed().device[:2] == source
    assert manager.num_free == 64 - 4
    manager.free(1)
    assert manager.num_free == 64
    manager.check_integrity()


def test_a_beams_place_keeps_its_region_until_the_search_ends():
    manager = make(num_blocks=17)
    start(manager, 0, 1, 2)
    manager.fork(0, 1)
    manager.begin_step()
    manager.append(0)
    manager.append(1)
    manager.free(1, reason="beam")
    assert manager.num_free == 4
    manager.fork(0, 2)
    manager.fork(0, 1)
    manager.check_integrity()
    for seq_id in (0, 2, 1):
        manager.free(seq_id, reason="length")
    assert manager.num_free == 16
    start(manager, 7, 8)
    manager.fork(7, 8)
    manager.free(7, reason="stop")  # of parallel samples each gives its own back
    assert manager.num_free == 16 - 8  # still read
    manager.free(8, reason="stop")
    assert manager.num_free == 16
    manager.check_integrity()


def test_what_cannot_be():
    with pytest.raises(ValueError, match="max_model_len=64 must be at most 32, the longest region"):
        make("orca_max", num_blocks=13)
    with pytest.raises(ValueError, match="num_host_blocks=4 must be 0 with policy='orca_pow2'"):
        make("orca_pow2", num_host_blocks=4)
    with pytest.raises(ValueError, match="policy='orca' must be one of 'paged', 'orca_max', "):
        make("orca")
    with pytest.raises(ValueError, match="2 regions of 60 tokens must fit the pool"):
        make(num_blocks=17).require_fits(Demand((0, 1), 50, 10))
    make("paged", num_blocks=17).require_fits(Demand((0, 1), 50, 10))
    manager = make()
    with pytest.raises(ValueError, match="demand=None must name seq_id=0"):
        manager.allocate(0, num_tokens=3)
    with pytest.raises(ValueError, match=r"demand=Demand\(.*\) must name seq_id=0"):
        manager.allocate(0, num_tokens=3, demand=Demand((1,), 3, 3))
    with pytest.raises(ValueError, match="num_tokens=7 must be at most the 6 to be reserved"):
        manager.allocate(0, num_tokens=7, demand=Demand((0,), 3, 3))
    with pytest.raises(ValueError, match="num_tokens=0 must be >= 1"):
        manager.allocate(0, num_tokens=0, demand=Demand((0,), 3, 3))
    match = BlockManager(num_blocks=5, block_size=SIZE).lookup(None, [1, 2])  # type: ignore[arg-type]
    assert isinstance(match, PrefixMatch)
    with pytest.raises(ValueError, match="contiguous regions share nothing"):
        manager.allocate(0, num_tokens=3, prefix=match, demand=Demand((0,), 3, 3))
    manager.check_integrity()
    assert start(manager, 0)
    with pytest.raises(ValueError, match="seq_id=0 must be new"):
        start(manager, 0)
    with pytest.raises(ValueError, match=r"child_id=5 must be one of \[0\]"):
        manager.fork(0, 5)
    with pytest.raises(ValueError, match=r"num_tokens=7 must lie in 1\.\.6"):
        manager.trim(0, num_tokens=7)
    with pytest.raises(RuntimeError, match="needs 12 positions, 11 are reserved"):
        manager.append(0, num_tokens=6)
    with pytest.raises(NotImplementedError, match="no prefix cache"):
        manager.publish(0, None, [1])
    with pytest.raises(NotImplementedError, match="no registered prefixes"):
        manager.pin(0, None, [1])
    with pytest.raises(ValueError, match="tracks_freed=False must be True"):
        manager.take_freed()
    assert manager.swap_out([0]) is None
    assert manager.room(0) == 5


@pytest.mark.parametrize("policy", CONTIGUOUS)
def test_random_operations(policy):
    """Copies are followed on a model of every slot; events give the tables and regions."""
    rng = random.Random(policy)
    replay = BlockReplay()
    events: list[BlockEvent] = []

    def observe(event: BlockEvent) -> None:
        events.append(event)
        replay.take(event)

    manager = make(policy, num_blocks=80, observer=observe)
    slots: dict[int, list[int]] = {}  # of each block
    tokens: dict[int, list[int]] = {}  # of each sequence, written or about to be
    groups: dict[int, list[int]] = {}
    fresh: set[int] = set()  # written or forked in this step
    num_refused = next_id = 0

    def blocks_of(seq_id: int) -> list[int]:
        return manager.table_array(seq_id).tolist()

    def write(seq_id: int, begin: int) -> None:
        for position in range(begin, len(tokens[seq_id])):
            block = blocks_of(seq_id)[position // SIZE]
            slots.setdefault(block, [-1] * SIZE)[position % SIZE] = tokens[seq_id][position]

    for _ in range(400):
        manager.begin_step()
        fresh.clear()
        written: list[tuple[int, int]] = []
        for seq_id in list(tokens):
            if manager.room(seq_id) and rng.random() < 0.8:
                begin = len(tokens[seq_id])
                count = rng.randint(1, min(3, manager.room(seq_id)))
                manager.append(seq_id, num_tokens=count)
                tokens[seq_id] += [rng.randrange(1000) for _ in range(count)]
                written.append((seq_id, begin))
                fresh.add(seq_id)
        if rng.random() < 0.5:
            seq_ids = tuple(range(next_id, next_id + rng.randint(1, 3)))
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            demand = Demand(seq_ids, len(prompt), rng.randint(1, 20))
            can = manager.can_admit(demand, num_blocks=0)
            assert manager.allocate(next_id, num_tokens=len(prompt), demand=demand) is can
            num_refused += not can
            if can:
                tokens[next_id] = prompt
                groups |= {seq_id: list(seq_ids) for seq_id in seq_ids}
                written.append((next_id, 0))
                fresh.add(next_id)
                next_id += len(seq_ids)
        # The device: copies, then writes.
        sources = {copy.src: list(slots.get(copy.src, [-1] * SIZE)) for copy in manager.step_copies}
        for copy in manager.step_copies:
            assert copy.dst not in sources
            slots[copy.dst] = list(sources[copy.src])
        for seq_id, begin in written:
            write(seq_id, begin)
        for seq_id in list(tokens):
            others = [one for one in groups[seq_id] if one not in tokens and one in groups]
            action = rng.random()
            if action < 0.15 and others:
                child = rng.choice(others)
                manager.fork(seq_id, child)
                tokens[child] = list(tokens[seq_id])
            elif action < 0.3:
                reason = rng.choice(["stop", "beam"])
                if reason == "beam" and manager._regions.of[seq_id].num_readers:
                    with pytest.raises(ValueError, match="must keep its place until its"):
                        manager.free(seq_id, reason=reason)
                    continue
                manager.free(seq_id, reason=reason)
                fresh.discard(seq_id)
                del tokens[seq_id]
                if reason == "stop" or not any(one in tokens for one in groups[seq_id]):
                    ended = [seq_id]
                    if not any(one in tokens for one in groups[seq_id]):
                        ended = list(groups[seq_id])
                    for one in ended:
                        groups.pop(one, None)
        manager.check_integrity()
        for seq_id in fresh & tokens.keys():
            blocks = blocks_of(seq_id)
            held = [slots[blocks[i // SIZE]][i % SIZE] for i in range(len(tokens[seq_id]))]
            assert held == tokens[seq_id]
        assert replay.tables == {seq_id: blocks_of(seq_id) for seq_id in tokens}
        assert replay.num_tokens == {seq_id: len(some) for seq_id, some in tokens.items()}
        use = manager.memory_use()
        assert min(use) >= 0
        assert sum(use[1:6]) == use.total
        assert use.filled == sum(map(len, tokens.values()))
    assert num_refused > 5
    assert sum(event.kind == "copy" for event in events) > 10
    assert len(replay.reserved) == len(groups)
