"""The bounded host pool that preempted sequences are swapped to (paper section 4.5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from paged_jax.blocks.block_moves import BlockSwap, BusyBlocks
from paged_jax.blocks.block_pool import BlockPool
from paged_jax.blocks.block_stats import check_tables
from paged_jax.blocks.block_table import BlockTable


class SwapSpace:
    """Blocks of the host pool and the tables of the sequences that are there.

    Args:
      num_blocks: blocks of the host pool; as on the device, block 0 is never used. 0: no host pool.
      tracks_freed: see ``BlockPool``.

    Attributes:
      pool: free list and reference counts of the host pool, or None.
      busy: host blocks that this step's swaps read or write.
      tables: tables of swapped-out sequences, in host blocks.

    Raises:
      ValueError: ``num_blocks`` is 1 or negative.
    """

    __slots__ = ("busy", "pool", "tables")

    def __init__(self, num_blocks: int, *, tracks_freed: bool = False) -> None:
        if num_blocks < 0 or num_blocks == 1:
            raise ValueError(f"num_host_blocks={num_blocks} must be 0 or >= 2: block 0 is not used")
        self.pool = BlockPool(num_blocks, tracks_freed=tracks_freed) if num_blocks else None
        self.busy = None if self.pool is None else BusyBlocks(self.pool)
        self.tables: dict[int, BlockTable] = {}

    @property
    def num_free(self) -> int:
        """Host blocks that can be handed out now."""
        return self.pool.num_free if self.pool else 0

    def has_room(self, num_blocks: int) -> bool:
        """Whether that many blocks can be swapped out now; never without a host pool."""
        return self.pool is not None and num_blocks <= self.pool.num_free

    def tables_of(self, seq_ids: Iterable[int]) -> list[BlockTable]:
        """Tables of swapped-out sequences.

        Raises:
          ValueError: one is not swapped out.
        """
        tables = []
        for seq_id in seq_ids:
            if seq_id not in self.tables:
                raise ValueError(
                    f"seq_id={seq_id} must be one of the {len(self.tables)} that are swapped out"
                )
            tables.append(self.tables[seq_id])
        return tables

    def take_in(
        self, seq_ids: Sequence[int], tables: Sequence[BlockTable]
    ) -> tuple[BlockSwap, ...] | None:
        """Keep sequences here; None when there is no room. The device's references stay as is."""
        sources = distinct_blocks(tables)
        if self.pool is None or self.busy is None or not self.has_room(len(sources)):
            return None
        targets = self.pool.allocate(len(sources))
        moved = move_tables(tables, sources, targets, self.pool)
        self.tables.update(zip(seq_ids, moved, strict=True))
        self.busy.busy.update(targets)
        return tuple(map(BlockSwap, sources, targets))

    def give_back(
        self, seq_ids: Sequence[int], sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[BlockSwap, ...]:
        """Let sequences go whose host blocks ``sources`` move to the device's ``targets``."""
        assert self.busy is not None, "nothing is swapped out without a host pool"
        self.busy.busy.update(sources)
        for seq_id in seq_ids:
            self.free(seq_id)
        return tuple(map(BlockSwap, targets, sources))

    def free(self, seq_id: int) -> Sequence[int]:
        """Drop the table of a swapped-out sequence; returns the host blocks that it held."""
        assert self.busy is not None, "nothing is swapped out without a host pool"
        held = self.tables.pop(seq_id).held
        self.busy.release(held)
        return held

    def take_freed(self) -> list[int]:
        """See ``BlockPool.take_freed``."""
        return self.pool.take_freed() if self.pool else []

    def check_integrity(self, device_ids: Collection[int], *, block_size: int) -> None:
        """Prove that tables and counts agree, and that nobody is on both sides.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        both = self.tables.keys() & set(device_ids)
        if both:
            raise RuntimeError(f"sequences {sorted(both)} are on the device and swapped out")
        if self.pool is not None and self.busy is not None:
            tables = {f"swapped seq_id={seq_id}": table for seq_id, table in self.tables.items()}
            check_tables(tables, self.pool, self.busy, block_size=block_size)

    def end_step(self) -> None:
        """The step's swaps are done."""
        if self.busy is not None and self.busy.busy:
            self.busy.end()


def distinct_blocks(tables: Sequence[BlockTable]) -> list[int]:
    """Blocks that any of ``tables`` holds, each once, in the order of first use."""
    return list(dict.fromkeys(block for table in tables for block in table.held))


def move_tables(
    tables: Sequence[BlockTable], sources: Sequence[int], targets: Sequence[int], pool: BlockPool
) -> list[BlockTable]:
    """Tables as before in other blocks, which have one reference each so far.

    Sharing among the tables and their holes stay as they are.

    Args:
      tables: in ``sources``.
      sources: the distinct blocks that they hold.
      targets: of ``pool``: what each source moves to.
      pool: which counts the further references.
    """
    target_of = dict(zip(sources, targets, strict=True))
    moved, seen = [], set[int]()
    for table in tables:
        held = [target_of[block] for block in table.held]
        pool.share(block for block in held if block in seen)
        seen.update(held)
        moved.append(table.copy([0] * table.num_holes + held))
    return moved
