"""Tables, sharing and copy-on-write, with the paper's walkthroughs (its Figs. 6 to 9)."""

from __future__ import annotations

import numpy as np
import pytest

from paged_jax.blocks.block_manager import BlockCopy, BlockManager

# The order in which the paper's figures take blocks 7, 1, 5, 2, 3.
PAPER_ORDER = [7, 1, 5, 2, 3, 4, 6, 8]


def table_of(manager: BlockManager, seq_id: int) -> list[int]:
    return manager.table_array(seq_id).tolist()


def test_paper_figure_6_one_request():
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=[7, 1, 3, 2, 4, 5, 6, 8])
    assert manager.allocate(0, num_tokens=7)
    assert table_of(manager, 0) == [7, 1]
    assert (manager.num_tokens(0), manager.stats().waste) == (7, 1)
    manager.begin_step()
    assert manager.append(0) == ()
    assert table_of(manager, 0) == [7, 1]
    assert (manager.num_tokens(0), manager.stats().waste) == (8, 0)
    manager.begin_step()
    assert manager.append(0) == ()
    assert table_of(manager, 0) == [7, 1, 3]
    assert (manager.num_tokens(0), manager.stats().waste) == (9, 3)
    manager.check_integrity()


def test_paper_figure_7_two_requests_share_nothing():
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=PAPER_ORDER)
    manager.allocate(0, num_tokens=7)
    manager.allocate(1, num_tokens=5)
    assert (table_of(manager, 0), table_of(manager, 1)) == ([7, 1], [5, 2])
    for _ in range(2):
        manager.begin_step()
        manager.append(0)
        manager.append(1)
    assert (table_of(manager, 0), table_of(manager, 1)) == ([7, 1, 3], [5, 2])
    assert manager.stats().saved == 0
    manager.check_integrity()


def test_paper_figure_8_parallel_sampling_copies_on_write():
    manager = BlockManager(num_blocks=9, block_size=4, free_blocks=[7, 1, 3, 2, 4, 5, 6, 8])
    manager.allocate(0, num_tokens=7)
    manager.fork(0, 1)
    assert manager.stats().saved == 2
    assert manager.stats().filled == 7
    manager.begin_step()
    assert [manager.ref_count(block) for block in (7, 1)] == [2, 2]
    assert manager.append(0) == (BlockCopy(src=1, dst=3),)
    assert [manager.ref_count(block) for block in (7, 1, 3)] == [2, 1, 1]
    assert manager.append(1) == ()
    assert (table_of(manager, 0), table_of(manager, 1)) == ([7, 3], [7, 1])
    assert (manager.stats().saved, manager.stats().filled) == (1, 12)
    manager.check_integrity()
    manager.free(0)
    manager.free(1)
    manager.begin_step()
    assert manager.num_free == manager.num_usable


def test_paper_figure_9_beam_search_frees_losers_and_copies_nothing():
    """The figure's block 0, the prompt, is block 13 here: 0 is the null block."""
    manager = BlockManager(num_blocks=14, block_size=4, free_blocks=[13, *range(1, 13)])
    manager.allocate(0, num_tokens=4)
    manager.fork(0, 3)
    for children, beams in (((), (0, 3)), ((), (0, 3)), ((1, 2), (0, 1, 2, 3))):
        for child in children:
            manager.fork(0, child)
        manager.begin_step()
        for beam in beams:
            assert manager.append(beam, num_tokens=4) == ()
    shown = {0: [13, 1, 3, 5], 1: [13, 1, 3, 6], 2: [13, 1, 3, 7], 3: [13, 2, 4, 8]}
    assert {beam: table_of(manager, beam) for beam in range(4)} == shown
    counts = {block: manager.ref_count(block) for block in range(1, 14)}
    assert counts == {13: 4, 1: 3, 3: 3} | dict.fromkeys((2, 4, 5, 6, 7, 8), 1) | dict.fromkeys(
        range(9, 13), 0
    )
    manager.begin_step()
    manager.fork(1, 4)
    manager.fork(2, 5)
    # Blocks freed last are handed out first, so the losers go after the new blocks are taken.
    assert [manager.append(beam) for beam in (1, 4, 2, 5)] == [()] * 4
    before = {block for block in range(1, 14) if manager.ref_count(block)}
    manager.free(0)
    manager.free(3)
    assert before - {b for b in before if manager.ref_count(b)} == {2, 4, 5, 8}
    assert [table_of(manager, beam)[3:] for beam in (1, 4, 2, 5)] == [
        [6, 9], [6, 10], [7, 11], [7, 12],
    ]  # fmt: skip
    assert [manager.ref_count(block) for block in (13, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert manager.stats().saved == 20 - 9
    manager.check_integrity()


def test_full_shared_block_needs_no_copy():
    manager = BlockManager(num_blocks=9, block_size=4)
    manager.allocate(0, num_tokens=8)
    manager.fork(0, 1)
    manager.begin_step()
    assert manager.append(0) == manager.append(1) == ()
    assert table_of(manager, 0)[:2] == table_of(manager, 1)[:2]
    assert table_of(manager, 0)[2] != table_of(manager, 1)[2]


def test_long_append_copies_the_last_block_only():
    manager = BlockManager(num_blocks=20, block_size=4)
    manager.allocate(0, num_tokens=6)
    manager.fork(0, 1)
    manager.begin_step()
    assert manager.append(1, num_tokens=9) == (BlockCopy(src=2, dst=3),)
    assert table_of(manager, 1) == [1, 3, 4, 5]
    manager.check_integrity()


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_no_room_is_a_value_and_changes_nothing(block_size):
    manager = BlockManager(num_blocks=4, block_size=block_size)
    assert not manager.can_allocate(3 * block_size + 1)
    assert not manager.allocate(0, num_tokens=3 * block_size + 1)
    assert manager.can_allocate(3 * block_size)
    assert manager.allocate(0, num_tokens=3 * block_size)
    assert manager.room(0) == 0
    assert not manager.can_append(0)
    assert manager.append(0) is None
    assert manager.num_tokens(0) == 3 * block_size
    manager.check_integrity()


def test_no_room_for_the_copy():
    manager = BlockManager(num_blocks=3, block_size=4)
    manager.allocate(0, num_tokens=6)
    manager.fork(0, 1)
    manager.begin_step()
    assert (manager.room(0), manager.num_new_blocks(0)) == (0, 1)
    assert manager.append(0) is None
    manager.free(1)
    assert (manager.room(0), manager.num_new_blocks(0)) == (2, 0)
    assert manager.append(0, num_tokens=2) == ()


def test_blocks_that_several_writers_of_one_block_take():
    """All but the last of them copy it; with a holder that does not write, all do."""
    manager = BlockManager(num_blocks=16, block_size=4)
    manager.allocate(0, num_tokens=6)
    manager.allocate(9, num_tokens=4)
    for child in (1, 2):
        manager.fork(0, child)
    manager.begin_step()
    assert manager.num_new_blocks_for([]) == 0
    assert manager.num_new_blocks_for([0]) == 1
    assert manager.num_new_blocks_for([0, 1]) == 2
    assert manager.num_new_blocks_for([2, 1, 0, 9]) == 3
    for seq_ids in ([0, 1, 2, 9], [0, 1, 2, 9], [2, 0], [0, 1, 9]):
        expected, before = manager.num_new_blocks_for(seq_ids), manager.num_free
        for seq_id in seq_ids:
            assert manager.append(seq_id) is not None
        assert before - manager.num_free == expected
        manager.begin_step()
        manager.check_integrity()
    with pytest.raises(ValueError, match="seq_id=7 must be one of the 4 with a table"):
        manager.num_new_blocks_for([0, 7])


def test_copied_blocks_are_not_handed_out_in_the_same_step():
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.allocate(0, num_tokens=2)
    manager.fork(0, 1)
    manager.begin_step()
    (copy,) = manager.append(0)
    manager.free(0)
    manager.free(1)
    manager.check_integrity()
    assert manager.num_free == 1
    assert manager.stats().used == 2
    assert manager.stats().waste == 0
    manager.allocate(2, num_tokens=4)
    assert table_of(manager, 2)[0] not in copy
    manager.begin_step()
    assert manager.num_free == 2
    manager.check_integrity()


def test_copy_of_tokens_of_the_same_step_is_refused():
    manager = BlockManager(num_blocks=6, block_size=4)
    manager.allocate(0, num_tokens=2)
    manager.fork(0, 1)
    with pytest.raises(ValueError, match=r"seq_id=1 must wait for the next step: it shares block"):
        manager.append(1)
    manager.check_integrity()
    manager.begin_step()
    assert len(manager.append(1)) == 1


def test_trim_gives_slots_and_blocks_back():
    manager = BlockManager(num_blocks=6, block_size=4)
    manager.allocate(0, num_tokens=9)
    manager.trim(0, num_tokens=9)
    manager.trim(0, num_tokens=8)
    assert (manager.num_blocks(0), manager.num_free) == (2, 3)
    manager.trim(0, num_tokens=7)
    assert (manager.num_blocks(0), manager.num_tokens(0)) == (2, 7)
    manager.check_integrity()
    for num_tokens in (0, 8):
        with pytest.raises(ValueError, match=rf"num_tokens={num_tokens} must lie in 1..7"):
            manager.trim(0, num_tokens=num_tokens)


def test_trimmed_sequence_does_not_write_into_a_shared_block():
    manager = BlockManager(num_blocks=6, block_size=4)
    manager.allocate(0, num_tokens=8)
    manager.fork(0, 1)
    manager.begin_step()
    manager.trim(1, num_tokens=6)
    manager.check_integrity()
    assert manager.append(1) == (BlockCopy(src=2, dst=3),)
    assert manager.stats().filled == 8 + 3


def test_b48_tables_longer_than_the_pool():
    manager = BlockManager(num_blocks=21, block_size=4)
    manager.allocate(0, num_tokens=40)
    for seq_id in range(1, 8):
        manager.fork(0, seq_id)
    manager.begin_step()
    for seq_id in range(8):
        assert manager.append(seq_id) == ()
    assert sum(manager.num_blocks(seq_id) for seq_id in range(8)) == 88
    stats = manager.stats()
    assert (stats.used, stats.saved, stats.filled) == (18, 70, 48)
    manager.check_integrity()


def test_unknown_and_known_ids():
    manager = BlockManager(num_blocks=9, block_size=4)
    manager.allocate(0, num_tokens=3)
    manager.allocate(1, num_tokens=3)
    for call in (
        lambda: manager.append(7),
        lambda: manager.free(7),
        lambda: manager.fork(7, 8),
        lambda: manager.trim(7, num_tokens=1),
        lambda: manager.table_array(7),
    ):
        with pytest.raises(ValueError, match="seq_id=7 must be one of the 2 with a table"):
            call()
    with pytest.raises(ValueError, match="seq_id=1 must be new, it has BlockTable"):
        manager.allocate(1, num_tokens=3)
    with pytest.raises(ValueError, match="child_id=1 must be new, it has BlockTable"):
        manager.fork(0, 1)
    assert manager.has_table(1)
    assert not manager.has_table(7)


def test_counts_must_be_positive():
    with pytest.raises(ValueError, match="block_size=0 must be >= 1"):
        BlockManager(num_blocks=4, block_size=0)
    manager = BlockManager(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="num_tokens=0 must be >= 1"):
        manager.allocate(0, num_tokens=0)
    manager.allocate(0, num_tokens=1)
    with pytest.raises(ValueError, match="num_tokens=-1 must be >= 1"):
        manager.append(0, num_tokens=-1)


def test_table_array_is_int32():
    manager = BlockManager(num_blocks=64, block_size=1)
    manager.allocate(0, num_tokens=1)
    for _ in range(40):
        manager.append(0)
    assert manager.table_array(0).dtype == np.int32
    assert table_of(manager, 0) == list(range(1, 42))


class TestIntegrity:
    """Each broken invariant is seen; the state is broken by hand."""

    @pytest.fixture
    def manager(self) -> BlockManager:
        manager = BlockManager(num_blocks=12, block_size=4)
        manager.allocate(0, num_tokens=6)
        manager.fork(0, 1)
        manager.begin_step()
        manager.append(0)
        manager.check_integrity()
        return manager

    def test_leaked_reference(self, manager):
        manager._pool.share([1])
        with pytest.raises(RuntimeError, match=r"reference counts .* differ from the holders"):
            manager.check_integrity()

    def test_freed_but_reachable(self, manager):
        manager._pool.release([2])
        with pytest.raises(RuntimeError, match=r"reference counts .* differ from the holders"):
            manager.check_integrity()

    def test_written_while_shared(self, manager):
        manager.fork(1, 2)
        manager._tables[2].num_tokens += 1
        manager._num_table_tokens += 1
        with pytest.raises(RuntimeError, match="somebody wrote to a shared block"):
            manager.check_integrity()

    def test_table_of_wrong_length(self, manager):
        manager._tables[1].num_tokens = 9
        with pytest.raises(RuntimeError, match="seq_id=1: BlockTable"):
            manager.check_integrity()

    def test_token_count(self, manager):
        manager._num_table_tokens += 1
        with pytest.raises(RuntimeError, match="tables hold 13 tokens, counted 14"):
            manager.check_integrity()

    def test_deferred_block_in_a_table(self, manager):
        manager._pool.share([2])
        manager._busy.deferred.append(2)
        with pytest.raises(RuntimeError, match=r"deferred \[2\] must be busy blocks"):
            manager.check_integrity()

    def test_chained_copies(self, manager):
        manager._copies.append(BlockCopy(src=3, dst=1))
        manager._busy.busy.add(1)
        with pytest.raises(RuntimeError, match="of one step overlap"):
            manager.check_integrity()
