"""The buddy allocator: regions on their boundaries, merged when free, none lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.blocks.buddy import BuddyAllocator


def test_a_region_is_rounded_up_to_a_power_of_two():
    buddies = BuddyAllocator(64)
    starts = [buddies.allocate(length) for length in (1, 2, 3, 5, 9, 16)]
    assert [buddies.length(start) for start in starts] == [1, 2, 4, 8, 16, 16]
    assert buddies.num_free == 64 - 47


def test_free_space_in_pieces_serves_no_long_region():
    buddies = BuddyAllocator(8)
    starts = [buddies.allocate(2) for _ in range(4)]
    buddies.free(starts[0])
    buddies.free(starts[2])
    assert (buddies.num_free, buddies.largest_free) == (4, 2)
    assert buddies.allocate(4) is None
    buddies.free(starts[1])
    assert buddies.allocate(4) == 0


@pytest.mark.parametrize("size", [1, 7, 12, 100])
def test_a_pool_of_any_size_is_used_up_and_merged_again(size):
    buddies = BuddyAllocator(size)
    starts = [buddies.allocate(1) for _ in range(size)]
    assert sorted(starts) == list(range(size))
    assert (buddies.allocate(1), buddies.largest_free) == (None, 0)
    for start in starts:
        buddies.free(start)
    assert buddies.largest_free == 1 << (size.bit_length() - 1)


def test_refusals():
    with pytest.raises(ValueError, match="size=0 must be >= 1"):
        BuddyAllocator(0)
    buddies = BuddyAllocator(4)
    with pytest.raises(ValueError, match="length=0 must be >= 1"):
        buddies.allocate(0)
    start = buddies.allocate(2)
    buddies.free(start)
    with pytest.raises(ValueError, match="start=0 must be the start of a region"):
        buddies.free(start)


def test_integrity_sees_a_lost_region():
    buddies = BuddyAllocator(4)
    start = buddies.allocate(2)
    del buddies._lengths[start]
    with pytest.raises(RuntimeError, match=r"must tile 0\.\.3"):
        buddies.check_integrity()
    buddies = BuddyAllocator(4)
    buddies.num_free -= 1
    with pytest.raises(RuntimeError, match="3 units free"):
        buddies.check_integrity()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 70),
    operations=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60),
)
def test_random_operations(size, operations):
    buddies, held = BuddyAllocator(size), {}
    for allocates, number in operations:
        if allocates:
            rounded = 1 << (number - 1).bit_length()
            could = rounded <= buddies.largest_free
            start = buddies.allocate(number)
            assert (start is not None) == could
            if start is not None:
                taken = set(range(start, start + rounded))
                assert all(not taken & other for other in held.values())
                assert max(taken) < size
                held[start] = taken
        elif held:
            start = sorted(held)[number % len(held)]
            buddies.free(start)
            del held[start]
        buddies.check_integrity()
        assert buddies.num_free == size - sum(map(len, held.values()))
    for start in held:
        buddies.free(start)
    buddies.check_integrity()
    assert len(list(buddies.free_regions())) == size.bit_count()
