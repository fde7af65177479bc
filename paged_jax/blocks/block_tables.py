"""The tables of one block manager and what concerns one sequence: append, fork, trim, free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from paged_jax.blocks.block_moves import BlockCopy, BusyBlocks, FreedBlocks
from paged_jax.blocks.block_pool import BlockPool
from paged_jax.blocks.block_stats import BlockStats, MemoryUse, count_blocks
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.events import BlockEvent, Observer
from paged_jax.blocks.prefix_cache import PrefixCache, PrefixStats
from paged_jax.blocks.swap_space import SwapSpace


class BlockTables:
    """State of a ``BlockManager`` and its operations on a sequence that has a table.

    A class of its own only because one file would be too long to read; use ``BlockManager``.
    """

    __slots__ = (
        "_busy",
        "_cache",
        "_copies",
        "_host",
        "_num_pins",
        "_num_table_tokens",
        "_observer",
        "_pinned",
        "_pool",
        "_queries",
        "_step",
        "_tables",
        "block_size",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        free_blocks: Sequence[int] | None = None,
        num_host_blocks: int = 0,
        tracks_freed: bool = False,
        observer: Observer | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be >= 1")
        self._pool = BlockPool(num_blocks, free_blocks=free_blocks, tracks_freed=tracks_freed)
        self._cache = PrefixCache(self._pool, block_size=block_size)
        self._busy = BusyBlocks(self._pool)
        self._host = SwapSpace(num_host_blocks, tracks_freed=tracks_freed)
        self._observer = observer
        self.block_size = block_size
        self._tables: dict[int, BlockTable] = {}
        self._pinned: dict[int, BlockTable] = {}
        self._num_pins = 0
        self._step = 0
        # Filled positions of all tables, holes left out.
        self._num_table_tokens = 0
        self._copies: list[BlockCopy] = []
        self._queries = PrefixStats()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones that nobody holds."""
        return self._pool.num_free + len(self._pool.idle)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_usable

    @property
    def num_sequences(self) -> int:
        """Sequences that have a table on the device."""
        return len(self._tables)

    @property
    def num_free_next(self) -> int:
        """Blocks that can be handed out once the next step begins, if nothing else happens."""
        return self.num_free + len(self._busy.deferred)

    @property
    def num_swapped(self) -> int:
        """Sequences that are swapped out."""
        return len(self._host.tables)

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool, the one that is never used included; 0 without a host pool."""
        return self._host.pool.num_usable + 1 if self._host.pool else 0

    @property
    def num_free_host(self) -> int:
        """Host blocks that can be swapped to now."""
        return self._host.num_free

    @property
    def step_copies(self) -> tuple[BlockCopy, ...]:
        """All copies of this step so far: those that ``append`` returned and of ``allocate``."""
        return tuple(self._copies)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` token positions take."""
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """Start a step: the previous one's swaps and copies have been handed to the device."""
        self._step += 1
        if self._busy.busy:
            self._copies.clear()
            self._busy.end()
            self._host.end_step()

    def room(self, seq_id: int) -> int:
        """Tokens that ``append`` could give ``seq_id`` now."""
        table = self._table(seq_id)
        num_blocks = len(table.blocks) + self.num_free - self._needs_copy(table)
        return max(num_blocks * self.block_size - table.num_tokens, 0)

    def num_new_blocks(self, seq_id: int) -> int:
        """Free blocks that appending one token to ``seq_id`` takes: 0 or 1."""
        table = self._table(seq_id)
        return int(table.num_tokens % self.block_size == 0 or self._needs_copy(table))

    def num_new_blocks_for(self, seq_ids: Sequence[int]) -> int:
        """Free blocks that appending one token to each of these takes, one after the other.

        Of several that share a partly filled block and all write to it, the last one copies nothing
        if nobody else holds the block.

        Raises:
          ValueError: an id is unknown.
        """
        num_new = 0
        num_writers: Counter[int] = Counter()
        for seq_id in seq_ids:
            table = self._table(seq_id)
            if table.num_tokens % self.block_size == 0:
                num_new += 1
            elif self._pool.ref_counts[table.blocks[-1]] > 1:
                num_writers[table.blocks[-1]] += 1
        for block, count in num_writers.items():
            num_new += min(count, self._pool.ref_counts[block] - 1)
        return num_new

    def can_append(self, seq_id: int, *, num_tokens: int = 1) -> bool:
        """Whether ``num_tokens`` more tokens fit now."""
        return num_tokens <= self.room(seq_id)

    def append(self, seq_id: int, *, num_tokens: int = 1) -> tuple[BlockCopy, ...] | None:
        """Extend a table by ``num_tokens`` positions that this step writes.

        A partly filled last block that others share is replaced by a copy of its own first; one
        that is cached (after ``trim``) and has no other holder leaves the cache.

        Returns:
          The copies the device must do (none or one), or None when there is no room.

        Raises:
          ValueError: ``seq_id`` is unknown, ``num_tokens`` < 1, or the block to copy holds tokens
            of this very step, which a copy would read too early: call ``begin_step`` first.
        """
        table = self._table(seq_id)
        require_positive(num_tokens)
        end = table.num_tokens + num_tokens
        num_new = -(-end // self.block_size) - len(table.blocks)
        needs_copy = self._needs_copy(table)
        needed = num_new + needs_copy
        if needed and needed > self.num_free:
            return None
        copies: tuple[BlockCopy, ...] = ()
        if needs_copy:
            copies = (self._copy_on_write(seq_id, table),)
        elif table.num_tokens % self.block_size and self._pool.is_kept(table.blocks[-1]):
            self._forget(table.blocks[-1], "write")
        new_blocks: list[int] = []
        if num_new:
            new_blocks = self._take(num_new)
            table.extend(new_blocks)
        if table.write_step != self._step:
            table.write_step, table.num_written = self._step, table.num_tokens
        table.num_tokens = end
        self._num_table_tokens += num_tokens
        if self._observer is not None:
            kind = "allocate" if new_blocks else "fill"
            self._observer(BlockEvent(kind, "append", seq_id, new_blocks, (), end))
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give ``child_id`` the same blocks as ``parent_id``, holes too; nothing is copied yet.

        Raises:
          ValueError: the parent is unknown, or the child has a table already.
        """
        parent = self._table(parent_id)
        self._require_new("child_id", child_id)
        self._pool.share(parent.held)
        self._tables[child_id] = parent.copy()
        self._num_table_tokens += self._num_resident(parent)
        if self._observer is not None:
            self._observer(
                BlockEvent(
                    "share",
                    "fork",
                    child_id,
                    list(parent.blocks),
                    num_tokens=parent.num_tokens,
                    parent_id=parent_id,
                )
            )

    def trim(self, seq_id: int, *, num_tokens: int) -> None:
        """Give back the positions past the first ``num_tokens`` (at least one stays).

        Raises:
          ValueError: ``seq_id`` is unknown, or ``num_tokens`` is not in 1 .. its tokens, or ends
            within blocks that ``drop_before`` gave up.
        """
        table = self._table(seq_id)
        least = max(table.num_holes * self.block_size, 1)
        if not least <= num_tokens <= table.num_tokens:
            raise ValueError(f"num_tokens={num_tokens} must lie in {least}..{table.num_tokens}")
        self._num_table_tokens -= table.num_tokens - num_tokens
        removed = table.cut(self.blocks_for(num_tokens))
        self._busy.release(removed)
        table.trim(num_tokens, block_size=self.block_size)
        if self._observer is not None:
            self._observer(BlockEvent("release", "trim", seq_id, removed, (), num_tokens))

    def drop_before(self, seq_id: int, position: int) -> None:
        """Give up the blocks wholly before ``position``: no layer's window reaches them any more.

        Their entries become the null block. Cached ones stay cached until evicted.

        Raises:
          ValueError: ``seq_id`` is unknown, or ``position`` is not in 0 .. its tokens.
        """
        table = self._table(seq_id)
        if not 0 <= position <= table.num_tokens:
            raise ValueError(f"position={position} must lie in 0..{table.num_tokens}")
        dropped = table.drop(position // self.block_size)
        self._num_table_tokens -= len(dropped) * self.block_size
        self._busy.release(dropped)
        if dropped and self._observer is not None:
            self._observer(BlockEvent("release", "window", seq_id, dropped))

    def free(self, seq_id: int, *, reason: str = "free") -> None:
        """Drop a sequence's table, on the device or swapped out (the paper's free).

        Blocks that no other table holds become free, or stay cached until they are needed.

        Args:
          seq_id: whose table.
          reason: why, for the observer.

        Raises:
          ValueError: ``seq_id`` is unknown.
        """
        is_swapped = seq_id in self._host.tables
        if is_swapped:
            blocks = self._host.free(seq_id)
        else:
            table = self._table(seq_id)
            del self._tables[seq_id]
            self._num_table_tokens -= self._num_resident(table)
            blocks = table.held
            self._busy.release(blocks)
        if self._observer is not None:
            kind = "free_host" if is_swapped else "free"
            self._observer(BlockEvent(kind, reason, seq_id, blocks))

    def take_freed(self) -> FreedBlocks:
        """Blocks that have become free since the last call, some of them in use again by now.

        A device that clears them before it does anything else of the step clears nothing that is
        needed: what a copy or swap-out still reads becomes free with the next ``begin_step``.

        Raises:
          ValueError: made without ``tracks_freed``.
        """
        return FreedBlocks(self._pool.take_freed(), self._host.take_freed())

    def has_table(self, seq_id: int) -> bool:
        """Whether ``seq_id`` has a table on the device."""
        return seq_id in self._tables

    def is_swapped(self, seq_id: int) -> bool:
        """Whether ``seq_id`` is swapped out."""
        return seq_id in self._host.tables

    def num_tokens(self, seq_id: int) -> int:
        """Filled token positions of a sequence, those of this step and in holes included."""
        return self._table(seq_id).num_tokens

    def num_blocks(self, seq_id: int) -> int:
        """Entries of a sequence's table, holes included."""
        return len(self._table(seq_id).blocks)

    def num_held_blocks(self, seq_id: int) -> int:
        """Blocks that a sequence refers to: its entries, holes left out."""
        table = self._table(seq_id)
        return len(table.blocks) - table.num_holes

    def table_array(self, seq_id: int) -> np.ndarray:
        """A sequence's blocks in logical order: int32, a view that the next change may outdate."""
        return self._table(seq_id).array

    def ref_count(self, block: int) -> int:
        """References to a block, by tables and by moves of this step."""
        return self._pool.ref_counts[block]

    def stats(self) -> BlockStats:
        """Count what is used: O(sequences), or O(table entries) when blocks are shared."""
        return count_blocks(
            [*self._tables.values(), *self._pinned.values()],
            self._pool,
            block_size=self.block_size,
            num_tokens=self._num_table_tokens,
            deferred=self._busy.deferred,
        )

    def memory_use(self) -> MemoryUse:
        """Where the pool's positions are (paper, Fig. 2), in as many steps as ``stats``."""
        return self.stats().memory_use(self.block_size)

    def _table(self, seq_id: int) -> BlockTable:
        try:
            return self._tables[seq_id]
        except KeyError:
            message = f"seq_id={seq_id} must be one of the {len(self._tables)} with a table"
            raise ValueError(message) from None

    def _require_new(self, name: str, seq_id: int) -> None:
        table = self._tables.get(seq_id) or self._host.tables.get(seq_id)
        if table is not None:
            raise ValueError(f"{name}={seq_id} must be new, it has {table}")

    def _num_resident(self, table: BlockTable) -> int:
        return table.num_tokens - table.num_holes * self.block_size

    def _needs_copy(self, table: BlockTable) -> bool:
        is_partial = table.num_tokens % self.block_size != 0
        return is_partial and self._pool.ref_counts[table.blocks[-1]] > 1

    def _take(self, num_blocks: int) -> list[int]:
        while self._pool.num_free < num_blocks:
            forgotten = self._cache.evict()
            if self._observer is not None:
                self._observer(BlockEvent("evict", "room", blocks=forgotten))
        return self._pool.allocate(num_blocks)

    def _forget(self, block: int, reason: str) -> None:
        forgotten = self._cache.forget(block)
        if self._observer is not None:
            self._observer(BlockEvent("evict", reason, blocks=forgotten))

    def _copy(self, src: int) -> int:
        dst = self._take(1)[0]
        copy = BlockCopy(src, dst)
        self._copies.append(copy)
        self._busy.busy.update(copy)
        return dst

    def _copy_on_write(self, seq_id: int, table: BlockTable) -> BlockCopy:
        src = table.blocks[-1]
        if table.write_step == self._step:
            raise ValueError(
                f"seq_id={seq_id} must wait for the next step: it shares block {src}, which holds "
                f"tokens of step {self._step} that a copy would read before they are written"
            )
        dst = self._copy(src)
        table.replace(-1, dst)
        self._busy.release((src,))
        if self._observer is not None:
            self._observer(BlockEvent("copy", "write", seq_id, (src,), (dst,)))
        return self._copies[-1]


def require_positive(num_tokens: int) -> None:
    """Refuse a count below 1."""
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens} must be >= 1")
