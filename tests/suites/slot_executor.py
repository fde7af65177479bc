"""An executor without a device: it models what every slot of the pool holds, and checks each read.

A slot holds one integer, made of the token and its position. Swap-outs, swap-ins, copies, writes
and reads are done in this order, as on the device. The next token is a hash of the context as read
back through the block table, so a wrong, missing, foreign or stale slot changes every later token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from suites.beam_simulation import best_candidates, sums_after
from suites.slot_model import EMPTY, encode, next_token

from paged_jax.blocks.block_manager import BlockCopy, BlockManager
from paged_jax.scheduling.beam import Candidate
from paged_jax.scheduling.plan import Plan, PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence


class SlotPool:
    """The content of every slot, int64 [num_blocks, block_size]."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.full((num_blocks, block_size), EMPTY, np.int64)

    def copy_blocks(self, copies: SequenceOf[BlockCopy]) -> None:
        """All copies at once: their order must not matter."""
        sources, destinations = [c.src for c in copies], [c.dst for c in copies]
        assert len(set(destinations)) == len(destinations), copies
        assert not set(sources) & set(destinations), copies
        assert 0 not in sources + destinations, copies
        for src, dst in reversed(copies):
            self.slots[dst] = self.slots[src]

    def write(self, table: np.ndarray, start: int, values: np.ndarray) -> list[tuple[int, int]]:
        """Write positions from ``start`` on; returns the slots written."""
        positions = np.arange(start, start + len(values))
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        assert (blocks > 0).all(), "the null block is never written"
        self.slots[blocks, offsets] = values
        return list(zip(blocks.tolist(), offsets.tolist(), strict=True))

    def read(self, table: np.ndarray, num_tokens: int) -> np.ndarray:
        """The first ``num_tokens`` slots of a table."""
        return self.slots[table].reshape(-1)[:num_tokens]

    @property
    def block_size(self) -> int:
        """Slots a block."""
        return self.slots.shape[1]


class StepValues(NamedTuple):
    """What a step yields: see ``Scheduler.update``."""

    tokens: list[int]
    candidates: dict[Request, list[Candidate]]


class SlotExecutor:
    """Runs plans on a ``SlotPool`` and row state, and checks whatever a row reads."""

    def __init__(
        self, manager: BlockManager, *, max_num_seqs: int, window: int | None = None
    ) -> None:
        self._manager = manager
        self._window = window
        self._pool = SlotPool(manager.num_usable + 1, manager.block_size)
        self._host_pool: dict[int, np.ndarray] = {}
        self._last_tokens: list[int | None] = [None] * max_num_seqs
        self._streams: dict[Sequence, list[int]] = {}

    def execute(self, plan: Plan) -> StepValues:
        """Do a step; returns a token for each sampled position, and what may follow each beam."""
        self._swap(plan)
        self._pool.copy_blocks(plan.copies)
        for sequence in plan.admitted:
            self._last_tokens[sequence.state_slot] = None
        rows = plan.prefill_rows + plan.decode_rows + plan.verify_rows
        written: list[tuple[int, int]] = []
        for row in rows:
            written += self._write(row, is_decode=row in plan.decode_rows)
        assert len(set(written)) == len(written), "two rows write one slot"
        for row in plan.branch_rows:
            self._streams.setdefault(row.sequence, [])
            assert row.num_new == 0
            assert row.start == row.sequence.num_prompt
        contexts = [self._read(row) for row in plan.rows]
        tokens = []
        searches: dict[Request, list[np.ndarray]] = {}
        for row, context in zip(plan.rows, contexts, strict=True):
            if row.samples and row.sequence.request.is_search:
                seen = context[-(self._window or len(context)) :]
                searches.setdefault(row.sequence.request, []).append(sums_after(row, seen))
                tokens.append(EMPTY)
            elif row.samples:
                tokens += self._sample(row, context)
        candidates = {request: best_candidates(request, sums) for request, sums in searches.items()}
        return StepValues(tokens, candidates)

    def _swap(self, plan: Plan) -> None:
        """Swap-outs, then swap-ins: what nobody else needs is wiped, and comes back once.

        Two groups that leave in one step move what they share once each.
        """
        filled = [swap.host for swap in plan.swap_outs]
        for blocks in (filled, *zip(*plan.swap_ins, strict=True)):
            assert len(set(blocks)) == len(blocks), plan
        assert not any(0 in swap for swap in (*plan.swap_outs, *plan.swap_ins))
        for device, host in plan.swap_outs:
            self._host_pool[host] = self._pool.slots[device].copy()
        for device, _ in plan.swap_outs:
            is_cached = self._manager._pool.is_kept(device)
            if device in self._manager._busy.deferred and not is_cached:
                self._pool.slots[device] = EMPTY
        for device, host in plan.swap_ins:
            self._pool.slots[device] = self._host_pool.pop(host)

    def _sample(self, row: PlanRow, context: np.ndarray) -> list[int]:
        """Each position's token; the stream goes on with those that the drafts lead to."""
        sequence, is_right = row.sequence, True
        tokens: list[int] = []
        for place in range(row.num_sampled):
            end = len(context) - len(row.drafts) + place
            seen = context[max(end - (self._window or end), 0) : end]
            tokens.append(next_token(seen, sample_index=sequence.sample_index))
            if is_right:
                self._streams[sequence].append(tokens[-1])
                self._last_tokens[sequence.state_slot] = tokens[-1]
            is_right = is_right and (*row.drafts, -1)[place] == tokens[-1]
        return tokens

    def _write(self, row: PlanRow, *, is_decode: bool) -> list[tuple[int, int]]:
        sequence, stop = row.sequence, row.start + row.num_new
        is_beam = sequence.request.is_search
        if is_beam:
            # A place for beams: whose tokens it holds is the host's to say.
            self._streams[sequence] = list(sequence.output_token_ids)
        stream = self._streams.setdefault(sequence, [])
        assert row.from_host or not (is_beam and is_decode)
        is_new = self._last_tokens[sequence.state_slot] is None
        if row.from_host:
            assert is_decode or row.drafts
            assert is_beam or is_new or row.drafts, "the state is not new"
            tokens = row.token_ids
            assert len(tokens) == row.num_new, "the host does not know the token"
        elif is_decode:
            tokens = [self._last_tokens[sequence.state_slot]]
        else:
            tokens = row.token_ids
        everything = [*sequence.prompt_token_ids, *stream, *row.drafts]
        assert tokens == everything[row.start : stop], (sequence, tokens, row)
        values = encode(everything[:stop])[row.start :]
        table = self._manager.table_array(sequence.seq_id)
        written = self._pool.write(table, row.start, values)
        for block, _ in written:
            assert not self._manager._pool.is_kept(block), f"{row} writes to a cached block"
        return written

    def _read(self, row: PlanRow) -> np.ndarray:
        sequence, kv_len = row.sequence, row.start + row.num_new
        context = self._pool.read(self._manager.table_array(sequence.seq_id), kv_len)
        tokens = [*sequence.prompt_token_ids, *self._streams[sequence], *row.drafts][:kv_len]
        # Its first query sees the furthest back.
        begin = max(row.start + (row.num_new > 0) - (self._window or kv_len), 0)
        seen, expected = context[begin:], encode(tokens)[begin:]
        np.testing.assert_array_equal(seen, expected, err_msg=repr(sequence))
        return context
