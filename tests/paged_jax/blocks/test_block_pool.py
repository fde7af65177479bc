"""Free list and reference counts."""

from __future__ import annotations

import pytest

from paged_jax.blocks.block_pool import BlockPool


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_usable) == (0, 4)
    pool.check_integrity()


def test_allocation_follows_the_given_order_then_the_latest_release():
    pool = BlockPool(5, free_blocks=[3, 1, 4, 2])
    assert pool.allocate(2) == [3, 1]
    assert pool.allocate(1) == [4]
    pool.release([3])
    assert pool.allocate(2) == [3, 2]


def test_allocating_nothing_changes_nothing():
    pool = BlockPool(4)
    assert pool.allocate(0) == []
    assert pool.num_free == 3


def test_shared_block_stays_until_its_last_release():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert (pool.num_free, pool.ref_counts[block]) == (1, 1)
    pool.release([block])
    assert (pool.num_free, pool.ref_counts[block]) == (2, 0)


def test_double_free_raises_with_numbers():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match=r"double free of block 2: free=3, usable=3"):
        pool.release([2])
    with pytest.raises(RuntimeError, match="double free of block 0"):
        pool.release([0])
    pool.check_integrity()


def test_sharing_a_free_block_raises():
    with pytest.raises(RuntimeError, match="share of block 1, which is free"):
        BlockPool(3).share([1])


def test_allocating_too_many_raises_and_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="4 blocks asked, 3 of 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_pool_needs_a_usable_block(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be >= 2"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("order", [[1, 2], [0, 1, 2], [1, 1, 3], [1, 2, 3, 4]])
def test_order_must_be_a_permutation(order):
    with pytest.raises(ValueError, match=r"must be a permutation of 1\.\.3"):
        BlockPool(4, free_blocks=order)


def test_integrity_sees_a_lost_block():
    pool = BlockPool(4)
    pool.allocate(1)
    pool.ref_counts[1] = 0
    with pytest.raises(RuntimeError, match="blocks lost or counted twice: free=2, usable=3"):
        pool.check_integrity()


def test_integrity_sees_a_block_both_free_and_referenced():
    pool = BlockPool(4)
    pool.ref_counts[2] = 1
    with pytest.raises(RuntimeError, match=r"in both=\[2\]"):
        pool.check_integrity()
