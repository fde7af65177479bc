"""Swapping to the host pool and holes, by hand."""

from __future__ import annotations

import pytest

from paged_jax.blocks.block_manager import BlockCopy, BlockManager, BlockSwap
from paged_jax.blocks.namespace import Namespace


def table_of(manager: BlockManager, seq_id: int) -> list[int]:
    return manager.table_array(seq_id).tolist()


@pytest.fixture
def manager() -> BlockManager:
    """Sequences 0 and 1 share a prompt of 7 tokens and have one more each; 2 is another request."""
    manager = BlockManager(num_blocks=9, block_size=4, num_host_blocks=6)
    manager.allocate(0, num_tokens=7)
    manager.fork(0, 1)
    manager.begin_step()
    manager.append(0)
    manager.append(1)
    manager.allocate(2, num_tokens=3)
    manager.begin_step()
    return manager


def test_a_group_goes_out_and_comes_back_with_its_sharing(manager):
    assert (table_of(manager, 0), table_of(manager, 1)) == ([1, 3], [1, 2])
    assert manager.can_swap_out([0, 1])
    swaps = manager.swap_out([0, 1])
    assert swaps == (BlockSwap(1, 1), BlockSwap(3, 2), BlockSwap(2, 3))
    assert manager.num_free_host == 2
    assert (manager.is_swapped(0), manager.has_table(0), manager.num_sequences) == (True, False, 1)
    manager.check_integrity()
    # Read by this step: not handed out before the next.
    assert manager.num_free == 4
    manager.begin_step()
    assert manager.num_free == 7
    assert manager.num_swapped_blocks([0, 1]) == 3
    assert manager.swap_in([0, 1]) is not None
    first, second = table_of(manager, 0), table_of(manager, 1)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert (manager.num_tokens(0), manager.stats().saved) == (8, 1)
    manager.check_integrity()
    assert manager.num_free_host == 2  # read by this step
    manager.begin_step()
    assert manager.num_free_host == 5


def test_no_room_is_a_value_and_changes_nothing(manager):
    assert manager.allocate(3, num_tokens=12)
    manager.begin_step()
    assert not manager.can_swap_out([0, 1, 3])
    assert manager.swap_out([0, 1, 3]) is None
    assert table_of(manager, 0) == [1, 3]
    assert manager.num_free_host == 5
    assert manager.swap_out([0, 1]) is not None
    manager.begin_step()
    assert manager.allocate(4, num_tokens=12)
    assert not manager.can_swap_in([0, 1])
    assert manager.swap_in([0, 1]) is None
    assert manager.is_swapped(0)
    manager.check_integrity()
    without = BlockManager(num_blocks=9, block_size=4)
    without.allocate(0, num_tokens=3)
    without.begin_step()
    assert without.swap_out([0]) is None
    without.append(0)
    without.begin_step()
    without.drop_before(0, 4)  # nothing but holes
    assert not without.can_swap_out([0])
    assert without.swap_out([0]) is None
    assert without.num_free_host == 0


def test_blocks_that_others_hold_stay_with_them(manager):
    manager.begin_step()
    swaps = manager.swap_out([1])
    assert swaps == (BlockSwap(1, 1), BlockSwap(2, 2))
    assert (manager.ref_count(1), table_of(manager, 0)) == (1, [1, 3])
    manager.check_integrity()
    assert manager.swap_in([1]) == (BlockSwap(5, 1), BlockSwap(6, 2))
    assert table_of(manager, 1) == [5, 6]
    manager.check_integrity()


def test_copies_and_writes_may_follow_a_swap_in_at_once(manager):
    manager.fork(2, 3)
    manager.swap_out([2, 3])
    manager.begin_step()
    (swap,) = manager.swap_in([2, 3]) or ()
    ((src, dst),) = manager.append(2) or ()
    assert (src, table_of(manager, 2), table_of(manager, 3)) == (swap.device, [dst], [src])
    manager.check_integrity()


def test_what_this_step_writes_or_brings_in_cannot_go_out(manager):
    manager.append(0)
    with pytest.raises(ValueError, match=r"have no writes or swap-ins in step 2: seq_id=0 has"):
        manager.swap_out([0, 1])
    manager.swap_out([2])
    manager.swap_in([2])
    with pytest.raises(ValueError, match=r"have no writes or swap-ins in step 2: seq_id=2 has"):
        manager.swap_out([2])
    with pytest.raises(ValueError, match="must end at or before position 0, not at 3"):
        manager.publish(2, Namespace(), [1, 2, 3])
    manager.begin_step()
    with pytest.raises(ValueError, match=r"seq_ids=\[1, 1\] must differ"):
        manager.swap_out([1, 1])
    manager.check_integrity()


def test_ids_on_the_other_side_are_refused(manager):
    manager.swap_out([2])
    for call in (
        lambda: manager.append(2),
        lambda: manager.fork(2, 5),
        lambda: manager.swap_out([2]),
        lambda: manager.can_swap_out([2]),
    ):
        with pytest.raises(ValueError, match="seq_id=2 must be one of the 2 with a table"):
            call()
    for call in (manager.swap_in, manager.can_swap_in, manager.num_swapped_blocks):
        with pytest.raises(ValueError, match="seq_id=0 must be one of the 1 that are swapped out"):
            call([0])
    with pytest.raises(ValueError, match=r"seq_ids=\[2, 2\] must differ"):
        manager.swap_in([2, 2])
    with pytest.raises(ValueError, match="seq_id=2 must be new, it has BlockTable"):
        manager.allocate(2, num_tokens=1)
    with pytest.raises(ValueError, match="child_id=2 must be new, it has BlockTable"):
        manager.fork(0, 2)


@pytest.mark.parametrize("num_host_blocks", [-1, 1])
def test_a_host_pool_needs_a_block(num_host_blocks):
    with pytest.raises(ValueError, match=rf"num_host_blocks={num_host_blocks} must be 0 or >= 2"):
        BlockManager(num_blocks=4, block_size=4, num_host_blocks=num_host_blocks)


def test_cancel_while_swapped_out(manager):
    manager.swap_out([0, 1])
    manager.free(0)
    manager.check_integrity()
    manager.begin_step()
    assert manager.num_free_host == 3
    manager.free(1)
    assert manager.num_free_host == 5
    manager.check_integrity()
    with pytest.raises(ValueError, match="seq_id=1 must be one of the 1 with a table"):
        manager.free(1)


def test_a_cached_block_stays_cached_when_its_holder_goes_out():
    manager = BlockManager(num_blocks=9, block_size=4, num_host_blocks=6)
    manager.allocate(0, num_tokens=8)
    manager.begin_step()
    manager.publish(0, Namespace(), list(range(8)))
    manager.swap_out([0])
    manager.begin_step()
    assert manager.stats().cached == 2
    manager.swap_in([0])
    assert table_of(manager, 0) == [3, 4]
    assert manager.lookup(Namespace(), list(range(9))).blocks == (1, 2)
    manager.begin_step()
    assert manager.num_published(0) == 8
    manager.check_integrity()


def test_holes_go_out_and_come_back():
    manager = BlockManager(num_blocks=9, block_size=4, num_host_blocks=6)
    manager.allocate(0, num_tokens=10)
    manager.begin_step()
    manager.drop_before(0, 9)
    manager.fork(0, 1)
    assert table_of(manager, 1) == [0, 0, 3]
    manager.check_integrity()
    assert manager.swap_out([0, 1]) == (BlockSwap(3, 1),)
    manager.begin_step()
    assert manager.num_free == 8
    assert len(manager.swap_in([0, 1]) or ()) == 1
    assert table_of(manager, 0)[:2] == [0, 0]
    manager.check_integrity()


class TestHoles:
    @pytest.fixture
    def manager(self) -> BlockManager:
        manager = BlockManager(num_blocks=9, block_size=4)
        manager.allocate(0, num_tokens=14)
        manager.begin_step()
        return manager

    @pytest.mark.parametrize("window", [1, 3, 4, 5])
    def test_b89_blocks_wholly_before_the_window_are_given_up(self, manager, window):
        for num_tokens in range(14, 31):
            first = num_tokens - window  # the next query sees it, and window - 1 more and itself
            manager.drop_before(0, first)
            table = table_of(manager, 0)
            assert [block == 0 for block in table] == [
                4 * i + 4 <= first for i in range(len(table))
            ]
            assert manager.stats().filled == num_tokens - 4 * (first // 4)
            manager.check_integrity()
            manager.begin_step()
            assert manager.append(0) == ()

    def test_positions_and_trims_out_of_range(self, manager):
        for position in (-1, 15):
            with pytest.raises(ValueError, match=rf"position={position} must lie in 0\.\.14"):
                manager.drop_before(0, position)
        manager.drop_before(0, 9)
        manager.drop_before(0, 5)  # given up is given up
        assert table_of(manager, 0) == [0, 0, 3, 4]
        with pytest.raises(ValueError, match=r"num_tokens=7 must lie in 8\.\.14"):
            manager.trim(0, num_tokens=7)
        manager.trim(0, num_tokens=8)
        assert manager.append(0) == ()
        manager.check_integrity()

    def test_holes_are_never_published_nor_found(self, manager):
        tokens = list(range(14))
        manager.publish(0, Namespace(), tokens[:4])
        manager.drop_before(0, 9)
        # Block 1 is cached still, so the path goes through it; block 2 is lost.
        assert manager.publish(0, Namespace(), tokens) == 4
        assert manager.lookup(Namespace(), tokens).num_tokens == 4
        manager.check_integrity()
        with pytest.raises(ValueError, match=r"which must have no holes \(it has 2\)"):
            manager.pin(0, Namespace(), tokens)

    def test_an_evicted_beginning_takes_what_follows_out_of_the_cache(self, manager):
        tokens = list(range(14))
        manager.publish(0, Namespace(), tokens)
        manager.drop_before(0, 9)
        assert manager.lookup(Namespace(), tokens).num_tokens == 12
        assert (manager.stats().cached, manager.num_free) == (2, 6)
        manager.allocate(1, num_tokens=20)
        assert manager.lookup(Namespace(), tokens).num_tokens == 4
        assert manager.num_published(0) == 0
        assert table_of(manager, 0) == [0, 0, 3, 4]
        manager.check_integrity()
        manager.begin_step()
        assert manager.publish(0, Namespace(), tokens) == 4

    def test_a_block_given_up_waits_for_the_copy_that_reads_it(self, manager):
        manager.fork(0, 1)
        assert manager.append(1) == (BlockCopy(4, 5),)
        manager.append(0, num_tokens=2)
        manager.drop_before(0, 16)
        assert manager.num_free == 3
        manager.check_integrity()
        manager.begin_step()
        assert manager.num_free == 4


class TestIntegrity:
    """Each broken invariant is seen; the state is broken by hand."""

    def test_host_reference_without_a_holder(self, manager):
        manager.swap_out([0, 1])
        manager._host.pool.share([1])
        with pytest.raises(RuntimeError, match=r"reference counts .* differ from the holders"):
            manager.check_integrity()

    def test_on_both_sides(self, manager):
        manager.swap_out([2])
        manager.allocate(3, num_tokens=1)
        manager._tables[2] = manager._tables.pop(3)
        with pytest.raises(
            RuntimeError, match=r"sequences \[2\] are on the device and swapped out"
        ):
            manager.check_integrity()

    def test_null_block_that_is_no_hole(self, manager):
        manager._tables[0].replace(0, 0)
        manager._pool.release([1])
        with pytest.raises(RuntimeError, match=r"seq_id=0: BlockTable\(blocks=\[0, 3\]"):
            manager.check_integrity()

    def test_busy_block_that_nobody_holds(self, manager):
        manager._busy.busy.add(8)
        with pytest.raises(RuntimeError, match=r"busy blocks \{8\} are not held"):
            manager.check_integrity()
