"""Lookup, publishing, eviction, namespaces and registered prefixes, by hand."""

from __future__ import annotations

import pytest
from suites.prefix_runs import HERE, cached_after, run_prompt, table_of

from paged_jax.blocks.block_manager import BlockCopy, BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import PartialMatch, PrefixStats


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(num_blocks=9, block_size=4)


def test_nothing_is_found_before_it_is_published(manager):
    prompt = list(range(9))
    assert manager.allocate(0, num_tokens=9)
    assert cached_after(manager, prompt) == 0
    with pytest.raises(ValueError, match="must end at or before position 0, not at 9"):
        manager.publish(0, HERE, prompt)
    manager.begin_step()
    assert manager.publish(0, HERE, prompt[:7]) == 4
    assert cached_after(manager, prompt) == 4
    assert manager.publish(0, HERE, prompt[4:], begin=4) == manager.num_published(0) == 8
    assert cached_after(manager, prompt) == 8


def test_tokens_of_the_step_in_progress_are_not_published(manager):
    run_prompt(manager, 0, list(range(6)))
    manager.append(0, num_tokens=2)
    with pytest.raises(ValueError, match="at or before position 6, not at 8: only what earlier"):
        manager.publish(0, HERE, list(range(8)))
    manager.trim(0, num_tokens=5)
    manager.append(0, num_tokens=3)
    with pytest.raises(ValueError, match="at or before position 5, not at 8"):
        manager.publish(0, HERE, list(range(8)))


def test_what_publish_refuses(manager):
    prompt = list(range(9))
    run_prompt(manager, 0, prompt)
    for begin in (-4, 2):
        with pytest.raises(ValueError, match=rf"begin={begin} must be a multiple of 4 in 0\.\.8"):
            manager.publish(0, HERE, [], begin=begin)
    manager.allocate(5, num_tokens=8)
    manager.begin_step()
    with pytest.raises(ValueError, match=r"begin=4 must be a multiple of 4 in 0\.\.0"):
        manager.publish(5, HERE, [1], begin=4)
    manager.free(5)
    with pytest.raises(ValueError, match=r"namespace=.* must be .*, as published before"):
        manager.publish(0, Namespace(), prompt)
    manager.fork(0, 1)
    manager._tables[1].node = None
    with pytest.raises(ValueError, match="token_ids must be what block 1 holds: it is cached with"):
        manager.publish(1, HERE, [5, 5, 5, 5])
    with pytest.raises(ValueError, match="seq_id=7 must be one of the 2"):
        manager.publish(7, HERE, prompt)
    with pytest.raises(ValueError, match="token_ids must hold at least one token"):
        manager.lookup(HERE, [])


def test_the_end_of_a_hit_is_copied_from_the_closest_block(manager):
    run_prompt(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    run_prompt(manager, 1, [1, 2, 3, 4, 5, 6, 9, 9])
    run_prompt(manager, 2, [1, 2, 3, 4, 5, 9, 9, 9])
    for seq_id in range(3):
        manager.free(seq_id)
    match = manager.lookup(HERE, [1, 2, 3, 4, 5, 6, 9, 1, 1])
    assert (match.blocks, match.num_tokens) == ((1,), 7)
    assert match.partial == PartialMatch(block=3, num_tokens=3)
    assert manager.allocate(3, num_tokens=9, prefix=match)
    assert manager.step_copies == (BlockCopy(3, 5),)
    assert table_of(manager, 3)[:2] == [1, 5]
    manager.check_integrity()
    # The source has a reference of its own until the step is over.
    assert manager.ref_count(3) == 1
    manager.begin_step()
    assert manager.ref_count(3) == 0
    assert manager.step_copies == ()


def test_a_hit_takes_no_more_room_than_a_miss():
    """The whole pool is one cached prompt: its end cannot be copied, so it is taken."""
    manager = BlockManager(num_blocks=5, block_size=4)
    prompt = list(range(16))
    run_prompt(manager, 0, prompt)
    manager.free(0)
    match = run_prompt(manager, 1, prompt)
    assert match.num_tokens == 15
    assert table_of(manager, 1) == [1, 2, 3, 4]
    assert manager.step_copies == ()


def test_a_stale_match_is_refused(manager):
    run_prompt(manager, 0, list(range(16)))
    manager.free(0)
    match = manager.lookup(HERE, list(range(20)))
    assert match.num_tokens == 16
    assert manager.allocate(1, num_tokens=32)
    manager.free(1)
    for call in (
        manager.can_allocate,
        lambda n, prefix: manager.allocate(2, num_tokens=n, prefix=prefix),
    ):
        with pytest.raises(ValueError, match=r"prefix=.* must be looked up again: its node"):
            call(20, prefix=match)


def test_a_table_must_hold_more_than_its_prefix(manager):
    run_prompt(manager, 0, list(range(8)))
    match = manager.lookup(HERE, list(range(8)))
    with pytest.raises(ValueError, match=r"num_tokens=7 must be > prefix.num_tokens=7"):
        manager.allocate(1, num_tokens=7, prefix=match)


@pytest.mark.parametrize("field", ["model", "adapter", "salt"])
def test_namespaces_share_nothing(field):
    manager = BlockManager(num_blocks=60, block_size=4)
    prompt = list(range(9))
    spaces = [Namespace(**{name: "a"}) for name in ("model", "adapter", "salt")]
    spaces += [Namespace(), Namespace(**{field: ""}), Namespace(model="a", salt="a")]
    assert len(set(spaces)) == 6
    for seq_id, namespace in enumerate(spaces):
        assert run_prompt(manager, seq_id, prompt, namespace).num_tokens == 0
    assert manager.stats().saved == 0
    with pytest.raises(ValueError, match=rf"{field}=3 must be a string or None"):
        Namespace(**{field: 3})


def test_equal_content_stays_in_the_first_block(manager):
    prompt = list(range(8))
    for seq_id in (0, 1):  # in one step: the second cannot find the first
        assert manager.allocate(seq_id, num_tokens=8)
    manager.begin_step()
    assert manager.publish(0, HERE, prompt) == manager.publish(1, HERE, prompt) == 8
    assert manager.lookup(HERE, [*prompt, 1]).blocks == (1, 2)
    assert table_of(manager, 1) == [3, 4]
    manager.free(1)
    assert manager.stats().cached == 0
    manager.check_integrity()


def test_eviction_goes_from_the_tail_of_the_longest_unused():
    manager = BlockManager(num_blocks=7, block_size=4)
    old, new = [1] * 12, [2] * 12
    run_prompt(manager, 0, old)
    run_prompt(manager, 1, new)
    manager.free(0)
    manager.free(1)
    expected = [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]
    for seq_id, lens in enumerate(expected, start=2):
        assert manager.allocate(seq_id, num_tokens=1)
        manager.check_integrity()
        assert (cached_after(manager, old), cached_after(manager, new)) == lens
    assert manager.prefix_stats() == PrefixStats(
        queries=2, query_tokens=24, hit_tokens=0, evictions=6
    )


def test_a_beginning_that_fell_idle_first_is_not_evicted_before_what_follows():
    manager = BlockManager(num_blocks=7, block_size=4)
    tokens = [1] * 12
    run_prompt(manager, 0, tokens)
    manager.drop_before(0, 4)
    manager.free(0)
    for seq_id, found in enumerate((12, 12, 12, 8, 4, 0), start=1):
        assert manager.allocate(seq_id, num_tokens=1)
        assert cached_after(manager, tokens) == found
        manager.check_integrity()


def test_use_makes_a_prefix_the_last_to_go():
    manager = BlockManager(num_blocks=7, block_size=4)
    for seq_id, token in enumerate((1, 2, 3)):
        run_prompt(manager, seq_id, [token] * 8)
    for seq_id in range(3):
        manager.free(seq_id)
    manager.allocate(3, num_tokens=5, prefix=manager.lookup(HERE, [1] * 4 + [9]))
    manager.free(3)
    manager.allocate(4, num_tokens=20)
    assert [cached_after(manager, [token] * 4) for token in (1, 2, 3)] == [4, 0, 0]


def test_what_matched_blocks_follow_is_not_evicted_for_the_rest_of_the_prompt():
    manager = BlockManager(num_blocks=7, block_size=4)
    run_prompt(manager, 0, [1] * 12)
    manager.free(0)
    match = manager.lookup(HERE, [1] * 13)
    assert manager.allocate(1, num_tokens=24, prefix=match)
    assert table_of(manager, 1)[:3] == [1, 2, 3]
    assert manager.allocate(2, num_tokens=1) is False


def test_a_trimmed_sequence_takes_its_block_out_of_the_cache_when_it_writes(manager):
    prompt = list(range(12))
    run_prompt(manager, 0, prompt)
    manager.trim(0, num_tokens=6)
    assert manager.num_published(0) == 4
    assert cached_after(manager, prompt) == 12
    assert manager.append(0) == ()
    assert cached_after(manager, prompt) == 4
    manager.check_integrity()
    manager.begin_step()
    assert manager.publish(0, HERE, [*prompt[:6], 99]) == 4


def test_a_trimmed_sequence_copies_a_cached_block_that_others_hold(manager):
    prompt = list(range(8))
    run_prompt(manager, 0, prompt)
    manager.fork(0, 1)
    manager.trim(1, num_tokens=6)
    assert manager.append(1) == (BlockCopy(2, 3),)
    assert cached_after(manager, prompt) == 8


def test_registered_prefix_is_found_to_its_last_token_until_unpinned():
    manager = BlockManager(num_blocks=7, block_size=4)
    prefix = list(range(10))
    assert manager.allocate(0, num_tokens=10)
    with pytest.raises(ValueError, match="at or before position 0, not at 10"):
        manager.pin(0, HERE, prefix)
    manager.begin_step()
    with pytest.raises(ValueError, match="token_ids has 9 tokens, it must have the 10 of seq_id=0"):
        manager.pin(0, HERE, prefix[:9])
    pin = manager.pin(0, HERE, prefix)
    assert not manager.has_table(0)
    assert manager.stats().used == 3
    for seq_id in (1, 2):
        match = manager.lookup(HERE, [*prefix, 50 + seq_id])
        assert (match.blocks, match.partial) == ((1, 2), PartialMatch(3, 2))
        assert manager.allocate(seq_id, num_tokens=11, prefix=match)
        assert table_of(manager, seq_id) == [1, 2, 3 + seq_id]
        manager.check_integrity()
    assert manager.step_copies == (BlockCopy(3, 4), BlockCopy(3, 5))
    manager.free(1)
    manager.free(2)
    manager.begin_step()
    assert manager.allocate(3, num_tokens=12)
    assert manager.allocate(4, num_tokens=1) is False  # the prefix is resident
    manager.unpin(pin)
    with pytest.raises(ValueError, match=rf"pin_id={pin} must be one of \[\]"):
        manager.unpin(pin)
    assert cached_after(manager, prefix) == 10
    assert manager.allocate(4, num_tokens=12)
    assert cached_after(manager, prefix) == 0
    manager.check_integrity()


def test_a_second_registration_shares_the_blocks_of_the_first(manager):
    prefix = list(range(6))
    for seq_id in (0, 1):
        assert manager.allocate(seq_id, num_tokens=6)
    manager.begin_step()
    first, second = manager.pin(0, HERE, prefix), manager.pin(1, HERE, prefix)
    assert manager.stats().used == 2
    manager.unpin(first)
    assert cached_after(manager, prefix) == 6
    assert manager.stats().used == 2
    manager.unpin(second)
    manager.check_integrity()
    assert manager.num_free == manager.num_usable


class TestIntegrity:
    """Each broken invariant is seen; the state is broken by hand."""

    @pytest.fixture
    def manager(self) -> BlockManager:
        manager = BlockManager(num_blocks=12, block_size=4)
        run_prompt(manager, 0, list(range(9)))
        run_prompt(manager, 1, [5] * 8)
        manager.free(1)
        manager.check_integrity()
        return manager

    def test_cached_block_that_is_free(self, manager):
        manager._pool.unkeep(1)
        with pytest.raises(RuntimeError, match=r"cached CachedNode\(.* does not fit its parent"):
            manager.check_integrity()

    def test_idle_block_that_is_not_cached(self, manager):
        manager._pool.keep(3)
        manager.trim(0, num_tokens=8)
        with pytest.raises(RuntimeError, match=r"4 nodes in the tree, .* idle blocks \["):
            manager.check_integrity()

    def test_node_below_the_wrong_parent(self, manager):
        node = manager._cache.node_of(2)
        node.parent = manager._cache.node_of(4)
        with pytest.raises(RuntimeError, match=r"cached CachedNode\(.* does not fit its parent"):
            manager.check_integrity()

    def test_cached_block_written_by_its_holder(self, manager):
        manager._tables[0].cut(2)
        manager._pool.release([3])
        manager._tables[0].num_tokens = 7
        manager._num_table_tokens -= 2
        with pytest.raises(RuntimeError, match="somebody wrote to a cached block"):
            manager.check_integrity()


def test_room_for_a_new_sequence_beside_what_it_shares():
    """As many tokens as ``allocate`` then gives, not one more; none where a copy has no room."""
    manager = BlockManager(num_blocks=6, block_size=4)
    run_prompt(manager, 0, list(range(12)))
    prompt = [*range(9), 99, 98]
    match = manager.lookup(HERE, prompt)
    assert (match.num_tokens, manager.num_held_of(match)) == (9, 2)
    assert manager.room_for_new(match) == 4 * 4 - 9
    assert manager.room_for_new() == 2 * 4
    assert not manager.can_allocate(17, prefix=match)
    assert manager.allocate(1, num_tokens=16, prefix=match)
    manager.begin_step()
    match = manager.lookup(HERE, prompt)
    assert (manager.num_free, match.num_tokens) == (0, 9)
    assert manager.room_for_new(match) == 0
