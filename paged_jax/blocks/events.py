"""What a block manager tells an observer: every change of who holds which blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Kind = Literal[
    "allocate",
    "fill",
    "share",
    "copy",
    "release",
    "free",
    "cache",
    "evict",
    "swap_out",
    "swap_in",
    "free_host",
    "reserve",
    "unreserve",
]


class BlockEvent(NamedTuple):
    """One change, told right after it was made; docs/events.md has the table of all kinds.

    ``BlockReplay`` is what they mean, as code: the tables, counts and cached blocks of a manager
    can be had from its events alone.

    Attributes:
      kind: what happened.
      reason: why.
      seq_id: the sequence whose table changed, or None.
      blocks: which blocks; of a move, those that are read.
      to: of a copy or swap, the block that each of ``blocks`` moves to.
      num_tokens: filled positions of the sequence from now on, those in holes included, or None.
      parent_id: the sequence that a fork came from, or None.
      pin_id: the registered prefix that a table became, or that was let go of, or None.
    """

    kind: Kind
    reason: str
    seq_id: int | None = None
    blocks: Sequence[int] = ()
    to: Sequence[int] = ()
    num_tokens: int | None = None
    parent_id: int | None = None
    pin_id: int | None = None


# Called in the order of the changes, from inside the manager: it must not call the manager.
Observer = Callable[[BlockEvent], None]
