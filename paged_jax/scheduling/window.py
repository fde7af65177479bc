"""What a sequence still needs when all layers have windows, and how many blocks that is."""

from __future__ import annotations

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.sequence import Sequence


def first_needed(num_computed: int, window: int | None) -> int:
    """First position that the query at position ``num_computed``, or a later one, attends to."""
    return 0 if window is None else max(num_computed + 1 - window, 0)


def most_blocks(num_tokens: int, window: int | None, block_size: int) -> int:
    """Blocks that a sequence of up to ``num_tokens`` tokens holds at most as it grows by one token.

    Of ``window`` consecutive positions, wherever they begin in a block. A chunk of a prompt takes
    more for its step, but only what is free: all but this comes back before the next step's rows.

    >>> most_blocks(5, None, 4), most_blocks(5, 6, 4), most_blocks(1000, 6, 4)
    (2, 2, 3)
    """
    num_blocks = -(-num_tokens // block_size)
    if window is None:
        return num_blocks
    return min(num_blocks, (window + 2 * block_size - 2) // block_size)


def drop_past_window(sequence: Sequence, window: int, manager: BlockManager) -> None:
    """Give up the blocks that no row planned from now on reads.

    For the start of a step: rows that are in flight have their tables already, and read before
    whatever this step writes.
    """
    manager.drop_before(sequence.seq_id, first_needed(sequence.num_computed, window))
