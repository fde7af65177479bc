"""Block tables of sequences: allocate, append, fork, free, with copy-on-write (paper section 4)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.blocks.block_pool import BlockPool
from paged_jax.blocks.block_table import BlockTable


class BlockCopy(NamedTuple):
    """All layers of block ``src`` are to be copied into block ``dst`` before the step's writes."""

    src: int
    dst: int


class _Holding(NamedTuple):
    """How one table sees a block: its place, the positions filled, whether it saw more before."""

    place: int
    filled: int
    is_trimmed: bool

    def agrees_with(self, other: _Holding) -> bool:
        same_filled = self.filled == other.filled or self.is_trimmed or other.is_trimmed
        return self.place == other.place and same_filled


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStats:
    """How the pool is used, in blocks and token positions.

    Attributes:
      total: usable blocks.
      used: blocks that a table (or a copy of this step) holds.
      free: blocks that can be handed out now.
      filled: distinct token positions that hold, or are about to hold, a token.
      waste: positions of used blocks that hold none.
      saved: blocks that sharing saves: entries of all tables less distinct blocks.
    """

    total: int
    used: int
    free: int
    filled: int
    waste: int
    saved: int


class BlockManager:
    """Owns the block table of every running sequence; sees ids and token counts, never tokens.

    "No room" is a value: ``allocate`` returns False and ``append`` returns None, and nothing has
    changed. Copies that ``append`` returns belong to the current step; the device does them before
    the step's writes. ``begin_step`` starts a new one.

    The paper's Fig. 8 with blocks of 4: two samples share a prompt of 7 tokens, then each appends:

    >>> manager = BlockManager(num_blocks=8, block_size=4)
    >>> manager.allocate(0, num_tokens=7)
    True
    >>> manager.fork(0, 1)
    >>> manager.begin_step()
    >>> manager.append(0, num_tokens=1)  # block 2 is shared: the writer gets its own copy
    (BlockCopy(src=2, dst=3),)
    >>> manager.append(1, num_tokens=1)  # the last holder writes in place
    ()
    >>> manager.table_array(0).tolist(), manager.table_array(1).tolist()
    ([1, 3], [1, 2])

    Args:
      num_blocks: blocks of the pool, the null block included.
      block_size: token positions a block (S).
      free_blocks: see ``BlockPool``.

    Raises:
      ValueError: ``block_size`` < 1, or as ``BlockPool``.
    """

    __slots__ = (
        "_copied",
        "_copies",
        "_deferred",
        "_num_table_tokens",
        "_pool",
        "_step",
        "_tables",
        "block_size",
    )

    def __init__(
        self, *, num_blocks: int, block_size: int, free_blocks: Sequence[int] | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be >= 1")
        self._pool = BlockPool(num_blocks, free_blocks=free_blocks)
        self.block_size = block_size
        self._tables: dict[int, BlockTable] = {}
        self._step = 0
        self._num_table_tokens = 0
        # This step's copies, the blocks that they read or write, and those of them that were given
        # up since: these keep a reference until the next step, lest another copy meets them.
        self._copies: list[BlockCopy] = []
        self._copied: set[int] = set()
        self._deferred: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_usable

    @property
    def num_sequences(self) -> int:
        """Sequences that have a table."""
        return len(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` token positions take."""
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """Start a step: the previous one's copies have been handed to the device."""
        self._step += 1
        if self._copies:
            self._copies.clear()
            self._copied.clear()
            self._pool.release(self._deferred)
            self._deferred.clear()

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens fits now."""
        return self.blocks_for(num_tokens) <= self._pool.num_free

    def allocate(self, seq_id: int, *, num_tokens: int) -> bool:
        """Give a new sequence a table with room for ``num_tokens`` tokens; False when none is left.

        Raises:
          ValueError: ``seq_id`` has a table already, or ``num_tokens`` < 1.
        """
        if seq_id in self._tables:
            raise ValueError(f"seq_id={seq_id} must be new, it has {self._tables[seq_id]}")
        _require_positive(num_tokens)
        num_blocks = self.blocks_for(num_tokens)
        if num_blocks > self._pool.num_free:
            return False
        table = BlockTable(self._pool.allocate(num_blocks), num_tokens=num_tokens)
        table.write_step = self._step
        self._tables[seq_id] = table
        self._num_table_tokens += num_tokens
        return True

    def room(self, seq_id: int) -> int:
        """Tokens that ``append`` could give ``seq_id`` now."""
        table = self._table(seq_id)
        num_blocks = len(table.blocks) + self._pool.num_free - self._needs_copy(table)
        return max(num_blocks * self.block_size - table.num_tokens, 0)

    def num_new_blocks(self, seq_id: int) -> int:
        """Free blocks that appending one token to ``seq_id`` takes: 0 or 1."""
        table = self._table(seq_id)
        return int(table.num_tokens % self.block_size == 0 or self._needs_copy(table))

    def can_append(self, seq_id: int, *, num_tokens: int = 1) -> bool:
        """Whether ``num_tokens`` more tokens fit now."""
        return num_tokens <= self.room(seq_id)

    def append(self, seq_id: int, *, num_tokens: int = 1) -> tuple[BlockCopy, ...] | None:
        """Extend a table by ``num_tokens`` positions that this step writes.

        A partly filled last block that others share is replaced by a copy of its own first.

        Returns:
          The copies the device must do (none or one), or None when there is no room.

        Raises:
          ValueError: ``seq_id`` is unknown, ``num_tokens`` < 1, or the block to copy holds tokens
            of this very step, which a copy would read too early: call ``begin_step`` first.
        """
        table = self._table(seq_id)
        _require_positive(num_tokens)
        end = table.num_tokens + num_tokens
        needs_copy = self._needs_copy(table)
        num_new = -(-end // self.block_size) - len(table.blocks)
        if num_new + needs_copy > self._pool.num_free:
            return None
        copies = (self._copy_on_write(seq_id, table),) if needs_copy else ()
        if num_new:
            table.extend(self._pool.allocate(num_new))
        table.num_tokens = end
        table.write_step = self._step
        self._num_table_tokens += num_tokens
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give ``child_id`` the same blocks as ``parent_id``; nothing is copied yet.

        Raises:
          ValueError: the parent is unknown, or the child has a table already.
        """
        parent = self._table(parent_id)
        if child_id in self._tables:
            raise ValueError(f"child_id={child_id} must be new, it has {self._tables[child_id]}")
        self._pool.share(parent.blocks)
        self._tables[child_id] = parent.copy()
        self._num_table_tokens += parent.num_tokens

    def trim(self, seq_id: int, *, num_tokens: int) -> None:
        """Give back the positions past the first ``num_tokens`` (at least one stays).

        Raises:
          ValueError: ``seq_id`` is unknown, or ``num_tokens`` is not in 1 .. its tokens.
        """
        table = self._table(seq_id)
        if not 1 <= num_tokens <= table.num_tokens:
            raise ValueError(f"num_tokens={num_tokens} must lie in 1..{table.num_tokens}")
        self._num_table_tokens -= table.num_tokens - num_tokens
        self._release(table.cut(self.blocks_for(num_tokens)))
        table.is_trimmed = table.is_trimmed or num_tokens < table.num_tokens
        table.num_tokens = num_tokens

    def free(self, seq_id: int) -> None:
        """Drop a sequence's table; blocks that no other table holds become free (the paper's free).

        Raises:
          ValueError: ``seq_id`` is unknown.
        """
        table = self._table(seq_id)
        del self._tables[seq_id]
        self._num_table_tokens -= table.num_tokens
        self._release(table.blocks)

    def has_table(self, seq_id: int) -> bool:
        """Whether ``seq_id`` has a table."""
        return seq_id in self._tables

    def num_tokens(self, seq_id: int) -> int:
        """Filled token positions of a sequence, those of this step included."""
        return self._table(seq_id).num_tokens

    def num_blocks(self, seq_id: int) -> int:
        """Entries of a sequence's table."""
        return len(self._table(seq_id).blocks)

    def table_array(self, seq_id: int) -> np.ndarray:
        """A sequence's blocks in logical order: int32, a view that the next change may outdate."""
        return self._table(seq_id).array

    def stats(self) -> BlockStats:
        """Count what is used: O(sequences), or O(table entries) when blocks are shared."""
        pool = self._pool
        used = pool.num_usable - pool.num_free
        held = used - len(self._deferred)
        saved = sum(len(table.blocks) for table in self._tables.values()) - held
        filled = self._num_table_tokens if saved == 0 else sum(self._filled_by_block().values())
        return BlockStats(
            total=pool.num_usable,
            used=used,
            free=pool.num_free,
            filled=filled,
            waste=held * self.block_size - filled,
            saved=saved,
        )

    def check_integrity(self) -> None:
        """Prove that tables, reference counts and the free list agree.

        Every count equals the number of tables that hold the block; tables are exactly as long as
        their tokens need; all holders of a shared block see the same positions filled, so nobody
        wrote to it alone (only ``trim`` lets a holder see fewer); nothing free, or given up while
        a copy reads it, is in a table; no block is both source and destination of copies.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        self._pool.check_integrity()
        references: Counter[int] = Counter(self._deferred)
        holders: dict[int, _Holding] = {}
        for seq_id, table in self._tables.items():
            references.update(table.blocks)
            _check(
                len(table.blocks) == self.blocks_for(table.num_tokens) >= 1
                and table.array.tolist() == table.blocks,
                f"seq_id={seq_id}: {table} with array {table.array} and blocks of "
                f"{self.block_size}",
            )
            for place, block in enumerate(table.blocks):
                filled = min(table.num_tokens - place * self.block_size, self.block_size)
                here = _Holding(place, filled, table.is_trimmed)
                other = holders.setdefault(block, here)
                if not here.agrees_with(other):
                    raise RuntimeError(
                        f"block {block} of seq_id={seq_id} is {here}, of another sequence it is "
                        f"{other}: somebody wrote to a shared block"
                    )
        counts = {block: count for block, count in enumerate(self._pool.ref_counts) if count}
        _check(
            counts == references,
            f"reference counts {counts} differ from the holders {dict(references)}",
        )
        _check(
            holders.keys().isdisjoint(self._deferred) and self._copied.issuperset(self._deferred),
            f"deferred {self._deferred} must be copied blocks {self._copied} that no table holds",
        )
        num_tokens = sum(table.num_tokens for table in self._tables.values())
        _check(
            num_tokens == self._num_table_tokens,
            f"tables hold {num_tokens} tokens, counted {self._num_table_tokens}",
        )
        self._check_copies()

    def _check_copies(self) -> None:
        sources = {copy.src for copy in self._copies}
        destinations = [copy.dst for copy in self._copies]
        _check(
            sources.isdisjoint(destinations)
            and len(set(destinations)) == len(destinations)
            and self._copied == sources.union(destinations)
            and all(self._pool.ref_counts[block] for block in self._copied),
            f"copies {self._copies} of one step overlap, or use a free block",
        )

    def _table(self, seq_id: int) -> BlockTable:
        try:
            return self._tables[seq_id]
        except KeyError:
            message = f"seq_id={seq_id} must be one of the {len(self._tables)} with a table"
            raise ValueError(message) from None

    def _needs_copy(self, table: BlockTable) -> bool:
        is_partial = table.num_tokens % self.block_size != 0
        return is_partial and self._pool.ref_counts[table.blocks[-1]] > 1

    def _copy_on_write(self, seq_id: int, table: BlockTable) -> BlockCopy:
        src = table.blocks[-1]
        if table.write_step == self._step:
            raise ValueError(
                f"seq_id={seq_id} must wait for the next step: it shares block {src}, which holds "
                f"tokens of step {self._step} that a copy would read before they are written"
            )
        dst = self._pool.allocate(1)[0]
        table.replace_last(dst)
        copy = BlockCopy(src, dst)
        self._copies.append(copy)
        self._copied.update(copy)
        self._release((src,))
        return copy

    def _release(self, blocks: Iterable[int]) -> None:
        if self._copied:
            held = [b for b in blocks if b in self._copied and self._pool.ref_counts[b] == 1]
            self._deferred.extend(held)
            blocks = [block for block in blocks if block not in held]
        self._pool.release(blocks)

    def _filled_by_block(self) -> dict[int, int]:
        filled: dict[int, int] = {}
        for table in self._tables.values():
            for place, block in enumerate(table.blocks):
                here = min(table.num_tokens - place * self.block_size, self.block_size)
                filled[block] = max(filled.get(block, 0), here)
        return filled


def _require_positive(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens} must be >= 1")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
