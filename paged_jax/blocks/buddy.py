"""A buddy allocator: regions of consecutive blocks, as the paper's Orca baselines reserve them."""

from __future__ import annotations

from collections.abc import Iterator


class BuddyAllocator:
    """Hands out regions whose length is a power of two (Knowlton, 1965).

    A region is split in halves until one fits; a freed region is merged with its other half, its
    buddy, when that is free too. A pool whose length is no power of two is several arenas: one for
    each bit of it, the largest first.

    >>> buddies = BuddyAllocator(16)
    >>> buddies.allocate(3), buddies.allocate(5)  # rounded up to 4 and 8
    (0, 8)
    >>> buddies.num_free, buddies.largest_free
    (4, 4)
    >>> buddies.free(0)
    >>> buddies.largest_free
    8

    Args:
      size: units in the pool.

    Attributes:
      num_free: units in free regions.

    Raises:
      ValueError: ``size`` < 1.
    """

    __slots__ = ("_arena_of", "_free", "_lengths", "num_free", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size={size} must be >= 1")
        self.size = self.num_free = size
        # Free regions by length, each an ordered set of starts.
        self._free: dict[int, dict[int, None]] = {1 << bit: {} for bit in range(size.bit_length())}
        # Regions handed out: start to length.
        self._lengths: dict[int, int] = {}
        # First unit of each arena, and its length.
        self._arena_of: list[tuple[int, int]] = []
        start = 0
        for bit in reversed(range(size.bit_length())):
            length = size & (1 << bit)
            if length:
                self._free[length][start] = None
                self._arena_of.append((start, length))
                start += length

    @property
    def largest_free(self) -> int:
        """Length of the largest free region, 0 when there is none."""
        return max((length for length, starts in self._free.items() if starts), default=0)

    def allocate(self, length: int) -> int | None:
        """Take a region of at least ``length`` units; its first one, or None when none is free.

        Raises:
          ValueError: ``length`` < 1.
        """
        if length < 1:
            raise ValueError(f"length={length} must be >= 1")
        rounded = 1 << (length - 1).bit_length()
        fitting = [size for size, starts in self._free.items() if starts and size >= rounded]
        if not fitting:
            return None
        size = min(fitting)
        start = next(iter(self._free[size]))
        del self._free[size][start]
        while size > rounded:
            size //= 2
            self._free[size][start + size] = None
        self._lengths[start] = rounded
        self.num_free -= rounded
        return start

    def length(self, start: int) -> int:
        """Units of the region that was handed out at ``start``.

        Raises:
          ValueError: there is none.
        """
        if start not in self._lengths:
            raise ValueError(f"start={start} must be the start of a region that is handed out")
        return self._lengths[start]

    def free(self, start: int) -> None:
        """Give a region back and merge it with its buddies.

        Raises:
          ValueError: no region was handed out at ``start``.
        """
        size = self.length(start)
        del self._lengths[start]
        self.num_free += size
        arena, arena_length = next(
            (first, length) for first, length in self._arena_of if first <= start < first + length
        )
        while size < arena_length:
            buddy = arena + ((start - arena) ^ size)
            if buddy not in self._free[size]:
                break
            del self._free[size][buddy]
            start = min(start, buddy)
            size *= 2
        self._free[size][start] = None

    def free_regions(self) -> Iterator[tuple[int, int]]:
        """Start and length of each free region."""
        for length, starts in self._free.items():
            for start in starts:
                yield start, length

    def check_integrity(self) -> None:
        """Prove that free and taken regions tile the pool, each on its own boundary, all merged.

        Raises:
          RuntimeError: with the regions, if not.
        """
        regions = sorted([*self.free_regions(), *self._lengths.items()])
        end = 0
        for start, length in regions:
            if start != end:
                raise RuntimeError(f"regions {regions} must tile 0..{self.size - 1}")
            end = start + length
        free = sum(length for _, length in self.free_regions())
        if end != self.size or free != self.num_free:
            raise RuntimeError(
                f"regions {regions} must tile 0..{self.size - 1} with {self.num_free} units free"
            )
