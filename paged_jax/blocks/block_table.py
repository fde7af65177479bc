"""One sequence's block table, as a list for the host and an int32 array for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_jax.blocks.prefix_cache import CachedNode

_MIN_CAPACITY = 8


class BlockTable:
    """A sequence's physical blocks in logical order and its number of filled positions.

    The array is kept beside the list and grows by doubling, so a step copies a slice of it instead
    of converting the list.

    Attributes:
      blocks: block ids in logical order; change them by ``extend`` and the like only.
      num_tokens: filled positions, those that the current step writes included.
      num_holes: leading entries that were given up and are the null block.
      write_step: the manager's step that last wrote to it.
      num_written: filled positions before that step.
      swap_step: the manager's step that last brought it from the host.
      is_trimmed: whether positions were ever given back.
      node: the prefix cache's node of its last published block, or None.
    """

    __slots__ = (
        "_buffer",
        "blocks",
        "is_trimmed",
        "node",
        "num_holes",
        "num_tokens",
        "num_written",
        "swap_step",
        "write_step",
    )

    def __init__(self, blocks: list[int], *, num_tokens: int) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.num_holes = 0
        self.write_step = -1
        self.num_written = 0
        self.swap_step = -1
        self.is_trimmed = False
        self.node: CachedNode | None = None
        self._buffer = np.zeros(max(len(blocks), _MIN_CAPACITY), np.int32)
        self._buffer[: len(blocks)] = blocks

    @property
    def array(self) -> np.ndarray:
        """The blocks as int32 [len(blocks)]: a view, outdated by the next change."""
        return self._buffer[: len(self.blocks)]

    @property
    def held(self) -> Sequence[int]:
        """The blocks that it refers to: all but the holes."""
        return self.blocks[self.num_holes :] if self.num_holes else self.blocks

    def extend(self, new_blocks: list[int]) -> None:
        """Add blocks at the end."""
        begin = len(self.blocks)
        self.blocks.extend(new_blocks)
        end = len(self.blocks)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), np.int32)
            grown[:begin] = self._buffer[:begin]
            self._buffer = grown
        if end == begin + 1:
            self._buffer[begin] = new_blocks[0]
        else:
            self._buffer[begin:end] = new_blocks

    def replace(self, place: int, block: int) -> int:
        """Put ``block`` at ``place``; returns the one that was there."""
        old = self.blocks[place]
        self.blocks[place] = block
        self.array[place] = block
        return old

    def cut(self, num_blocks: int) -> list[int]:
        """Remove and return the blocks past the first ``num_blocks``."""
        removed = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        return removed

    def trim(self, num_tokens: int, *, block_size: int) -> None:
        """Forget the positions past ``num_tokens``; their blocks were cut before."""
        self.is_trimmed = self.is_trimmed or num_tokens < self.num_tokens
        self.num_tokens = num_tokens
        self.num_written = min(self.num_written, num_tokens)
        while self.node is not None and self.node.depth * block_size > num_tokens:
            self.node = self.node.parent

    def drop(self, num_holes: int) -> list[int]:
        """Turn the first ``num_holes`` entries into holes; returns the blocks that became so."""
        removed = self.blocks[self.num_holes : num_holes]
        self.blocks[self.num_holes : num_holes] = [0] * len(removed)
        self._buffer[self.num_holes : num_holes] = 0
        self.num_holes += len(removed)
        return removed

    def copy(self, blocks: list[int] | None = None) -> BlockTable:
        """An equal table that changes on its own, in other ``blocks`` if given."""
        twin = BlockTable(list(self.blocks) if blocks is None else blocks, num_tokens=0)
        for name in self.__slots__:
            if name not in ("_buffer", "blocks"):
                setattr(twin, name, getattr(self, name))
        return twin

    def __repr__(self) -> str:
        return f"BlockTable(blocks={self.blocks}, num_tokens={self.num_tokens})"
