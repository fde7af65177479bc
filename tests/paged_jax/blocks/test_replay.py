"""Events of the block manager: every change is told, and the events alone give its state."""

from __future__ import annotations

import pytest
from suites.block_model import check_replay

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.events import BlockEvent
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.replay import BlockReplay

ALL = Namespace()


def record_of_everything() -> tuple[BlockManager, list[BlockEvent]]:
    """A manager after a run with every kind of event, and the events."""
    events: list[BlockEvent] = []
    manager = BlockManager(num_blocks=13, block_size=4, num_host_blocks=9, observer=events.append)
    first, other = list(range(10)), [0, 1, 2, 3, 9, 9]
    manager.allocate(0, num_tokens=10)
    manager.allocate(1, num_tokens=6)
    manager.begin_step()
    manager.publish(0, ALL, first)
    manager.fork(0, 2)
    manager.append(2)  # its own copy of the last block
    manager.append(0)
    manager.begin_step()
    manager.swap_out([0, 2])
    pin = manager.pin(1, ALL, other)  # its first block is cached already
    manager.begin_step()
    manager.swap_in([0])
    manager.free(2)
    manager.begin_step()
    manager.allocate(3, num_tokens=7, prefix=manager.lookup(ALL, [*other, 5]))
    manager.begin_step()
    manager.publish(3, ALL, [*other, 5])
    manager.append(3, num_tokens=2)
    manager.drop_before(3, 4)
    manager.begin_step()
    manager.publish(3, ALL, [*other, 5, 5])
    manager.trim(3, num_tokens=6)
    manager.append(3)  # leaves the cache to be written
    manager.unpin(pin)
    manager.free(3, reason="finish")
    manager.begin_step()
    manager.free(0)
    match = manager.lookup(ALL, [0, 1, 2, 3, 9, 9, 7])
    manager.allocate(4, num_tokens=12 * 4, prefix=match)  # takes the pinned partial block itself
    manager.free(4)
    manager.begin_step()
    manager.allocate(5, num_tokens=12 * 4)
    return manager, events


def replayed(events: list[BlockEvent]) -> BlockReplay:
    replay = BlockReplay()
    for event in events:
        replay.take(event)
    return replay


def test_every_kind_and_reason_is_told():
    manager, events = record_of_everything()
    check_replay(replayed(events), manager)
    assert {(event.kind, event.reason) for event in events} == {
        ("allocate", "new"),
        ("allocate", "append"),
        ("fill", "append"),
        ("share", "prefix"),
        ("share", "fork"),
        ("share", "pin"),
        ("copy", "write"),
        ("copy", "prefix"),
        ("release", "trim"),
        ("release", "window"),
        ("release", "pin"),
        ("release", "unpin"),
        ("free", "free"),
        ("free", "finish"),
        ("cache", "publish"),
        ("cache", "pin"),
        ("evict", "room"),
        ("evict", "write"),
        ("evict", "take"),
        ("swap_out", "preempt"),
        ("swap_in", "resume"),
        ("free_host", "free"),
    }


def test_a_record_that_lacks_any_one_event_does_not_add_up():
    """So the record is complete: none of it says what another part says already."""
    events: list[BlockEvent] = []
    states: list[tuple[object, ...]] = []
    replay = BlockReplay()
    _, events = record_of_everything()
    for event in events:
        replay.take(event)
        states.append(state_of(replay))
    for index, event in enumerate(events):
        partial = replayed(events[:index])
        # Without the event the state right after it is another one.
        assert state_of(partial) != states[index], event


def state_of(replay: BlockReplay) -> tuple[object, ...]:
    return (
        {key: list(table) for key, table in replay.tables.items()},
        {key: list(table) for key, table in replay.swapped.items()},
        {key: list(table) for key, table in replay.pinned.items()},
        dict(replay.num_tokens),
        dict(replay.ref_counts),
        dict(replay.host_ref_counts),
        set(replay.cached),
    )


def test_the_events_of_one_sequence():
    """Fig. 8 of the paper: two samples of one prompt of 7 tokens, blocks of 4."""
    events: list[BlockEvent] = []
    manager = BlockManager(num_blocks=8, block_size=4, observer=events.append)
    manager.allocate(0, num_tokens=7)
    manager.fork(0, 1)
    manager.begin_step()
    manager.append(0)
    manager.append(1)
    manager.begin_step()
    manager.append(1)
    manager.free(0, reason="stop")
    assert events == [
        BlockEvent("allocate", "new", 0, [1, 2], (), 7),
        BlockEvent("share", "fork", 1, [1, 2], (), 7, parent_id=0),
        BlockEvent("copy", "write", 0, (2,), (3,)),
        BlockEvent("fill", "append", 0, [], (), 8),
        BlockEvent("fill", "append", 1, [], (), 8),
        BlockEvent("allocate", "append", 1, [4], (), 9),
        BlockEvent("free", "stop", 0, [1, 3]),
    ]


def test_what_changes_nothing_tells_nothing():
    events: list[BlockEvent] = []
    manager = BlockManager(num_blocks=3, block_size=4, num_host_blocks=2, observer=events.append)
    manager.allocate(0, num_tokens=8)
    manager.begin_step()
    del events[:]
    assert not manager.allocate(1, num_tokens=1)
    assert manager.append(0) is None
    assert manager.swap_out([0]) is None
    manager.drop_before(0, 3)
    manager.lookup(ALL, [1, 2, 3])
    manager.publish(0, ALL, [1, 2, 3])
    with pytest.raises(ValueError, match="seq_id=7"):
        manager.free(7)
    assert events == []


@pytest.mark.parametrize(
    "event",
    [
        BlockEvent("fill", "append", 7, num_tokens=3),
        BlockEvent("free", "free", 7),
        BlockEvent("free", "free", 0, [3]),
        BlockEvent("copy", "write", 0, (5,), (6,)),
        BlockEvent("copy", "write", 0, (1,), ()),
        BlockEvent("release", "unpin", blocks=[1], pin_id=3),
        BlockEvent("swap_in", "resume", 0, [1], [2]),
        BlockEvent("swap_out", "preempt", 0, [1, 2], [2]),
        BlockEvent("allocate", "new", None, [4]),
        BlockEvent("extend", "new", 0, [4]),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_event_that_does_not_fit_is_refused(event: BlockEvent):
    replay = replayed([BlockEvent("allocate", "new", 0, [1, 2], (), 7)])
    with pytest.raises(ValueError, match="must fit the events before it"):
        replay.take(event)


def test_blocks_that_became_free_are_told_once():
    manager = BlockManager(num_blocks=6, block_size=4, num_host_blocks=4, tracks_freed=True)
    assert manager.take_freed() == ([], [])
    manager.allocate(0, num_tokens=8)
    manager.fork(0, 1)
    manager.free(0)
    assert manager.take_freed() == ([], [])  # the other holds them still
    manager.begin_step()
    manager.publish(1, ALL, [1, 2, 3, 4])
    manager.free(1)
    assert manager.take_freed() == ([2], [])  # block 1 is cached, and may be found again
    manager.allocate(2, num_tokens=4 * 4)
    assert manager.take_freed() == ([], [])
    manager.trim(2, num_tokens=4)
    manager.free(2)
    freed = manager.take_freed().device
    assert len(freed) == len(set(freed)) == 4
    manager.allocate(3, num_tokens=5 * 4)  # evicts block 1
    assert manager.take_freed() == ([1], [])


def test_a_block_that_a_swap_still_reads_becomes_free_in_the_next_step():
    manager = BlockManager(num_blocks=6, block_size=4, num_host_blocks=4, tracks_freed=True)
    manager.allocate(0, num_tokens=8)
    manager.begin_step()
    manager.swap_out([0])
    assert manager.take_freed() == ([], [])
    manager.begin_step()
    assert manager.take_freed() == ([1, 2], [])
    manager.swap_in([0])
    assert manager.take_freed() == ([], [])
    manager.begin_step()
    assert manager.take_freed() == ([], [1, 2])


def test_freed_blocks_are_told_only_when_asked_for():
    with pytest.raises(ValueError, match="tracks_freed=False must be True"):
        BlockManager(num_blocks=6, block_size=4).take_freed()
