"""What the device must do with whole blocks in a step, and which blocks that keeps busy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paged_jax.blocks.block_pool import BlockPool


class BlockCopy(NamedTuple):
    """All layers of block ``src`` are to be copied into block ``dst`` before the step's writes."""

    src: int
    dst: int


class BlockSwap(NamedTuple):
    """All layers of a block move between ``device`` and ``host`` pool, before the step's copies."""

    device: int
    host: int


class FreedBlocks(NamedTuple):
    """Blocks of the device pool and of the host pool that have become free."""

    device: list[int]
    host: list[int]


class BusyBlocks:
    """The blocks of one pool that this step's copies and swaps read or write.

    A busy block keeps a reference until the step is over, so that it is not handed out again while
    a move still reads or writes it.

    Attributes:
      busy: those blocks.
      deferred: the busy blocks that nobody else may refer to any more.
    """

    __slots__ = ("_pool", "busy", "deferred")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.busy: set[int] = set()
        self.deferred: list[int] = []

    def hold(self, block: int) -> None:
        """Mark ``block`` as busy, with a reference of its own if it is idle."""
        if self._pool.ref_counts[block] == 0:
            self._pool.share((block,))
            self.deferred.append(block)
        self.busy.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each of ``blocks``; the last one to a busy block goes at the end."""
        if self.busy:
            counts, now = self._pool.ref_counts, []
            for block in blocks:
                is_last = counts[block] == 1 and block in self.busy
                (self.deferred if is_last else now).append(block)
            blocks = now
        self._pool.release(blocks)

    def end(self) -> None:
        """The step's moves are done."""
        self.busy.clear()
        self._pool.release(self.deferred)
        self.deferred.clear()
