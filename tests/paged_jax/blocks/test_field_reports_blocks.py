"""Faults that users of similar systems met (tests/data/field_reports.json): the manager alone."""

from __future__ import annotations

import random

import pytest
from suites.prefix_runs import HERE, cached_after, run_prompt, table_of

from paged_jax.blocks.block_manager import BlockCopy, BlockManager
from paged_jax.blocks.namespace import Namespace


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_b11_fully_cached_prompt_recomputes_its_last_token_in_a_block_of_its_own(length):
    manager = BlockManager(num_blocks=20, block_size=4)
    prompt = list(range(9))
    run_prompt(manager, 0, prompt)
    for seq_id in (1, 2):
        match = run_prompt(manager, seq_id, prompt[:length])
        assert match.num_tokens == length - 1
        assert len(match.blocks) == (length - 1) // 4
        own = table_of(manager, seq_id)[-1]
        assert manager.ref_count(own) == 1
        assert own not in table_of(manager, 0)


def test_b01_a_reused_block_is_not_found_for_its_old_tokens():
    manager = BlockManager(num_blocks=5, block_size=4)
    first, other = list(range(8)), [7] * 15
    run_prompt(manager, 0, first)
    manager.free(0)
    assert cached_after(manager, first) == 8
    assert run_prompt(manager, 1, other).num_tokens == 0
    manager.free(1)
    assert run_prompt(manager, 2, first).num_tokens == 0


def test_b03_a_hit_found_before_the_eviction_is_looked_up_again():
    manager = BlockManager(num_blocks=5, block_size=4)
    donor = list(range(9))
    run_prompt(manager, 0, donor)
    early = manager.lookup(HERE, [*donor, 1])
    manager.free(0)
    run_prompt(manager, 1, [5] * 16)
    manager.free(1)
    with pytest.raises(ValueError, match="must be looked up again"):
        manager.allocate(2, num_tokens=10, prefix=early)
    assert manager.lookup(HERE, [*donor, 1]).num_tokens == 0


def test_b04_unfinished_prompts_are_found_as_far_as_their_steps_returned():
    """10 blocks in chunks of 2; cancelled after each chunk, then asked twice in one step."""
    prompt = list(range(40))
    for num_chunks in range(1, 5):
        manager = BlockManager(num_blocks=41, block_size=4)
        assert manager.allocate(0, num_tokens=8)
        for chunk in range(1, num_chunks):
            manager.begin_step()
            manager.publish(0, HERE, prompt[: 8 * chunk])
            manager.append(0, num_tokens=8)
        manager.free(0)
        found = 8 * (num_chunks - 1)
        for seq_id in (1, 2):
            match = manager.lookup(HERE, prompt)
            assert match.num_tokens == found
            assert manager.allocate(seq_id, num_tokens=40, prefix=match)
            manager.check_integrity()


def test_b06_new_weights_find_nothing_of_the_old_ones():
    manager = BlockManager(num_blocks=9, block_size=4)
    prompt = list(range(9))
    run_prompt(manager, 0, prompt, Namespace(model="w1"))
    assert cached_after(manager, prompt, Namespace(model="w2")) == 0
    assert run_prompt(manager, 1, prompt, Namespace(model="w2")).num_tokens == 0
    assert cached_after(manager, prompt, Namespace(model="w2")) == 8


class Colliding(int):
    """A token whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


def test_b08_equal_digests_share_nothing():
    manager = BlockManager(num_blocks=200, block_size=2)
    rng = random.Random(0)
    prompts = [[Colliding(rng.randrange(3)) for _ in range(9)] for _ in range(20)]
    for seq_id, prompt in enumerate(prompts):
        match = run_prompt(manager, seq_id, prompt)
        common = max(
            (next((i for i in range(8) if prompt[i] != other[i]), 8) for other in prompts[:seq_id]),
            default=0,
        )
        assert match.num_tokens == common


def test_b08_equal_blocks_after_other_beginnings_are_not_shared():
    manager = BlockManager(num_blocks=9, block_size=1)
    run_prompt(manager, 0, [1, 2, 3])
    assert manager.lookup(HERE, [4, 2, 3]).num_tokens == 0
    assert manager.lookup(HERE, [2, 3, 3]).num_tokens == 0


def test_b27_counts_never_exceed_the_pool():
    manager = BlockManager(num_blocks=12, block_size=4)
    prompts = ([1] * 9, [1] * 6 + [2] * 3, [3] * 8 + [1], [3] * 8 + [2])
    for seq_id, prompt in enumerate(prompts):
        run_prompt(manager, seq_id, prompt)
        stats = manager.stats()
        assert stats.used + stats.free == stats.total == 11
    for seq_id in range(4):
        manager.free(seq_id)
        stats = manager.stats()
        assert stats.used + stats.free == stats.total
        assert stats.cached <= stats.free
    assert (stats.used, stats.free, stats.cached) == (0, 11, 5)


@pytest.mark.parametrize("window", [8, None])
@pytest.mark.parametrize("is_beam", [False, True])
def test_b24_windowed_and_forked_tables_free_every_block_once(window, is_beam):
    manager = BlockManager(num_blocks=60, block_size=4)
    manager.allocate(0, num_tokens=9)
    live, next_id = [0, 1, 2, 3], 4
    for child in live[1:]:
        manager.fork(0, child)
    for step in range(24):
        manager.begin_step()
        if is_beam:
            # The two outer beams are dropped, the inner ones doubled.
            for parent in live[1:3]:
                manager.fork(parent, next_id)
                live.append(next_id)
                next_id += 1
            manager.free(live.pop(0))
            manager.free(live.pop(2))
        for seq_id in live:
            assert manager.append(seq_id) is not None
            if window is not None:
                manager.drop_before(seq_id, max(manager.num_tokens(seq_id) - window, 0))
            manager.check_integrity()
        tables = [manager.table_array(seq_id).tolist() for seq_id in live]
        entries = sum(block != 0 for table in tables for block in table)
        manager.begin_step()
        assert sum(manager.ref_count(block) for block in range(60)) == entries
        assert len(tables[0]) == manager.blocks_for(10 + step)
    for seq_id in live:
        manager.free(seq_id)
    manager.begin_step()
    assert manager.num_free == manager.num_usable


def test_b29_children_refer_to_their_own_prompt_and_copy_once():
    manager = BlockManager(num_blocks=40, block_size=4)
    lens = {0: 8, 2: 9, 4: 11}
    for seq_id, num_tokens in lens.items():
        manager.allocate(seq_id, num_tokens=num_tokens)
        manager.fork(seq_id, seq_id + 1)
    manager.begin_step()
    prompts = {seq_id: table_of(manager, seq_id) for seq_id in lens}
    for seq_id, num_tokens in lens.items():
        copies = [manager.append(i) for i in (seq_id, seq_id + 1)]
        is_partial = num_tokens % 4 != 0
        assert [len(copy or ()) for copy in copies] == [int(is_partial), 0]
        full = num_tokens // 4
        for i in (seq_id, seq_id + 1):
            assert table_of(manager, i)[:full] == prompts[seq_id][:full]
    manager.check_integrity()


@pytest.mark.parametrize("prompt_len", [3, 4, 5])
def test_b30_a_fork_has_its_parents_length(prompt_len):
    manager = BlockManager(num_blocks=40, block_size=4)
    manager.allocate(0, num_tokens=prompt_len)
    manager.begin_step()
    manager.append(0)
    manager.fork(0, 1)
    manager.fork(0, 2)
    for _ in range(5):
        manager.begin_step()
        for seq_id in range(3):
            manager.append(seq_id)
    assert [manager.num_tokens(seq_id) for seq_id in range(3)] == [prompt_len + 6] * 3
    manager.check_integrity()


def test_b80_beams_reordered_0_1_2_to_2_2_0():
    manager = BlockManager(num_blocks=40, block_size=4)
    for seq_id in range(3):
        manager.allocate(seq_id, num_tokens=6)
    old = [table_of(manager, seq_id) for seq_id in range(3)]
    manager.begin_step()
    for parent, child in ((2, 10), (2, 11), (0, 12)):
        manager.fork(parent, child)
    for seq_id in range(3):
        manager.free(seq_id)
    assert [manager.ref_count(block) for block in old[1]] == [0, 0]
    assert [table_of(manager, child) for child in (10, 11, 12)] == [old[2], old[2], old[0]]
    copies = [manager.append(child) for child in (10, 11, 12)]
    new = table_of(manager, 10)[-1]
    assert copies == [(BlockCopy(old[2][1], new),), (), ()]
    manager.check_integrity()
