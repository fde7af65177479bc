"""The pool as a seating plan: one cell a block, one letter and colour a request."""

from __future__ import annotations

import dataclasses
import string

from rich.text import Text

from paged_jax import Engine

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
FREE = "·"


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Who held which block at one moment.

    Attributes:
      num_usable: blocks of the pool, the null block left out.
      owners: block id to (request's number, positions filled).
      block_size: token positions a block.
    """

    num_usable: int
    owners: dict[int, tuple[int, int]]
    block_size: int


def take_snapshot(engine: Engine, numbers: dict[str, int]) -> PoolSnapshot:
    """Look at the block tables of the running sequences.

    Args:
      engine: between two steps.
      numbers: a number for each request id, which picks its letter and colour.
    """
    manager, size = engine.block_manager, engine.config.block_size
    owners = {}
    for sequence in engine.scheduler.running:
        number = numbers.get(str(sequence.request.request_id), 0)
        num_tokens = manager.num_tokens(sequence.seq_id)
        for index, block in enumerate(manager.table_array(sequence.seq_id).tolist()):
            owners[block] = (number, min(size, num_tokens - index * size))
    return PoolSnapshot(engine.num_blocks - 1, owners, size)


def draw(snapshot: PoolSnapshot, *, columns: int = 64) -> Text:
    """Draw a snapshot: a capital for a full block, a small letter for a partly filled one."""
    text = Text()
    for block in range(1, snapshot.num_usable + 1):
        if block in snapshot.owners:
            number, filled = snapshot.owners[block]
            letter = string.ascii_uppercase[number % 26]
            is_full = filled == snapshot.block_size
            text.append(letter if is_full else letter.lower(), COLOURS[number % len(COLOURS)])
        else:
            text.append(FREE, "dim")
        if block % columns == 0 and block < snapshot.num_usable:
            text.append("\n")
    return text
