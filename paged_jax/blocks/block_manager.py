"""Block tables of sequences: allocate, append, fork, free, with copy-on-write (paper section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paged_jax.blocks.block_moves import BlockCopy, BlockSwap
from paged_jax.blocks.block_stats import BlockStats, check_copies, check_tables
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.block_tables import BlockTables, require_positive
from paged_jax.blocks.demand import Demand
from paged_jax.blocks.events import BlockEvent
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import PrefixMatch, PrefixStats
from paged_jax.blocks.publishing import publish, publish_whole
from paged_jax.blocks.swap_space import distinct_blocks, move_tables

__all__ = ["BlockCopy", "BlockManager", "BlockStats", "BlockSwap"]


class BlockManager(BlockTables):
    """Owns the block table of every sequence: who holds which blocks, and what is cached of them.

    "No room" is a value: ``allocate`` returns False and ``append``, ``swap_out`` and ``swap_in``
    return None, and nothing has changed. The device does a step's swap-outs, swap-ins, copies and
    writes in this order; ``begin_step`` starts a new step.

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
      num_host_blocks: blocks of the host pool that ``swap_out`` moves to, its block 0, which is
        never used, included; 0: no host pool.
      tracks_freed: remember which blocks become free, for ``take_freed``.
      observer: called with every ``BlockEvent``, in order; it must not call the manager.

    Raises:
      ValueError: ``block_size`` < 1, ``num_host_blocks`` is 1 or < 0, or as ``BlockPool``.
    """

    __slots__ = ()

    @property
    def shares(self) -> bool:
        """Whether a fork shares its parent's blocks."""
        return True

    def require_fits(self, demand: Demand) -> None:
        """Refuse a sequence group that could never start; here the scheduler's limits say that."""

    def can_admit(self, demand: Demand, *, num_blocks: int) -> bool:
        """Whether a group of sequences may start, for which ``num_blocks`` must be free now."""
        return num_blocks <= self.num_free

    def can_allocate(self, num_tokens: int, *, prefix: PrefixMatch | None = None) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens fits now, given what it shares.

        Raises:
          ValueError: ``prefix`` is out of date.
        """
        num_blocks = self.blocks_for(num_tokens)
        if prefix is not None:
            num_blocks -= self.num_held_of(prefix)
        return num_blocks <= self.num_free

    def room_for_new(self, prefix: PrefixMatch | None = None) -> int:
        """Tokens that a new sequence could have now, besides those of its ``prefix``.

        Raises:
          ValueError: ``prefix`` is out of date.
        """
        if prefix is None:
            return self.num_free * self.block_size
        num_blocks = self.num_free + self.num_held_of(prefix)
        return max(num_blocks * self.block_size - prefix.num_tokens, 0)

    def num_held_of(self, prefix: PrefixMatch) -> int:
        """Full blocks of ``prefix`` that somebody holds: sharing them takes no free ones.

        Raises:
          ValueError: ``prefix`` is out of date.
        """
        self._cache.require_current(prefix)
        return sum(block not in self._pool.idle for block in prefix.blocks)

    def allocate(
        self,
        seq_id: int,
        *,
        num_tokens: int,
        prefix: PrefixMatch | None = None,
        demand: Demand | None = None,
    ) -> bool:
        """Give a new sequence a table with room for ``num_tokens`` tokens; False when none is left.

        With a ``prefix``, its full blocks are shared and its partial one is copied (see
        ``step_copies``); this step writes the positions from ``prefix.num_tokens`` on. That never
        takes more room than without. A ``demand`` changes nothing: blocks come as they are needed.

        Raises:
          ValueError: ``seq_id`` has a table already, ``num_tokens`` < 1 or not above
            ``prefix.num_tokens``, or ``prefix`` is out of date: look up right before.
        """
        self._require_new("seq_id", seq_id)
        require_positive(num_tokens)
        if prefix is not None and num_tokens <= prefix.num_tokens:
            message = f"num_tokens={num_tokens} must be > prefix.num_tokens={prefix.num_tokens}"
            raise ValueError(message)
        if not self.can_allocate(num_tokens, prefix=prefix):
            return False
        blocks = [] if prefix is None else self._share_prefix(seq_id, prefix, num_tokens)
        new_blocks = self._take(self.blocks_for(num_tokens) - len(blocks))
        table = BlockTable(blocks + new_blocks, num_tokens=num_tokens)
        table.write_step = self._step
        if prefix is not None:
            table.num_written = prefix.num_tokens
            table.node = self._cache.node_of(prefix.blocks[-1]) if prefix.blocks else None
            self._queries = self._queries.count(prefix)
        self._tables[seq_id] = table
        self._num_table_tokens += num_tokens
        if self._observer is not None:
            self._observer(BlockEvent("allocate", "new", seq_id, new_blocks, (), num_tokens))
        return True

    def lookup(self, namespace: Namespace, token_ids: Sequence[int]) -> PrefixMatch:
        """Find what is cached of a prompt, for ``allocate``; its last token is never included.

        Raises:
          ValueError: ``token_ids`` is empty.
        """
        return self._cache.lookup(namespace, token_ids)

    def publish(
        self, seq_id: int, namespace: Namespace, token_ids: Sequence[int], *, begin: int = 0
    ) -> int:
        """Let others find a sequence's full blocks; call it once the step that wrote them is over.

        Content that is cached already stays in the block that was first.

        Args:
          seq_id: whose blocks.
          namespace: the same at each call for this sequence.
          token_ids: its tokens at positions ``begin``, ``begin + 1``, ...
          begin: a multiple of the block size, up to ``num_published``.

        Returns:
          ``num_published``.

        Raises:
          ValueError: ``seq_id`` is unknown, ``begin`` or ``namespace`` is not such, the tokens go
            past the positions that earlier steps wrote, or contradict what is cached.
        """
        table = self._table(seq_id)
        _require_written(table, begin + len(token_ids), self._step)
        before = self._cache.next_id
        num_published = publish(
            table, self._cache, namespace, token_ids, begin=begin, block_size=self.block_size
        )
        self._tell_cached("publish", seq_id, before)
        return num_published

    def num_published(self, seq_id: int) -> int:
        """Leading positions of a sequence whose tokens are cached, in its blocks or in others'."""
        node = self._table(seq_id).node
        return node.depth * self.block_size if node and node.is_cached else 0

    def pin(self, seq_id: int, namespace: Namespace, token_ids: Sequence[int]) -> int:
        """Turn a sequence into a registered prefix (paper section 4.4), resident until ``unpin``.

        ``lookup`` finds it like any other content, its partly filled last block too. The sequence
        has no table any more.

        Args:
          seq_id: a sequence that holds the prefix and no more.
          namespace: who may share it.
          token_ids: all its tokens.

        Returns:
          An id for ``unpin``.

        Raises:
          ValueError: as ``publish``, or ``token_ids`` are not as many as the sequence holds, or it
            has holes, or gave back positions of a block that others still hold.
        """
        table = self._table(seq_id)
        if len(token_ids) != table.num_tokens or table.num_holes:
            raise ValueError(
                f"token_ids has {len(token_ids)} tokens, it must have the {table.num_tokens} of "
                f"seq_id={seq_id}, which must have no holes (it has {table.num_holes})"
            )
        _require_written(table, len(token_ids), self._step)
        before = self._cache.next_id
        replaced = publish_whole(
            table, self._cache, self._pool, namespace, token_ids, block_size=self.block_size
        )
        self._busy.release(replaced)
        del self._tables[seq_id]
        self._num_pins += 1
        self._pinned[self._num_pins] = table
        self._tell_cached("pin", seq_id, before)
        if self._observer is not None:
            blocks, num_tokens = list(table.blocks), table.num_tokens
            self._observer(
                BlockEvent("share", "pin", seq_id, blocks, (), num_tokens, None, self._num_pins)
            )
            if replaced:
                self._observer(BlockEvent("release", "pin", blocks=replaced))
        return self._num_pins

    def unpin(self, pin_id: int) -> None:
        """Let go of a registered prefix; it stays cached until its blocks are needed.

        Raises:
          ValueError: ``pin_id`` is unknown.
        """
        if pin_id not in self._pinned:
            raise ValueError(f"pin_id={pin_id} must be one of {sorted(self._pinned)}")
        table = self._pinned.pop(pin_id)
        self._num_table_tokens -= table.num_tokens
        self._busy.release(table.held)
        if self._observer is not None:
            self._observer(BlockEvent("release", "unpin", blocks=table.held, pin_id=pin_id))

    def num_distinct_blocks(self, seq_ids: Sequence[int]) -> int:
        """Host blocks that swapping these sequences out takes: the distinct ones that they hold."""
        return len(distinct_blocks([self._table(seq_id) for seq_id in seq_ids]))

    @property
    def num_pinned(self) -> int:
        """Registered prefixes."""
        return len(self._pinned)

    @property
    def pinned_blocks(self) -> frozenset[int]:
        """The blocks of all registered prefixes, which nobody else can be given."""
        return frozenset(distinct_blocks(list(self._pinned.values())))

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host pool has room for these sequences now."""
        return self._host.has_room(self.num_distinct_blocks(seq_ids))

    def swap_out(self, seq_ids: Sequence[int]) -> tuple[BlockSwap, ...] | None:
        """Move a whole sequence group to the host pool; what its members share is moved once.

        Blocks that others hold too stay with them. The group's own blocks can be handed out from
        the next step on.

        Returns:
          What the device must move before anything else of this step; None: no room on the host.

        Raises:
          ValueError: an id is unknown or named twice, or its blocks are written by this very step.
        """
        tables = [self._table(seq_id) for seq_id in seq_ids]
        for seq_id, table in zip(seq_ids, tables, strict=True):
            if self._step in (table.write_step, table.swap_step) or seq_ids.count(seq_id) > 1:
                raise ValueError(
                    f"seq_ids={list(seq_ids)} must differ, and have no writes or swap-ins in "
                    f"step {self._step}: seq_id={seq_id} has"
                )
        swaps = self._host.take_in(seq_ids, tables)
        if swaps is not None:
            self._busy.busy.update(swap.device for swap in swaps)
            for seq_id, table in zip(seq_ids, tables, strict=True):
                del self._tables[seq_id]
                self._num_table_tokens -= self._num_resident(table)
                self._busy.release(table.held)
                if self._observer is not None:
                    host = self._host.tables[seq_id].held
                    self._observer(BlockEvent("swap_out", "preempt", seq_id, table.held, host))
        return swaps

    def num_swapped_blocks(self, seq_ids: Sequence[int]) -> int:
        """Device blocks that swapping these sequences in takes.

        Raises:
          ValueError: one is not swapped out.
        """
        return len(distinct_blocks(self._host.tables_of(seq_ids)))

    def can_swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Whether the device pool has room for these swapped-out sequences now."""
        return self.num_swapped_blocks(seq_ids) <= self.num_free

    def swap_in(self, seq_ids: Sequence[int]) -> tuple[BlockSwap, ...] | None:
        """Bring a sequence group back; its blocks are its own and not cached.

        Returns:
          What the device must move after the swap-outs and before the copies; None: no room.

        Raises:
          ValueError: an id is not swapped out, or named twice.
        """
        if len(set(seq_ids)) < len(seq_ids):
            raise ValueError(f"seq_ids={list(seq_ids)} must differ")
        if not self.can_swap_in(seq_ids):
            return None
        host_tables = self._host.tables_of(seq_ids)
        sources = distinct_blocks(host_tables)
        targets = self._take(len(sources))
        tables = move_tables(host_tables, sources, targets, self._pool)
        for seq_id, table in zip(seq_ids, tables, strict=True):
            table.swap_step = self._step
            self._tables[seq_id] = table
            self._num_table_tokens += self._num_resident(table)
            if self._observer is not None:
                host = self._host.tables[seq_id].held
                self._observer(BlockEvent("swap_in", "resume", seq_id, host, list(table.held)))
        self._busy.busy.update(targets)
        return self._host.give_back(seq_ids, sources, targets)

    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache was good for so far."""
        return dataclasses.replace(self._queries, evictions=self._cache.evictions)

    def check_integrity(self) -> None:
        """Prove that tables, reference counts, free lists and cache agree, on device and host.

        Free + referenced + cached = total; every count equals the number of tables that hold the
        block; tables are exactly as long as their tokens need; all holders of a shared block, the
        cache too, see the same positions filled, so nobody wrote to it alone (only ``trim`` lets a
        holder see fewer); nothing free, or given up while a move reads it, is in a table; no block
        is both source and destination of copies.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        tables = {f"seq_id={seq_id}": table for seq_id, table in self._tables.items()}
        tables |= {f"pin_id={pin_id}": table for pin_id, table in self._pinned.items()}
        size = self.block_size
        self._cache.check_integrity()
        check_tables(tables, self._pool, self._busy, block_size=size, cache=self._cache)
        check_copies(self._copies, self._busy.busy)
        self._host.check_integrity(self._tables.keys(), block_size=size)
        num_tokens = sum(self._num_resident(table) for table in tables.values())
        if num_tokens != self._num_table_tokens:
            raise RuntimeError(f"tables hold {num_tokens} tokens, counted {self._num_table_tokens}")

    def _share_prefix(self, seq_id: int, prefix: PrefixMatch, num_tokens: int) -> list[int]:
        """The first blocks of a new table; references come before anything is evicted."""
        self._pool.share(prefix.blocks)
        blocks = list(prefix.blocks)
        self._tell_shared(seq_id, blocks, len(blocks) * self.block_size)
        if prefix.partial is None:
            return blocks
        src = prefix.partial.block
        num_new = self.blocks_for(num_tokens) - len(blocks)
        if src in self._pool.idle and num_new == self.num_free:
            # No room for a copy beside its source: the block itself is taken.
            self._pool.share((src,))
            self._tell_shared(seq_id, [src], prefix.num_tokens)
            self._forget(src, "take")
            return [*blocks, src]
        self._busy.hold(src)
        dst = self._copy(src)
        if self._observer is not None:
            self._observer(BlockEvent("copy", "prefix", seq_id, (src,), (dst,), prefix.num_tokens))
        return [*blocks, dst]

    def _tell_shared(self, seq_id: int, blocks: list[int], num_tokens: int) -> None:
        if blocks and self._observer is not None:
            self._observer(BlockEvent("share", "prefix", seq_id, list(blocks), (), num_tokens))

    def _tell_cached(self, reason: str, seq_id: int, first_node_id: int) -> None:
        if self._observer is not None:
            blocks = self._cache.blocks_since(first_node_id)
            if blocks:
                self._observer(BlockEvent("cache", reason, seq_id, blocks))


def _require_written(table: BlockTable, end: int, step: int) -> None:
    written = 0 if table.swap_step == step else table.num_tokens
    if table.write_step == step:
        written = min(written, table.num_written)
    if end > written:
        raise ValueError(
            f"token_ids must end at or before position {written}, not at {end}: only what earlier "
            f"steps wrote is published"
        )
