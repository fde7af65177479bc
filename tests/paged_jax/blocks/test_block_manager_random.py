"""Random operations on the block manager against a model of what every slot must hold.

A slot's content stands for a namespace and all tokens up to its position, as keys and values do. A
step's moves and writes are done at its end, in the order of the device; then every table, whatever
is cached, and the host pool are read back. Blocks that nobody may read any more are poisoned.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from suites.host_simulation import EMPTY, SlotPool

from paged_jax.blocks.block_manager import BlockManager, BlockSwap
from paged_jax.blocks.namespace import Namespace
from paged_jax.blocks.prefix_cache import CachedNode

NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(adapter="a")]
MAX_SEQUENCES = 8


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


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([40, 20, 12, 7, 5]),
        block_size=st.sampled_from([4, 1, 2, 3]),
        num_host_blocks=st.sampled_from([30, 30, 8, 0]),
        publishes=st.sampled_from([True, True, False]),
    )
    def start(
        self, num_blocks: int, block_size: int, num_host_blocks: int, publishes: bool
    ) -> None:
        self.manager = BlockManager(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
        )
        self.size = block_size
        self.publishes = publishes  # what every step wrote
        self.device = SlotPool(num_blocks, block_size)
        self.host = SlotPool(max(num_host_blocks, 1), block_size)
        self.contents: dict[object, int] = {}
        self.live: dict[int, Stream] = {}
        self.swapped: dict[int, Stream] = {}
        self.pins: dict[int, Stream] = {}
        self.swap_outs: list[BlockSwap] = []
        self.swap_ins: list[BlockSwap] = []
        self.num_ids = 0
        self.queries = self.hits = 0
        self.allocate(0, 0, 2 * block_size + 1, 0, True)

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

    def pick(self, data: st.DataObject, among: dict[int, Stream] | None = None) -> int:
        return data.draw(st.sampled_from(sorted(self.live if among is None else among)))

    def new_id(self) -> int:
        self.num_ids += 1
        return self.num_ids - 1

    # --- what one sequence does

    @precondition(lambda self: len(self.live) < MAX_SEQUENCES)
    @rule(
        base=st.integers(0, 1),
        namespace=st.sampled_from([0, 0, 0, 1, 2]),
        num_tokens=st.sampled_from([9, 3, 1, 4, 8, 13, 24]),
        num_other=st.sampled_from([0, 1, 2, 5]),
        looks_up=st.sampled_from([True, True, False]),
    )
    def allocate(
        self, base: int, namespace: int, num_tokens: int, num_other: int, looks_up: bool
    ) -> None:
        """Prompts begin alike: one of two texts, whose last tokens may differ."""
        tokens = [base] * num_tokens
        tokens[max(num_tokens - num_other, 0) :] = [2] * min(num_other, num_tokens)
        self.allocate_one(NAMESPACES[namespace], tokens, looks_up)

    def allocate_one(self, namespace: Namespace, tokens: list[int], looks_up: bool) -> None:
        seq_id, manager, num_tokens = self.new_id(), self.manager, len(tokens)
        stream = Stream(namespace, tokens, seq_id)
        match = manager.lookup(stream.namespace, tokens) if looks_up else None
        begin = match.num_tokens if match else 0
        if match:
            paths = [self.path(n) for n in manager._cache.nodes() if n.namespace == namespace]
            assert begin == max((common_len(path, tokens[:-1]) for path in paths), default=0)
        assert begin < num_tokens
        fits_cold = manager.can_allocate(num_tokens)
        assert fits_cold == (-(-num_tokens // self.size) <= manager.num_free)
        can = manager.can_allocate(num_tokens, prefix=match)
        assert can or not fits_cold, "a hit takes no more room than a miss"
        assert manager.allocate(seq_id, num_tokens=num_tokens, prefix=match) is can
        if not can:
            return
        self.queries += match is not None
        self.hits += begin
        stream.written, stream.wrote = begin, True
        self.live[seq_id] = stream
        if match:
            assert self.table(seq_id)[: len(match.blocks)] == list(match.blocks)
        self.check_writable(seq_id, begin)

    def check_writable(self, seq_id: int, begin: int) -> None:
        """Blocks of positions from ``begin`` on have one holder, and are not in the cache."""
        cached = {node.block for node in self.manager._cache.nodes()}
        for block in self.table(seq_id)[begin // self.size :]:
            assert self.manager.ref_count(block) == 1
            assert block not in cached
            assert block not in {swap.device for swap in self.swap_outs}

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 5]), token=st.integers(0, 2))
    def append(self, data: st.DataObject, num_tokens: int, token: int) -> None:
        self.append_to(self.pick(data), [token] * num_tokens)

    @precondition(lambda self: self.live)
    @rule(reverse=st.booleans(), in_new_step=st.booleans())
    def append_all(self, reverse: bool, in_new_step: bool) -> None:
        if in_new_step:
            self.end_step()
        for seq_id in sorted(self.live, reverse=reverse):
            self.append_to(seq_id, [seq_id % 3])
            self.manager.check_integrity()

    def append_to(self, seq_id: int, tokens: list[int]) -> None:
        manager, stream = self.manager, self.live[seq_id]
        before, num_tokens = self.table(seq_id), len(tokens)
        can = manager.can_append(seq_id, num_tokens=num_tokens)
        assert can == (num_tokens <= manager.room(seq_id))
        is_shared = len(stream.tokens) % self.size and manager.ref_count(before[-1]) > 1
        if can and is_shared and stream.wrote:
            with pytest.raises(ValueError, match="must wait for the next step"):
                manager.append(seq_id, num_tokens=num_tokens)
            assert self.table(seq_id) == before
            return
        num_copies = len(manager.step_copies)
        copies = manager.append(seq_id, num_tokens=num_tokens)
        assert (copies is not None) is can
        if copies is None:
            assert self.table(seq_id) == before
            return
        assert len(copies) == bool(is_shared)
        assert manager.step_copies[num_copies:] == copies
        begin = len(stream.tokens)
        stream.written = min(stream.written, begin)
        stream.tokens += tokens
        stream.wrote = True
        self.check_writable(seq_id, begin)

    @precondition(lambda self: 0 < len(self.live) < MAX_SEQUENCES)
    @rule(data=st.data(), num_forks=st.integers(1, 3), frees_parent=st.booleans())
    def branch(self, data: st.DataObject, num_forks: int, frees_parent: bool) -> None:
        parent_id = self.pick(data)
        self.end_step()
        children = [self.fork_from(parent_id) for _ in range(num_forks)]
        for seq_id in children:
            self.append_to(seq_id, [seq_id % 3])
        if frees_parent:
            self.manager.free(parent_id)
            del self.live[parent_id]

    @precondition(lambda self: 0 < len(self.live) < MAX_SEQUENCES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.fork_from(self.pick(data))

    def fork_from(self, parent_id: int) -> int:
        child_id = self.new_id()
        self.manager.fork(parent_id, child_id)
        self.live[child_id] = self.live[parent_id].fork()
        return child_id

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        stream = self.live[seq_id]
        least = max(1, stream.holes * self.size)
        num_tokens = data.draw(st.integers(least, len(stream.tokens)))
        self.manager.trim(seq_id, num_tokens=num_tokens)
        del stream.tokens[num_tokens:]
        stream.written = min(stream.written, num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), window=st.sampled_from([4, 1, 9]))
    def drop_before(self, data: st.DataObject, window: int) -> None:
        seq_id = self.pick(data)
        stream = self.live[seq_id]
        position = max(stream.written - window, 0)
        self.manager.drop_before(seq_id, position)
        stream.holes = max(stream.holes, position // self.size)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_kept=st.integers(0, 30), other=st.lists(st.integers(0, 2)))
    def ask_again(self, data: st.DataObject, num_kept: int, other: list[int]) -> None:
        """A sequence ends, and a prompt comes that begins as it did."""
        self.end_step()
        seq_id = self.pick(data)
        stream = self.live[seq_id]
        if data.draw(st.booleans()) or len(self.live) >= MAX_SEQUENCES:
            self.manager.free(seq_id)
            del self.live[seq_id]
        self.allocate_one(stream.namespace, [*stream.tokens[:num_kept], *other] or [1], True)

    @precondition(lambda self: self.live or self.swapped)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq_id = self.pick(data, self.live | self.swapped)
        self.manager.free(seq_id)
        (self.swapped if seq_id in self.swapped else self.live).pop(seq_id)

    # --- the prefix cache

    @precondition(lambda self: self.live)
    @rule(data=st.data(), in_parts=st.booleans())
    def publish(self, data: st.DataObject, in_parts: bool) -> None:
        self.publish_one(self.pick(data), in_parts)

    @rule()
    def publish_all(self) -> None:
        for seq_id in self.live:
            self.publish_one(seq_id, False)

    def publish_one(self, seq_id: int, in_parts: bool) -> None:
        manager, stream = self.manager, self.live[seq_id]
        begin = manager.num_published(seq_id) if in_parts else 0
        written = 0 if stream.swapped_in else stream.written
        if begin < len(stream.tokens) and written < len(stream.tokens):
            with pytest.raises(ValueError, match="only what earlier steps wrote"):
                manager.publish(seq_id, stream.namespace, stream.tokens[begin:], begin=begin)
        if begin < written:
            tokens = stream.tokens[begin:written]
            end = manager.publish(seq_id, stream.namespace, tokens, begin=begin)
            assert end == manager.num_published(seq_id) <= written
            assert stream.holes or end == written // self.size * self.size

    @precondition(lambda self: self.live and len(self.pins) < 2)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        stream = self.live[seq_id]
        if stream.holes or stream.swapped_in or stream.written < len(stream.tokens):
            return
        pin_id = self.manager.pin(seq_id, stream.namespace, stream.tokens)
        self.pins[pin_id] = self.live.pop(seq_id)
        match = self.manager.lookup(stream.namespace, [*stream.tokens, 1])
        assert match.num_tokens == len(stream.tokens)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id = self.pick(data, self.pins)
        self.manager.unpin(pin_id)
        del self.pins[pin_id]

    # --- swapping, a group at a time

    @precondition(lambda self: self.live)
    @rule(data=st.data(), in_new_step=st.sampled_from([True, True, False]))
    def swap_out(self, data: st.DataObject, in_new_step: bool) -> None:
        if in_new_step:
            self.end_step()
        self.swap_out_group(self.live[self.pick(data)].group)

    def swap_out_group(self, group: int) -> None:
        members = {i: stream for i, stream in self.live.items() if stream.group == group}
        ids, manager = list(members), self.manager
        if any(stream.wrote or stream.swapped_in for stream in members.values()):
            with pytest.raises(ValueError, match="have no writes or swap-ins in step"):
                manager.swap_out(ids)
            return
        blocks = {block for i in ids for block in self.table(i)[members[i].holes :]}
        can = manager.can_swap_out(ids)
        assert can == (len(blocks) <= manager.num_free_host)
        tables = [self.table(i) for i in ids]
        swaps = manager.swap_out(ids)
        assert (swaps is not None) is can
        if swaps is None:
            assert tables == [self.table(i) for i in ids]
            return
        assert sorted(swap.device for swap in swaps) == sorted(blocks)
        self.swap_outs += swaps
        for i in ids:
            self.swapped[i] = self.live.pop(i)
            assert manager.is_swapped(i)
            assert not manager.has_table(i)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        self.swap_in_group(self.swapped[self.pick(data, self.swapped)].group)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_out_first=st.booleans(), appends=st.booleans())
    def swap_round(self, data: st.DataObject, is_out_first: bool, appends: bool) -> None:
        """Out, in, copies and writes in one step, called in either order."""
        self.end_step()
        others = sorted({stream.group for stream in self.swapped.values()})
        group = self.live[self.pick(data)].group
        if is_out_first:
            self.swap_out_group(group)
        for other in others:
            self.swap_in_group(other)
            members = [i for i, stream in self.live.items() if stream.group == other]
            for seq_id in members if appends else ():
                self.append_to(seq_id, [seq_id % 3])
            if members:
                self.swap_out_group(other)
        if not is_out_first:
            self.swap_out_group(group)

    def swap_in_group(self, group: int) -> None:
        manager = self.manager
        ids = [i for i, stream in self.swapped.items() if stream.group == group]
        can = manager.can_swap_in(ids)
        assert can == (manager.num_swapped_blocks(ids) <= manager.num_free)
        swaps = manager.swap_in(ids)
        assert (swaps is not None) is can
        for i in ids if swaps is not None else ():
            stream = self.live[i] = self.swapped.pop(i)
            stream.swapped_in = True
            assert self.table(i)[: stream.holes] == [0] * stream.holes
        self.swap_ins += swaps or ()

    # --- the device's part

    @rule()
    def end_step(self) -> None:
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
        self.read_back()
        self.poison()
        if self.publishes:
            self.publish_all()

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

    def poison(self) -> None:
        manager, host = self.manager, self.manager._host.pool
        for pool, blocks in ((self.device, manager._pool), (self.host, host)):
            if blocks is not None:
                free = [b for b, count in enumerate(blocks.ref_counts) if not count]
                pool.slots[[b for b in free if b not in blocks.idle]] = EMPTY

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check_integrity()
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
        prefix = manager.prefix_stats()
        assert (prefix.queries, prefix.hit_tokens) == (self.queries, self.hits)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.end_step()
            for seq_id in self.live | self.swapped:
                self.manager.free(seq_id)
            for pin_id in self.pins:
                self.manager.unpin(pin_id)
            self.manager.check_integrity()
            self.manager.begin_step()
            assert self.manager.num_free == self.manager.num_usable
            assert self.manager.allocate(-1, num_tokens=self.manager.num_usable * self.size)
            assert self.manager.stats().cached == 0
            self.manager.check_integrity()


class TestBlockManager(BlockManagerMachine.TestCase):
    settings = settings(
        max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
    )  # over 2,000 operations


@pytest.mark.long
class TestBlockManagerLong(BlockManagerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
