"""Who has which region of a contiguously reserved pool, and which regions are still read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from paged_jax.blocks.buddy import BuddyAllocator
from paged_jax.blocks.demand import ContiguousPolicy, Demand, num_reserved


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """Consecutive blocks of one sequence.

    Attributes:
      blocks: those that the policy asked for; what the allocator rounded up to is left out.
      num_reserved: positions that the policy asked for.
      num_needed: of those, the ones that the sequence will fill.
      num_readers: forked sequences that still have to copy from it.
      is_left: whether its sequence is gone.
    """

    blocks: range
    num_reserved: int
    num_needed: int
    num_readers: int = 0
    is_left: bool = False


class Regions:
    """The regions of sequence groups, by sequence.

    A group's regions are taken at once. One goes back when its sequence gives it up and nobody
    copies from it any more.

    Args:
      policy: how long they are.
      num_usable: blocks of the pool, without the null block.
      block_size: token positions a block.
      max_model_len: longest context in tokens.
      tracks_freed: remember which blocks become free.

    Attributes:
      of: the region of each sequence.
      sources: what each forked sequence that has not copied yet will copy from.
      freed: blocks of regions that were given back, or None.
    """

    __slots__ = (
        "_block_size",
        "_buddies",
        "_leaving",
        "_max_model_len",
        "_policy",
        "freed",
        "of",
        "sources",
    )

    def __init__(
        self,
        policy: ContiguousPolicy,
        *,
        num_usable: int,
        block_size: int,
        max_model_len: int,
        tracks_freed: bool,
    ) -> None:
        self._policy: ContiguousPolicy = policy
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._buddies = BuddyAllocator(num_usable)
        self._leaving: list[Region] = []
        self.of: dict[int, Region] = {}
        self.sources: dict[int, Region] = {}
        self.freed: dict[int, None] | None = {} if tracks_freed else None

    @property
    def num_free(self) -> int:
        """Blocks outside all regions."""
        return self._buddies.num_free

    def num_reserved(self, demand: Demand) -> int:
        """Positions of each region of a group."""
        return num_reserved(self._policy, demand, max_model_len=self._max_model_len)

    def would_fit(self, demand: Demand) -> bool:
        """Whether an empty pool has the regions of a group."""
        empty = BuddyAllocator(self._buddies.size)
        return _take(empty, self._num_blocks(demand), len(demand.seq_ids)) is not None

    def fits(self, demand: Demand) -> bool:
        """Whether there are regions for a group now."""
        starts = _take(self._buddies, self._num_blocks(demand), len(demand.seq_ids))
        for start in starts or ():
            self._buddies.free(start)
        return starts is not None

    def reserve(self, demand: Demand) -> bool:
        """Take the regions of a group; False, and nothing is taken, where there are not enough."""
        num_blocks, num_tokens = self._num_blocks(demand), self.num_reserved(demand)
        starts = _take(self._buddies, num_blocks, len(demand.seq_ids))
        if starts is None:
            return False
        needed = min(max(demand.num_prompt + demand.num_output, 1), num_tokens)
        for seq_id, start in zip(demand.seq_ids, starts, strict=True):
            first = start + 1  # block 0 is the null block, which the allocator does not know
            self.of[seq_id] = Region(range(first, first + num_blocks), num_tokens, needed)
        return True

    def give_up(self, seq_ids: Iterable[int]) -> None:
        """Let these sequences' regions go, each as soon as nobody copies from it."""
        for seq_id in seq_ids:
            region = self.of.pop(seq_id)
            region.is_left = True
            if region.num_readers == 0:
                self._free(region)

    def read_later(self, parent_id: int, child_id: int) -> None:
        """Remember that ``child_id`` will copy what ``parent_id`` holds."""
        # A parent that has not copied yet has nothing of its own to copy from.
        source = self.sources.get(parent_id, self.of[parent_id])
        source.num_readers += 1
        self.sources[child_id] = source

    def end_reading(self, child_id: int, *, has_copied: bool) -> None:
        """``child_id`` copies in this step, or never will (or has nothing to copy)."""
        source = self.sources.pop(child_id, None)
        if source is not None:
            source.num_readers -= 1
            if source.is_left and source.num_readers == 0:
                if has_copied:
                    self._leaving.append(source)  # until the step is over
                else:
                    self._free(source)

    def end_step(self) -> None:
        """The last step's copies are done: what only they read goes back."""
        for region in self._leaving:
            self._free(region)
        self._leaving.clear()

    def check_integrity(self) -> None:
        """Prove that the allocator's regions are these, and their readers counted.

        Raises:
          RuntimeError: with the numbers, if not.
        """
        self._buddies.check_integrity()
        left = [source for source in self.sources.values() if source.is_left]
        regions = list(dict.fromkeys([*self.of.values(), *left, *self._leaving]))
        num_held = sum(self._buddies.length(region.blocks[0] - 1) for region in regions)
        num_readers = sum(region.num_readers for region in regions)
        if num_held != self._buddies.size - self.num_free or num_readers != len(self.sources):
            raise RuntimeError(
                f"{num_held} blocks in {regions}, {self.num_free} free of {self._buddies.size}; "
                f"{num_readers} readers of {self.sources}"
            )

    def _num_blocks(self, demand: Demand) -> int:
        return -(-self.num_reserved(demand) // self._block_size)

    def _free(self, region: Region) -> None:
        if self.freed is not None:
            self.freed.update(dict.fromkeys(region.blocks))
        self._buddies.free(region.blocks[0] - 1)


def _take(buddies: BuddyAllocator, num_blocks: int, count: int) -> list[int] | None:
    """``count`` regions, or none."""
    starts: list[int] = []
    for _ in range(count):
        start = buddies.allocate(num_blocks)
        if start is None:
            for taken in starts:
                buddies.free(taken)
            return None
        starts.append(start)
    return starts
