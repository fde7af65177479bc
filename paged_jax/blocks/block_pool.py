"""Free list and reference counts of the pool's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids and counts who refers to them; knows nothing of their content.

    Block 0 is the null block: never allocated, never counted. Every operation is O(1) a block.

    >>> pool = BlockPool(4)
    >>> pool.allocate(2)
    [1, 2]
    >>> pool.share([2])
    >>> pool.release([1, 2])
    >>> pool.num_free, pool.ref_counts[2]
    (2, 1)

    Args:
      num_blocks: blocks of the pool, the null block included; at least 2.
      free_blocks: the order in which blocks are handed out while none has been released, a
        permutation of ``1 .. num_blocks - 1``; ascending by default.

    Attributes:
      ref_counts: references to each block, int [num_blocks]; read only.

    Raises:
      ValueError: there is no usable block, or ``free_blocks`` is not such a permutation.
    """

    __slots__ = ("_free", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int, *, free_blocks: Sequence[int] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be >= 2: block 0 is the null block")
        order = list(range(1, num_blocks)) if free_blocks is None else list(free_blocks)
        if sorted(order) != list(range(1, num_blocks)):
            raise ValueError(f"free_blocks={order} must be a permutation of 1..{num_blocks - 1}")
        self.num_blocks = num_blocks
        # A stack: the block released last is handed out first, so few pages of memory are touched.
        self._free = order[::-1]
        self.ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
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
        """Add one reference to each of ``blocks``.

        Raises:
          RuntimeError: a block is not allocated.
        """
        counts = self.ref_counts
        for block in blocks:
            if counts[block] < 1:
                raise RuntimeError(f"share of block {block}, which is free: {self._numbers()}")
            counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of ``blocks``; those without any become free.

        Raises:
          RuntimeError: a block is free already (a double free).
        """
        counts = self.ref_counts
        for block in blocks:
            count = counts[block] - 1
            if count < 0:
                raise RuntimeError(f"double free of block {block}: {self._numbers()}")
            counts[block] = count
            if count == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Prove that every block is either free or referenced, and none both.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        free = set(self._free)
        referenced = {block for block, count in enumerate(self.ref_counts) if count}
        if (
            len(free) != len(self._free)
            or free & referenced
            or NULL_BLOCK in free | referenced
            or len(free) + len(referenced) != self.num_usable
            or min(self.ref_counts) < 0
        ):
            raise RuntimeError(
                f"blocks lost or counted twice: {self._numbers()}, referenced={len(referenced)}, "
                f"in both={sorted(free & referenced)}"
            )

    def _numbers(self) -> str:
        return (
            f"free={len(self._free)}, usable={self.num_usable}, references={sum(self.ref_counts)}"
        )
