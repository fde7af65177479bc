"""Random operations on the block manager against a model of what every slot must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from suites.host_simulation import SlotPool

from paged_jax.blocks.block_manager import BlockCopy, BlockManager


class BlockManagerMachine(RuleBasedStateMachine):
    """Every token is a fresh number; a step's copies, then its writes, are done at its end."""

    @initialize(
        num_blocks=st.sampled_from([40, 20, 10, 5]), block_size=st.sampled_from([4, 1, 2, 3, 8])
    )
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks=num_blocks, block_size=block_size)
        self.pool = SlotPool(num_blocks, block_size)
        self.block_size = block_size
        self.tokens: dict[int, list[int]] = {}
        self.written_from: dict[int, int] = {}
        self.wrote: set[int] = set()
        self.copies: list[BlockCopy] = []
        self.num_made = 0
        self.num_ids = 0
        self.allocate(block_size + 1)

    def new_tokens(self, count: int) -> list[int]:
        self.num_made += count
        return list(range(self.num_made - count, self.num_made))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(num_tokens=st.sampled_from([3, 7, 1, 4, 8, 24]))
    def allocate(self, num_tokens: int) -> None:
        seq_id, self.num_ids = self.num_ids, self.num_ids + 1
        can = self.manager.can_allocate(num_tokens)
        assert can == (-(-num_tokens // self.block_size) <= self.manager.num_free)
        assert self.manager.allocate(seq_id, num_tokens=num_tokens) is can
        if can:
            self.tokens[seq_id] = self.new_tokens(num_tokens)
            self.written_from[seq_id] = 0
            self.wrote.add(seq_id)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 5]))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        self.append_to(self.pick(data), num_tokens)

    @precondition(lambda self: self.tokens)
    @rule(reverse=st.booleans(), in_new_step=st.booleans())
    def append_all(self, reverse: bool, in_new_step: bool) -> None:
        if in_new_step:
            self.end_step()
        for seq_id in sorted(self.tokens, reverse=reverse):
            self.append_to(seq_id, 1)
            self.manager.check_integrity()

    @precondition(lambda self: 0 < len(self.tokens) < 8)
    @rule(data=st.data(), num_forks=st.integers(1, 3), frees_parent=st.booleans())
    def branch(self, data: st.DataObject, num_forks: int, frees_parent: bool) -> None:
        parent_id = self.pick(data)
        self.end_step()
        children = [self.fork_from(parent_id) for _ in range(num_forks)]
        for seq_id in children:
            self.append_to(seq_id, 1)
        if frees_parent:
            self.free_one(parent_id)

    def append_to(self, seq_id: int, num_tokens: int) -> None:
        before = self.manager.table_array(seq_id).tolist()
        can = self.manager.can_append(seq_id, num_tokens=num_tokens)
        assert can == (num_tokens <= self.manager.room(seq_id))
        if can and self.must_wait(seq_id):
            with pytest.raises(ValueError, match="must wait for the next step"):
                self.manager.append(seq_id, num_tokens=num_tokens)
            assert self.manager.table_array(seq_id).tolist() == before
            return
        copies = self.manager.append(seq_id, num_tokens=num_tokens)
        assert (copies is not None) is can
        if copies is None:
            assert self.manager.table_array(seq_id).tolist() == before
            return
        assert len(copies) <= 1
        self.copies += copies
        self.wrote.add(seq_id)
        self.written_from[seq_id] = min(self.written_from[seq_id], len(self.tokens[seq_id]))
        self.tokens[seq_id] += self.new_tokens(num_tokens)

    def must_wait(self, seq_id: int) -> bool:
        """Whether the block to copy may hold tokens of this very step."""
        is_partial = len(self.tokens[seq_id]) % self.block_size != 0
        last = self.manager.table_array(seq_id)[-1]
        holders = [other for other in self.tokens if last in self.manager.table_array(other)]
        return is_partial and len(holders) > 1 and seq_id in self.wrote

    @precondition(lambda self: 0 < len(self.tokens) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.fork_from(self.pick(data))

    def fork_from(self, parent_id: int) -> int:
        child_id, self.num_ids = self.num_ids, self.num_ids + 1
        self.manager.fork(parent_id, child_id)
        self.tokens[child_id] = list(self.tokens[parent_id])
        self.written_from[child_id] = self.written_from[parent_id]
        if parent_id in self.wrote:
            self.wrote.add(child_id)
        return child_id

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        num_tokens = data.draw(st.integers(1, len(self.tokens[seq_id])))
        self.manager.trim(seq_id, num_tokens=num_tokens)
        del self.tokens[seq_id][num_tokens:]
        self.written_from[seq_id] = min(self.written_from[seq_id], num_tokens)

    @precondition(lambda self: len(self.tokens) > 1)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(self.pick(data))

    def free_one(self, seq_id: int) -> None:
        self.manager.free(seq_id)
        del self.tokens[seq_id], self.written_from[seq_id]

    @precondition(lambda self: self.wrote)
    @rule()
    def end_step(self) -> None:
        self.pool.copy_blocks(self.copies)
        for seq_id, tokens in self.tokens.items():
            start = self.written_from[seq_id]
            self.pool.write(self.manager.table_array(seq_id), start, np.array(tokens[start:], int))
            self.written_from[seq_id] = len(tokens)
        for seq_id, tokens in self.tokens.items():
            table = self.manager.table_array(seq_id)
            assert self.pool.read(table, len(tokens)).tolist() == tokens
        self.copies = []
        self.wrote.clear()
        self.manager.begin_step()

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.used + stats.free == stats.total
        assert self.manager.num_sequences == len(self.tokens)
        for seq_id, tokens in self.tokens.items():
            assert self.manager.num_tokens(seq_id) == len(tokens)
            assert self.manager.num_blocks(seq_id) == -(-len(tokens) // self.block_size)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.end_step()
            for seq_id in self.tokens:
                self.manager.free(seq_id)
            self.manager.check_integrity()
            assert self.manager.num_free == self.manager.num_usable


class TestBlockManager(BlockManagerMachine.TestCase):
    settings = settings(
        max_examples=40, stateful_step_count=50, deadline=None, derandomize=True
    )  # 2,000 operations


@pytest.mark.long
class TestBlockManagerLong(BlockManagerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
