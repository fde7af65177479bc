"""The state of a block manager, from its events alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from paged_jax.blocks.block_pool import NULL_BLOCK
from paged_jax.blocks.block_stats import BlockStats
from paged_jax.blocks.events import BlockEvent, Kind


class BlockReplay:
    """Follows a record: after each event it holds what the manager held right after that change.

    >>> from paged_jax.blocks.block_manager import BlockManager
    >>> replay = BlockReplay()
    >>> manager = BlockManager(num_blocks=8, block_size=4, observer=replay.take)
    >>> manager.allocate(0, num_tokens=7)
    True
    >>> manager.fork(0, 1)
    >>> replay.tables, replay.num_tokens, replay.ref_counts[2]
    ({0: [1, 2], 1: [1, 2]}, {0: 7, 1: 7}, 2)

    Attributes:
      tables: blocks of each sequence on the device, in logical order, holes as the null block.
      swapped: likewise, in host blocks, of each sequence on the host.
      pinned: likewise, of each registered prefix.
      num_tokens: filled positions of each sequence, on either side.
      pinned_tokens: filled positions of each registered prefix.
      ref_counts: tables that hold a block, without the moves of a step that keep it a little
        longer; a block that nobody holds has no entry.
      host_ref_counts: likewise, of the host pool.
      cached: blocks that are in the prefix cache, held or not.
      reserved: the contiguous region of each sequence that has one, filled or not.
    """

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.pinned: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        self.pinned_tokens: dict[int, int] = {}
        self.ref_counts: Counter[int] = Counter()
        self.host_ref_counts: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.reserved: dict[int, list[int]] = {}

    def take(self, event: BlockEvent) -> None:
        """Follow one event.

        Raises:
          ValueError: it does not fit those before it.
        """
        try:
            if event.kind not in get_args(Kind):
                raise KeyError(event.kind)
            getattr(self, f"_{event.kind}")(event)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"event={event} must fit the events before it ({error!r})") from error
        if event.num_tokens is not None and event.seq_id in self.tables:
            self.num_tokens[event.seq_id] = event.num_tokens

    def stats(self, *, num_blocks: int, block_size: int) -> BlockStats:
        """Count what is used, as ``BlockManager.stats`` does, of a pool of these sizes."""
        filled: dict[int, int] = {}
        num_entries = 0
        for tables, lens in ((self.tables, self.num_tokens), (self.pinned, self.pinned_tokens)):
            for key, table in tables.items():
                for place, block in enumerate(table):
                    if block != NULL_BLOCK:
                        here = min(lens[key] - place * block_size, block_size)
                        filled[block] = max(filled.get(block, 0), here)
                        num_entries += 1
        held = self.ref_counts.keys()
        for region in self.reserved.values():
            held = held | set(region)
        used, num_filled = len(held), sum(filled.values())
        return BlockStats(
            total=num_blocks - 1,
            used=used,
            free=num_blocks - 1 - used,
            cached=len(self.cached - self.ref_counts.keys()),
            filled=num_filled,
            waste=used * block_size - num_filled,
            saved=num_entries - len(self.ref_counts),
        )

    def _allocate(self, event: BlockEvent) -> None:
        self._extend(event.seq_id, event.blocks)

    def _fill(self, event: BlockEvent) -> None:
        self.tables[_id(event.seq_id)]  # must exist

    def _share(self, event: BlockEvent) -> None:
        if event.pin_id is None:
            self._extend(event.seq_id, event.blocks)
            return
        seq_id, pin_id = _id(event.seq_id), event.pin_id
        before = self.tables.pop(seq_id)
        pairs = zip(before, event.blocks, strict=True)
        self._hold(new for old, new in pairs if new != old)
        self.pinned[pin_id] = list(event.blocks)
        self.pinned_tokens[pin_id] = self.num_tokens.pop(seq_id)

    def _copy(self, event: BlockEvent) -> None:
        if event.reason == "prefix":
            self._extend(event.seq_id, event.to)
            return
        if event.reason == "fork":
            self.tables[_id(event.seq_id)]  # must exist; what it holds moved, its blocks are told
            return
        (src,), (dst,) = event.blocks, event.to
        table = self.tables[_id(event.seq_id)]
        table[table.index(src)] = dst
        self._hold((dst,))
        _drop(self.ref_counts, (src,))

    def _release(self, event: BlockEvent) -> None:
        if event.pin_id is not None:
            del self.pinned[event.pin_id], self.pinned_tokens[event.pin_id]
        elif event.seq_id is not None:
            table = self.tables[event.seq_id]
            if event.reason == "window":
                first = table.index(event.blocks[0])
                table[first : first + len(event.blocks)] = [NULL_BLOCK] * len(event.blocks)
            else:
                del table[len(table) - len(event.blocks) :]
        _drop(self.ref_counts, event.blocks)

    def _free(self, event: BlockEvent) -> None:
        seq_id = _id(event.seq_id)
        del self.tables[seq_id], self.num_tokens[seq_id]
        _drop(self.ref_counts, event.blocks)

    def _cache(self, event: BlockEvent) -> None:
        self.cached.update(event.blocks)

    def _evict(self, event: BlockEvent) -> None:
        self.cached.difference_update(event.blocks)

    def _swap_out(self, event: BlockEvent) -> None:
        host = dict(zip(event.blocks, event.to, strict=True))
        table = self.tables.pop(_id(event.seq_id))
        self.swapped[_id(event.seq_id)] = [host[block] if block else block for block in table]
        _drop(self.ref_counts, event.blocks)
        self.host_ref_counts.update(event.to)

    def _swap_in(self, event: BlockEvent) -> None:
        device = dict(zip(event.blocks, event.to, strict=True))
        table = self.swapped.pop(_id(event.seq_id))
        self.tables[_id(event.seq_id)] = [device[block] if block else block for block in table]
        _drop(self.host_ref_counts, event.blocks)
        self._hold(event.to)

    def _free_host(self, event: BlockEvent) -> None:
        del self.swapped[_id(event.seq_id)], self.num_tokens[_id(event.seq_id)]
        _drop(self.host_ref_counts, event.blocks)

    def _reserve(self, event: BlockEvent) -> None:
        self.reserved[_id(event.seq_id)] = list(event.blocks)

    def _unreserve(self, event: BlockEvent) -> None:
        del self.reserved[_id(event.seq_id)]

    def _extend(self, seq_id: int | None, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.tables.setdefault(_id(seq_id), []).extend(blocks)
        self._hold(block for block in blocks if block != NULL_BLOCK)

    def _hold(self, blocks: Iterable[int]) -> None:
        self.ref_counts.update(blocks)


def _id(seq_id: int | None) -> int:
    if seq_id is None:
        raise KeyError("seq_id")
    return seq_id


def _drop(counts: Counter[int], blocks: Iterable[int]) -> None:
    for block in blocks:
        counts[block] -= 1
        if counts[block] < 0:
            raise KeyError(block)
        if counts[block] == 0:
            del counts[block]
