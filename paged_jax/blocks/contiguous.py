"""Contiguous reservations over the same pool: the paper's Orca baselines (sections 3.1 and 6.1).

A sequence's region is reserved whole when its request starts. Its table is the region's blocks in
order, as far as they are filled, so schedulers and kernels see nothing new. Nothing is shared: a
fork is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.block_moves import BlockCopy, BlockSwap, FreedBlocks
from paged_jax.blocks.block_stats import BlockStats
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.block_tables import require_positive
from paged_jax.blocks.demand import ContiguousPolicy, Demand
from paged_jax.blocks.events import BlockEvent, Kind
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.blocks.regions import Regions


class ContiguousManager(BlockManager):
    """Reserves consecutive blocks for each sequence by a buddy allocator.

    Admission is all that can fail: ``append`` always has room. A region lives as long as its
    sequence has a table, those of a beam search's places as long as the search.

    >>> manager = ContiguousManager(
    ...     "orca_oracle", max_model_len=64, num_blocks=17, block_size=4)
    >>> manager.allocate(0, num_tokens=5, demand=Demand((0,), num_prompt=5, num_output=6))
    True
    >>> manager.table_array(0).tolist(), manager.num_free  # 11 positions, 3 blocks, rounded to 4
    ([1, 2], 12)
    >>> manager.memory_use()
    MemoryUse(total=64, filled=5, reserved=6, internal=0, external=5, free=48, saved=0)

    Args:
      policy: how long regions are.
      max_model_len: longest context in tokens.
      options: as ``BlockManager``, without a host pool.

    Raises:
      ValueError: as ``BlockManager``, or with 'orca_max' no region of ``max_model_len`` tokens fits
        the pool.
    """

    __slots__ = ("_members", "_policy", "_regions")

    def __init__(self, policy: ContiguousPolicy, *, max_model_len: int, **options: Any) -> None:
        super().__init__(**options)
        self._policy = policy
        # The sequences of each one's group that have a region, shared by all of them.
        self._members: dict[int, list[int]] = {}
        self._regions = Regions(
            policy,
            num_usable=self.num_usable,
            block_size=self.block_size,
            max_model_len=max_model_len,
            tracks_freed=options.get("tracks_freed", False),
        )
        longest = self._longest()
        if policy == "orca_max" and max_model_len > longest:
            raise ValueError(
                f"max_model_len={max_model_len} must be at most {longest}, the "
                f"longest region of a pool of {self.num_usable} blocks of {self.block_size}"
            )

    @property
    def num_free(self) -> int:
        """Blocks outside all regions."""
        return self._regions.num_free

    @property
    def shares(self) -> bool:
        """No: a fork has a region of its own."""
        return False

    def require_fits(self, demand: Demand) -> None:
        """Refuse a group whose regions would not fit an empty pool.

        Raises:
          ValueError: it is such.
        """
        if not self._regions.would_fit(demand):
            raise ValueError(
                f"{self._policy}: {len(demand.seq_ids)} regions of "
                f"{self._regions.num_reserved(demand)} tokens must fit the pool, a longest region "
                f"of which has {self._longest()}"
            )

    def can_admit(self, demand: Demand, *, num_blocks: int) -> bool:
        """Whether there are regions for all sequences of a group; ``num_blocks`` are in them."""
        del num_blocks
        return self._regions.fits(demand)

    def room_for_new(self, prefix: PrefixMatch | None = None) -> int:
        """All positions: whoever is admitted has a region for the whole prompt."""
        _require_no_prefix(prefix)
        return self.num_usable * self.block_size

    def allocate(
        self,
        seq_id: int,
        *,
        num_tokens: int,
        prefix: PrefixMatch | None = None,
        demand: Demand | None = None,
    ) -> bool:
        """Reserve regions for a group, and give one of its sequences a table; False without room.

        Raises:
          ValueError: ``seq_id`` has a table already or is not of the ``demand``, there is a prefix,
            or ``num_tokens`` is not in 1 .. what is reserved.
        """
        self._require_new("seq_id", seq_id)
        require_positive(num_tokens)
        _require_no_prefix(prefix)
        if demand is None or seq_id not in demand.seq_ids:
            raise ValueError(f"demand={demand} must name seq_id={seq_id}")
        most = self._regions.num_reserved(demand)
        if num_tokens > most:
            raise ValueError(f"num_tokens={num_tokens} must be at most the {most} to be reserved")
        if not self._regions.reserve(demand):
            return False
        members = list(demand.seq_ids)
        for member in demand.seq_ids:
            self._members[member] = members
            self._tell("reserve", self._policy, member, self._regions.of[member].blocks)
        self._add_table(seq_id, num_tokens)
        self._tell("allocate", "new", seq_id, self._tables[seq_id].blocks, num_tokens=num_tokens)
        return True

    def append(self, seq_id: int, *, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        """Extend a table within its region; a forked one first gets what its parent held.

        Raises:
          ValueError: ``seq_id`` is unknown, ``num_tokens`` < 1, or it was forked in this very step.
          RuntimeError: it outgrows its region: its group's demand was too small.
        """
        table = self._table(seq_id)
        require_positive(num_tokens)
        region, end = self._regions.of[seq_id], table.num_tokens + num_tokens
        if end > region.num_reserved:
            raise RuntimeError(
                f"seq_id={seq_id} needs {end} positions, {region.num_reserved} are reserved: its "
                f"demand must name all its output"
            )
        copies = self._copy_from_source(seq_id, table)
        new_blocks = list(region.blocks[len(table.blocks) : self.blocks_for(end)])
        if new_blocks:
            table.extend(new_blocks)
        table.num_tokens = end
        self._num_table_tokens += num_tokens
        kind = "allocate" if new_blocks else "fill"
        self._tell(kind, "append", seq_id, new_blocks, num_tokens=end)
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let ``child_id`` go on in its own region; its first ``append`` copies what it needs.

        Raises:
          ValueError: the parent is unknown, the child has a table already or is not of its group.
        """
        parent = self._table(parent_id)
        self._require_new("child_id", child_id)
        members = self._members[parent_id]
        if child_id not in members:
            raise ValueError(f"child_id={child_id} must be one of {members}")
        self._add_table(child_id, parent.num_tokens)
        self._regions.read_later(parent_id, child_id)
        blocks = self._tables[child_id].blocks
        self._tell("allocate", "fork", child_id, blocks, num_tokens=parent.num_tokens)

    def trim(self, seq_id: int, *, num_tokens: int) -> None:
        """Forget the positions past the first ``num_tokens``; the region stays as it is.

        Raises:
          ValueError: ``seq_id`` is unknown, or ``num_tokens`` is not in 1 .. its tokens.
        """
        table = self._table(seq_id)
        if not 1 <= num_tokens <= table.num_tokens:
            raise ValueError(f"num_tokens={num_tokens} must lie in 1..{table.num_tokens}")
        self._num_table_tokens -= table.num_tokens - num_tokens
        removed = table.cut(self.blocks_for(num_tokens))
        table.trim(num_tokens, block_size=self.block_size)
        self._tell("release", "trim", seq_id, removed, num_tokens=num_tokens)

    def drop_before(self, seq_id: int, position: int) -> None:
        """Keep what fell behind a window: of a region nothing can be given up alone."""

    def free(self, seq_id: int, *, reason: str = "free") -> None:
        """Drop a sequence's table and its region; a beam's place keeps the region for the next one.

        Raises:
          ValueError: ``seq_id`` is unknown, or a beam's place that forks have yet to copy from.
        """
        table, members = self._table(seq_id), self._members[seq_id]
        num_readers = self._regions.of[seq_id].num_readers
        if reason == "beam" and num_readers:
            raise ValueError(
                f"seq_id={seq_id} must keep its place until its {num_readers} forks have appended"
            )
        del self._tables[seq_id]
        self._num_table_tokens -= table.num_tokens
        self._regions.end_reading(seq_id, has_copied=False)
        self._tell("free", reason, seq_id, table.blocks)
        if not any(member in self._tables for member in members):
            ended = list(members)
        else:
            ended = [] if reason == "beam" else [seq_id]
        for member in ended:
            members.remove(member)
            del self._members[member]
            self._tell("unreserve", reason, member, self._regions.of[member].blocks)
        self._regions.give_up(ended)

    def begin_step(self) -> None:
        """Start a step: the previous one's copies have been handed to the device."""
        self._step += 1
        self._copies.clear()
        self._regions.end_step()

    def room(self, seq_id: int) -> int:
        """Positions of a sequence's region that it has not filled."""
        table = self._table(seq_id)
        return self._regions.of[seq_id].num_reserved - table.num_tokens

    def num_new_blocks(self, seq_id: int) -> int:
        """0: its region has them."""
        self._table(seq_id)
        return 0

    def num_new_blocks_for(self, seq_ids: Sequence[int]) -> int:
        """0: their regions have them."""
        del seq_ids
        return 0

    def ref_count(self, block: int) -> int:
        """1 for a block of a sequence's region."""
        return int(any(block in region.blocks for region in self._regions.of.values()))

    def take_freed(self) -> FreedBlocks:
        """Blocks of regions that were given back since the last call.

        Raises:
          ValueError: made without ``tracks_freed``.
        """
        if self._regions.freed is None:
            raise ValueError("tracks_freed=False must be True when the manager is made")
        freed = FreedBlocks(list(self._regions.freed), [])
        self._regions.freed.clear()
        return freed

    def stats(self) -> BlockStats:
        """Count what is used, each region whole: O(regions)."""
        reserved = num_asked = 0
        for seq_id, region in self._regions.of.items():
            table = self._tables.get(seq_id)
            filled = 0 if table is None else table.num_tokens
            reserved += max(region.num_needed - filled, 0)
            num_asked += region.num_reserved
        used, filled = self.num_usable - self.num_free, self._num_table_tokens
        return BlockStats(
            total=self.num_usable,
            used=used,
            free=self.num_free,
            cached=0,
            filled=filled,
            waste=used * self.block_size - filled,
            saved=0,
            reserved=reserved,
            external=used * self.block_size - num_asked,
        )

    def swap_out(self, seq_ids: Sequence[int]) -> tuple[BlockSwap, ...] | None:
        """None: there is no host pool."""
        for seq_id in seq_ids:
            self._table(seq_id)
        return None

    def publish(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: regions are not shared.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(f"policy={self._policy!r} has no prefix cache")

    def pin(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: regions are not shared.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(f"policy={self._policy!r} has no registered prefixes")

    def check_integrity(self) -> None:
        """Prove that tables lie in their regions, regions in the allocator, and counts agree.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        self._regions.check_integrity()
        num_tokens = sum(table.num_tokens for table in self._tables.values())
        if num_tokens != self._num_table_tokens or self._members.keys() != self._regions.of.keys():
            raise RuntimeError(
                f"{self._num_table_tokens} tokens counted of {num_tokens}; groups "
                f"{self._members} of {sorted(self._regions.of)}"
            )
        for seq_id, table in self._tables.items():
            region = self._regions.of[seq_id]
            blocks = list(region.blocks[: self.blocks_for(table.num_tokens)])
            if not table.blocks == table.array.tolist() == blocks:
                raise RuntimeError(f"seq_id={seq_id} has {table}, its region is {region}")

    def _add_table(self, seq_id: int, num_tokens: int) -> None:
        blocks = self._regions.of[seq_id].blocks[: self.blocks_for(num_tokens)]
        table = self._tables[seq_id] = BlockTable(list(blocks), num_tokens=num_tokens)
        table.write_step = self._step
        self._num_table_tokens += num_tokens

    def _copy_from_source(self, seq_id: int, table: BlockTable) -> tuple[BlockCopy, ...]:
        source = self._regions.sources.get(seq_id)
        if source is None:
            return ()
        if table.write_step == self._step:
            raise ValueError(
                f"seq_id={seq_id} must wait for the next step: it was forked in step {self._step}, "
                "and a copy would read before that step's writes"
            )
        copies = tuple(map(BlockCopy, source.blocks, table.blocks))
        self._copies += copies
        self._tell("copy", "fork", seq_id, [c.src for c in copies], to=[c.dst for c in copies])
        self._regions.end_reading(seq_id, has_copied=True)
        return copies

    def _longest(self) -> int:
        """Tokens of the longest region that an empty pool has."""
        return self.block_size << (self.num_usable.bit_length() - 1)

    def _tell(
        self, kind: Kind, reason: str, seq_id: int, blocks: Sequence[int], **fields: Any
    ) -> None:
        if self._observer is not None:
            self._observer(BlockEvent(kind, reason, seq_id, list(blocks), **fields))


def _require_no_prefix(prefix: PrefixMatch | None) -> None:
    if prefix is not None:
        raise ValueError(f"prefix={prefix} must be None: contiguous regions share nothing")
