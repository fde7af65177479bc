"""Free list, reference counts and kept blocks of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids and counts who refers to them; knows nothing of their content.

    Block 0 is the null block: never allocated, never counted. A block is free, referenced, or idle:
    *kept* (the prefix cache wants its content) while nobody refers to it. Every operation is O(1)
    a block.

    >>> pool = BlockPool(4)
    >>> pool.allocate(2)
    [1, 2]
    >>> pool.share([2])
    >>> pool.release([1, 2])
    >>> pool.num_free, pool.ref_counts[2]
    (2, 1)
    >>> pool.keep(2)
    >>> pool.release([2])
    >>> pool.num_free, list(pool.idle)
    (2, [2])

    Args:
      num_blocks: blocks of the pool, the null block included; at least 2.
      free_blocks: the order in which blocks are handed out while none has been released, a
        permutation of ``1 .. num_blocks - 1``; ascending by default.
      tracks_freed: remember which blocks become free, for ``take_freed``.

    Attributes:
      ref_counts: references to each block, int [num_blocks]; read only.
      idle: kept blocks without references, longest idle first; of one release, the last first.

    Raises:
      ValueError: there is no usable block, or ``free_blocks`` is not such a permutation.
    """

    __slots__ = ("_free", "_freed", "_kept", "idle", "num_blocks", "ref_counts")

    def __init__(
        self,
        num_blocks: int,
        *,
        free_blocks: Sequence[int] | None = None,
        tracks_freed: bool = False,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be >= 2: block 0 is the null block")
        order = list(range(1, num_blocks)) if free_blocks is None else list(free_blocks)
        if sorted(order) != list(range(1, num_blocks)):
            raise ValueError(f"free_blocks={order} must be a permutation of 1..{num_blocks - 1}")
        self.num_blocks = num_blocks
        # A stack: the block released last is handed out first, so few pages of memory are touched.
        self._free = order[::-1]
        self._freed: dict[int, None] | None = {} if tracks_freed else None
        self._kept: set[int] = set()
        self.idle: dict[int, None] = {}
        self.ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to and nobody wants kept."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` free blocks, one reference each.

        Raises:
          RuntimeError: fewer are free; ask ``num_free`` first.
        """
        if num_blocks > len(self._free):
            raise RuntimeError(
                f"{num_blocks} blocks asked, {len(self._free)} of {self.num_usable} free"
            )
        if num_blocks == 1:
            block = self._free.pop()
            self.ref_counts[block] = 1
            return [block]
        blocks = self._free[: -num_blocks - 1 : -1]
        del self._free[len(self._free) - num_blocks :]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, idle ones included.

        Raises:
          RuntimeError: a block is free.
        """
        counts = self.ref_counts
        for block in blocks:
            if counts[block] < 1:
                if block not in self.idle:
                    raise RuntimeError(f"share of block {block}, which is free: {self._numbers()}")
                del self.idle[block]
            counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of ``blocks``; those without any become free, or idle if kept.

        Raises:
          RuntimeError: a block is free already (a double free).
        """
        counts, num_free = self.ref_counts, len(self._free)
        fell_idle: list[int] = []
        for block in blocks:
            count = counts[block] - 1
            if count < 0:
                raise RuntimeError(f"double free of block {block}: {self._numbers()}")
            counts[block] = count
            if count == 0:
                (fell_idle if block in self._kept else self._free).append(block)
        if fell_idle:
            # A table's last block is the first to be evicted.
            self.idle.update(dict.fromkeys(reversed(fell_idle)))
        if self._freed is not None:
            self._freed.update(dict.fromkeys(self._free[num_free:]))

    def keep(self, block: int) -> None:
        """Let ``block`` become idle, not free, once its last reference goes.

        Raises:
          RuntimeError: it has no reference, or is kept already.
        """
        if self.ref_counts[block] < 1 or block in self._kept:
            raise RuntimeError(
                f"keep of block {block} with {self.ref_counts[block]} references, "
                f"kept={block in self._kept}: {self._numbers()}"
            )
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """No longer keep ``block``: free at once if it is idle.

        Raises:
          RuntimeError: it is not kept.
        """
        if block not in self._kept:
            raise RuntimeError(f"unkeep of block {block}, not kept: {self._numbers()}")
        self._kept.remove(block)
        if block in self.idle:
            del self.idle[block]
            self._free.append(block)
            if self._freed is not None:
                self._freed[block] = None

    def take_freed(self) -> list[int]:
        """Blocks that have become free since the last call, each once; some may be taken again.

        Raises:
          ValueError: the pool was made without ``tracks_freed``.
        """
        if self._freed is None:
            raise ValueError("tracks_freed=False must be True when the pool is made")
        freed = list(self._freed)
        self._freed.clear()
        return freed

    def is_kept(self, block: int) -> bool:
        """Whether ``block`` will be, or is, idle rather than free when nobody refers to it."""
        return block in self._kept

    def check_integrity(self) -> None:
        """Prove that every block is exactly one of free, idle and referenced.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        free, idle = set(self._free), set(self.idle)
        referenced = {block for block, count in enumerate(self.ref_counts) if count}
        if (
            len(free) != len(self._free)
            or free & referenced
            or idle & (free | referenced)
            or free & self._kept
            or not idle <= self._kept
            or NULL_BLOCK in free | referenced | self._kept
            or len(free) + len(referenced) + len(idle) != self.num_usable
            or min(self.ref_counts) < 0
        ):
            raise RuntimeError(
                f"blocks lost or counted twice: {self._numbers()}, referenced={len(referenced)}, "
                f"in both={sorted(free & referenced)}, idle={sorted(idle)}, "
                f"kept={sorted(self._kept)}"
            )

    def _numbers(self) -> str:
        return (
            f"free={len(self._free)}, usable={self.num_usable}, "
            f"references={sum(self.ref_counts)}, idle={len(self.idle)}"
        )
