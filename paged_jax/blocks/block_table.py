"""One sequence's block table, as a list for the host and an int32 array for the device."""

from __future__ import annotations

import numpy as np

_MIN_CAPACITY = 8


class BlockTable:
    """A sequence's physical blocks in logical order and its number of filled positions.

    The array is kept beside the list and grows by doubling, so a step copies a slice of it instead
    of converting the list.

    Attributes:
      blocks: block ids in logical order; change them by ``extend`` and the like only.
      num_tokens: filled positions, those that the current step writes included.
      write_step: the manager's step that last wrote to it.
      is_trimmed: whether positions were ever given back.
    """

    __slots__ = ("_buffer", "blocks", "is_trimmed", "num_tokens", "write_step")

    def __init__(self, blocks: list[int], *, num_tokens: int) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.write_step = -1
        self.is_trimmed = False
        self._buffer = np.zeros(max(len(blocks), _MIN_CAPACITY), np.int32)
        self._buffer[: len(blocks)] = blocks

    @property
    def array(self) -> np.ndarray:
        """The blocks as int32 [len(blocks)]: a view, outdated by the next change."""
        return self._buffer[: len(self.blocks)]

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

    def replace_last(self, block: int) -> int:
        """Put ``block`` in the place of the last one, which is returned."""
        old = self.blocks[-1]
        self.blocks[-1] = block
        self._buffer[len(self.blocks) - 1] = block
        return old

    def cut(self, num_blocks: int) -> list[int]:
        """Remove and return the blocks past the first ``num_blocks``."""
        removed = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        return removed

    def copy(self) -> BlockTable:
        """An equal table that changes on its own."""
        twin = BlockTable(list(self.blocks), num_tokens=self.num_tokens)
        twin.write_step = self.write_step
        twin.is_trimmed = self.is_trimmed
        return twin

    def __repr__(self) -> str:
        return f"BlockTable(blocks={self.blocks}, num_tokens={self.num_tokens})"
