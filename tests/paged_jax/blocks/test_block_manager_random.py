"""Random operations on the block manager against a model of what every slot must hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from suites.block_model import BlockModel, Stream, common_len

from paged_jax.blocks.namespace import Namespace

NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(adapter="a")]
MAX_SEQUENCES = 8


class BlockManagerMachine(BlockModel, RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([40, 20, 12, 7, 5]),
        block_size=st.sampled_from([4, 1, 2, 3]),
        num_host_blocks=st.sampled_from([30, 30, 8, 0]),
        publishes=st.sampled_from([True, True, False]),
    )
    def start(
        self, num_blocks: int, block_size: int, num_host_blocks: int, publishes: bool
    ) -> None:
        self.set_up(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks)
        self.has_host = num_host_blocks > 0
        self.publishes = publishes  # what every step wrote
        self.num_ids = 0
        self.queries = self.hits = 0
        self.allocate(0, 0, 2 * block_size + 1, 0, True)

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

    def allocate_one(self, namespace: Namespace, tokens: list[int], looks_up: bool) -> int:
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
            return seq_id
        self.queries += match is not None
        self.hits += begin
        stream.written, stream.wrote = begin, True
        self.live[seq_id] = stream
        if match:
            assert self.table(seq_id)[: len(match.blocks)] == list(match.blocks)
        self.check_writable(seq_id, begin)
        return seq_id

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
        self.trim_to(seq_id, data.draw(st.integers(least, len(stream.tokens))))

    def trim_to(self, seq_id: int, num_tokens: int) -> None:
        stream = self.live[seq_id]
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

    @precondition(lambda self: len(self.live) < MAX_SEQUENCES)
    @rule(base=st.integers(0, 1), num_other=st.integers(0, 5))
    def fill_the_pool_twice(self, base: int, num_other: int) -> None:
        """A prompt that takes all there is, cached, and then one that begins alike."""
        self.end_step()
        tokens = [base] * (self.manager.num_free * self.size)
        for other in (0, num_other):
            tokens[max(len(tokens) - other, 0) :] = [2] * min(other, len(tokens))
            if tokens:
                seq_id = self.allocate_one(NAMESPACES[0], list(tokens), True)
                assert seq_id in self.live
                self.end_step()
                self.publish_one(seq_id, False)
                self.manager.free(seq_id)
                del self.live[seq_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_drafts=st.integers(1, 6), num_kept=st.integers(0, 6))
    def speculate(self, data: st.DataObject, num_drafts: int, num_kept: int) -> None:
        """Positions are written and given back, and the next one comes in the same step."""
        seq_id = self.pick(data)
        before = len(self.live[seq_id].tokens)
        self.append_to(seq_id, [2] * num_drafts)
        if len(self.live[seq_id].tokens) > before:
            self.trim_to(seq_id, before + min(num_kept, num_drafts))
            self.append_to(seq_id, [1])
        self.publish_one(seq_id, True)

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
        manager, table = self.manager, self.manager._tables[seq_id]
        last, is_partial = table.blocks[-1], len(stream.tokens) % self.size != 0
        is_shared = manager._pool.ref_counts[last] > 1 and not manager._pool.is_kept(last)
        if is_partial and table.is_trimmed and is_shared:
            with pytest.raises(ValueError, match="others must not hold it"):
                manager.pin(seq_id, stream.namespace, stream.tokens)
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
        assert can == (self.has_host and len(blocks) <= manager.num_free_host)
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
    @rule(data=st.data(), is_out_first=st.booleans(), appends=st.booleans(), cancels=st.booleans())
    def swap_round(
        self, data: st.DataObject, is_out_first: bool, appends: bool, cancels: bool
    ) -> None:
        """Out, in, copies and writes in one step, called in either order."""
        self.end_step()
        others = sorted({stream.group for stream in self.swapped.values()})
        group = self.live[self.pick(data)].group
        if is_out_first:
            self.swap_out_group(group)
        if cancels:
            for i in [i for i, stream in self.swapped.items() if stream.group == group]:
                self.manager.free(i)
                del self.swapped[i]
            if self.live:
                self.swap_out_group(self.live[self.pick(data)].group)
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
        self.run_device()
        self.read_back()
        self.check_free_is_clear()
        if self.publishes:
            self.publish_all()

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check_integrity()
        self.check_stats()
        self.check_replay()
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
