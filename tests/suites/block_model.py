"""A block manager with a model of what every slot of its pools must hold.

A slot's content stands for a namespace and all tokens up to its position, as keys and values do. A
step's moves and writes are done at its end, in the order of the device; then every table, whatever
is cached, and the host pool are read back. Blocks that became free are cleared before and after, as
the engine does with ``zero_on_free``; and the manager's state is had from its events alone, too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from suites.slot_executor import SlotPool
from suites.slot_model import EMPTY

from paged_jax.blocks.block_manager import BlockManager, BlockSwap
from paged_jax.blocks.block_table import BlockTable
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import CachedNode
from paged_jax.blocks.replay import BlockReplay


class Stream:
    """What the model knows of a sequence or a registered prefix."""

    def __init__(self, namespace: Namespace, tokens: list[int], group: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.group = group
        self.written = 0  # positions that earlier steps wrote
        self.holes = 0
        self.wrote = False  # in this step, or forked from one that did
        self.swapped_in = False  # in this step

    def fork(self) -> Stream:
        twin = Stream(self.namespace, list(self.tokens), self.group)
        twin.__dict__ |= self.__dict__ | {"tokens": twin.tokens}
        return twin


def common_len(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class BlockModel:
    """The manager under test, the sequences as they should be, and the two pools.

    Attributes:
      live: sequences with a table on the device.
      swapped: those on the host.
      pins: registered prefixes.
      swap_outs: of this step so far.
      swap_ins: of this step so far.
    """

    def set_up(self, *, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """Start with empty pools."""
        self.replay = BlockReplay()
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            tracks_freed=True,
            observer=self.replay.take,
        )
        self.size = block_size
        self.device = SlotPool(num_blocks, block_size)
        self.host = SlotPool(max(num_host_blocks, 1), block_size)
        self.contents: dict[object, int] = {}
        self.live: dict[int, Stream] = {}
        self.swapped: dict[int, Stream] = {}
        self.pins: dict[int, Stream] = {}
        self.swap_outs: list[BlockSwap] = []
        self.swap_ins: list[BlockSwap] = []

    def content(self, namespace: Namespace, tokens: list[int], begin: int = 0) -> list[int]:
        keys = [(namespace, tuple(tokens[: end + 1])) for end in range(begin, len(tokens))]
        return [self.contents.setdefault(key, len(self.contents)) for key in keys]

    @staticmethod
    def path(node: CachedNode | None) -> list[int]:
        """All tokens from the beginning to the end of a cached block."""
        tokens: list[int] = []
        while node is not None:
            tokens[:0] = node.tokens
            node = node.parent
        return tokens

    def table(self, seq_id: int) -> list[int]:
        return self.manager.table_array(seq_id).tolist()

    def check_writable(self, seq_id: int, begin: int) -> None:
        """Blocks of positions from ``begin`` on have one holder, and are not in the cache.

        A swap-out of this step may read them: it does so before the writes (``run_device``).
        """
        cached = {node.block for node in self.manager._cache.nodes()}
        for block in self.table(seq_id)[begin // self.size :]:
            assert self.manager.ref_count(block) == 1
            assert block not in cached

    def run_device(self) -> None:
        """Do the step: clear what became free, swap-outs, swap-ins, copies, writes."""
        self.clear_freed()
        outs, ins = self.swap_outs, self.swap_ins
        filled = [swap.device for swap in ins] + [copy.dst for copy in self.manager.step_copies]
        assert len({swap.host for swap in outs}) == len(outs)
        assert len(set(filled)) == len(filled)
        assert not set(filled) & {swap.device for swap in outs}
        for swap in self.swap_outs:
            self.host.slots[swap.host] = self.device.slots[swap.device]
        for swap in self.swap_ins:
            self.device.slots[swap.device] = self.host.slots[swap.host]
        self.device.copy_blocks(self.manager.step_copies)
        for seq_id, stream in self.live.items():
            begin = max(stream.written, stream.holes * self.size)
            values = self.content(stream.namespace, stream.tokens, begin)
            self.device.write(self.manager.table_array(seq_id), begin, np.array(values, int))
            stream.written = len(stream.tokens)
            stream.wrote = stream.swapped_in = False
        self.swap_outs, self.swap_ins = [], []
        self.manager.begin_step()

    def read_back(self) -> None:
        manager = self.manager
        for pool, streams, tables in (
            (self.device, self.live, manager._tables),
            (self.device, self.pins, manager._pinned),
            (self.host, self.swapped, manager._host.tables),
        ):
            for key, stream in streams.items():
                begin, table = stream.holes * self.size, tables[key].array
                held = pool.read(table, len(stream.tokens))[begin:].tolist()
                assert held == self.content(stream.namespace, stream.tokens, begin), key
        for node in manager._cache.nodes():
            tokens = self.path(node)
            begin = (node.depth - 1) * self.size
            held = self.device.slots[node.block, : len(node.tokens)].tolist()
            assert held == self.content(node.namespace, tokens, begin), node

    def clear_freed(self) -> None:
        freed = self.manager.take_freed()
        self.device.slots[freed.device] = EMPTY
        self.host.slots[freed.host] = EMPTY

    def check_free_is_clear(self) -> None:
        """After a step no free block holds anything."""
        self.clear_freed()
        for pool, blocks in (
            (self.device, self.manager._pool),
            (self.host, self.manager._host.pool),
        ):
            if blocks is not None:
                assert (pool.slots[blocks._free] == EMPTY).all()

    def check_replay(self) -> None:
        """The events alone give all tables, counts and cached blocks."""
        check_replay(self.replay, self.manager)

    def check_stats(self) -> None:
        """Count everything anew."""
        manager = self.manager
        stats = manager.stats()
        assert stats.used + stats.free == stats.total
        assert stats.free == manager.num_free
        assert manager.num_sequences == len(self.live)
        slots, entries, blocks = set(), 0, set()
        for streams, tables in ((self.live, manager._tables), (self.pins, manager._pinned)):
            assert streams.keys() == tables.keys()
            for key, stream in streams.items():
                table = tables[key].blocks
                assert len(table) == -(-len(stream.tokens) // self.size)
                positions = range(stream.holes * self.size, len(stream.tokens))
                slots |= {(table[p // self.size], p % self.size) for p in positions}
                entries += len(table) - stream.holes
                blocks |= set(table[stream.holes :])
        assert stats.filled == len(slots)
        assert stats.saved == entries - len(blocks)
        assert stats.waste == len(blocks) * self.size - len(slots)


def check_replay(replay: BlockReplay, manager: BlockManager) -> None:
    """What follows from the events is what the manager holds, now."""

    def blocks_of(tables: dict[int, BlockTable]) -> dict[int, list[int]]:
        return {key: table.blocks for key, table in tables.items()}

    def tokens_of(tables: dict[int, BlockTable]) -> dict[int, int]:
        return {key: table.num_tokens for key, table in tables.items()}

    host = manager._host
    assert replay.tables == blocks_of(manager._tables)
    assert replay.pinned == blocks_of(manager._pinned)
    assert replay.swapped == blocks_of(host.tables)
    assert replay.num_tokens == tokens_of(manager._tables | host.tables)
    assert replay.pinned_tokens == tokens_of(manager._pinned)
    assert replay.cached == {node.block for node in manager._cache.nodes()}
    for counts, pool, busy in (
        (replay.ref_counts, manager._pool, manager._busy),
        (replay.host_ref_counts, host.pool, host.busy),
    ):
        held = Counter(busy.deferred if busy else ()) + counts
        assert held == {b: n for b, n in enumerate(pool.ref_counts if pool else ()) if n}
    stats = manager.stats()
    replayed = replay.stats(num_blocks=stats.total + 1, block_size=manager.block_size)
    # What a move still reads may have been shared again, from the cache: then it is in a table.
    only_read = set(manager._busy.deferred) - replay.ref_counts.keys()
    num_deferred = len(only_read)
    deferred = {"used": replayed.used + num_deferred, "free": replayed.free - num_deferred}
    idle = len(only_read & replay.cached)
    deferred["cached"] = replayed.cached - idle
    assert dataclasses.replace(replayed, **deferred) == stats
