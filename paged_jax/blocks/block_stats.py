"""How a pool is used, and the proof that tables, counts and cache agree."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from paged_jax.blocks.block_moves import BlockCopy, BusyBlocks
from paged_jax.blocks.block_pool import NULL_BLOCK, BlockPool
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStats:
    """How the pool is used, in blocks and token positions.

    Attributes:
      total: usable blocks.
      used: blocks that a table (or a copy or swap of this step) holds.
      free: blocks that can be handed out now, ``cached`` ones included.
      cached: blocks that nobody holds and the prefix cache keeps until they are needed.
      filled: distinct token positions that hold, or are about to hold, a token of a table.
      waste: positions of used blocks that hold none.
      saved: blocks that sharing saves: entries of all tables less distinct blocks.
      reserved: of ``waste``, positions that a contiguous region's sequence will fill later.
      external: of ``waste``, positions that the allocator rounded a region up by.
    """

    total: int
    used: int
    free: int
    cached: int
    filled: int
    waste: int
    saved: int
    reserved: int = 0
    external: int = 0

    def memory_use(self, block_size: int) -> MemoryUse:
        """Where the pool's positions are (paper, Fig. 2)."""
        return MemoryUse(
            total=self.total * block_size,
            filled=self.filled,
            reserved=self.reserved,
            internal=self.used * block_size - self.filled - self.reserved - self.external,
            external=self.external,
            free=self.free * block_size,
            saved=self.saved * block_size,
        )


class MemoryUse(NamedTuple):
    """Where the token positions of a pool are; all but ``saved`` add up to ``total``.

    Attributes:
      total: positions of the usable blocks.
      filled: positions that hold a token (the paper's token states).
      reserved: positions that a sequence has and will fill later, as far as anybody knows.
      internal: positions that a sequence has and will not fill: the ends of last blocks, or what a
        policy reserved beyond the output's length.
      external: positions that the allocator rounded a region up by.
      free: positions of free blocks, cached ones included. A contiguous policy cannot always use
        them: with requests waiting they are external fragmentation too.
      saved: positions more that tables would take without sharing.
    """

    total: int
    filled: int
    reserved: int
    internal: int
    external: int
    free: int
    saved: int


class _Holding(NamedTuple):
    """How one table sees a block: its place, the positions filled, whether it saw more before."""

    place: int
    filled: int
    is_trimmed: bool

    def agrees_with(self, other: _Holding) -> bool:
        same_filled = self.filled == other.filled or self.is_trimmed or other.is_trimmed
        return self.place == other.place and same_filled


def count_blocks(
    tables: Sequence[BlockTable],
    pool: BlockPool,
    *,
    block_size: int,
    num_tokens: int,
    deferred: Sequence[int],
) -> BlockStats:
    """Make the statistics: O(tables), or O(their entries) when blocks are shared.

    Args:
      tables: all that hold blocks of ``pool``.
      pool: the pool.
      block_size: token positions a block.
      num_tokens: filled positions of all tables, without those in holes.
      deferred: blocks that wait for the end of the step, with one reference each.
    """
    num_cached = len(pool.idle)
    used = pool.num_usable - pool.num_free - num_cached
    held = used - sum(pool.ref_counts[block] == 1 for block in deferred)
    saved = sum(len(table.blocks) - table.num_holes for table in tables) - held
    if saved:
        filled: dict[int, int] = {}
        for table in tables:
            for place in range(table.num_holes, len(table.blocks)):
                block = table.blocks[place]
                here = min(table.num_tokens - place * block_size, block_size)
                filled[block] = max(filled.get(block, 0), here)
        num_tokens = sum(filled.values())
    return BlockStats(
        total=pool.num_usable,
        used=used,
        free=pool.num_free + num_cached,
        cached=num_cached,
        filled=num_tokens,
        waste=held * block_size - num_tokens,
        saved=saved,
    )


def check_tables(
    tables: Mapping[str, BlockTable],
    pool: BlockPool,
    busy: BusyBlocks,
    *,
    block_size: int,
    cache: PrefixCache | None = None,
) -> None:
    """Prove that the tables of one pool, its reference counts and free list agree.

    Args:
      tables: by a name for messages.
      pool: which the tables' blocks are of.
      busy: blocks that this step's moves use.
      block_size: token positions a block.
      cache: what is cached of the pool, if anything.

    Raises:
      RuntimeError: with the numbers, if not.
    """
    pool.check_integrity()
    cached = {node.block: node for node in cache.nodes()} if cache else {}
    references: Counter[int] = Counter(busy.deferred)
    holders: dict[int, _Holding] = {}
    for name, table in tables.items():
        references.update(table.held)
        if not (
            len(table.blocks) == -(-table.num_tokens // block_size) >= 1
            and table.array.tolist() == table.blocks
            and table.num_holes * block_size <= table.num_tokens
            and not any(table.blocks[: table.num_holes])
            and NULL_BLOCK not in table.held
        ):
            raise RuntimeError(
                f"{name}: {table} with array {table.array}, {table.num_holes} holes and blocks of "
                f"{block_size}"
            )
        for place in range(table.num_holes, len(table.blocks)):
            block = table.blocks[place]
            filled = min(table.num_tokens - place * block_size, block_size)
            here = _Holding(place, filled, table.is_trimmed)
            other = holders.setdefault(block, here)
            if not here.agrees_with(other):
                raise RuntimeError(
                    f"block {block} of {name} is {here}, of another sequence it is "
                    f"{other}: somebody wrote to a shared block"
                )
            node = cached.get(block)
            if node and not here.agrees_with(_Holding(node.depth - 1, len(node.tokens), False)):
                raise RuntimeError(
                    f"block {block} of {name} is {here}, cached it is {node} with "
                    f"{len(node.tokens)} tokens: somebody wrote to a cached block"
                )
    counts = {block: count for block, count in enumerate(pool.ref_counts) if count}
    _check(
        counts == references,
        f"reference counts {counts} differ from the holders {dict(references)}",
    )
    _check(
        len(set(busy.deferred)) == len(busy.deferred)
        and busy.busy.issuperset(busy.deferred)
        and all(block in cached for block in busy.deferred if block in holders),
        f"deferred {busy.deferred} must be busy blocks {busy.busy} that no table holds",
    )
    _check(
        all(pool.ref_counts[block] for block in busy.busy), f"busy blocks {busy.busy} are not held"
    )


def check_copies(copies: Sequence[BlockCopy], busy: Collection[int]) -> None:
    """Prove that a step's copies may be done in any order.

    Raises:
      RuntimeError: with the copies, if not.
    """
    sources = {copy.src for copy in copies}
    destinations = [copy.dst for copy in copies]
    _check(
        sources.isdisjoint(destinations)
        and len(set(destinations)) == len(destinations)
        and NULL_BLOCK not in sources.union(destinations)
        and sources.union(destinations) <= set(busy),
        f"copies {copies} of one step overlap, or use a block that is not busy",
    )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
