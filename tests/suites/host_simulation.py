"""An executor without a device: it models what every slot of the pool holds, and checks each read.

A slot holds one integer, made of the token and its position. Copies are applied before writes and
writes before reads, as on the device. The next token is a hash of the context as read back through
the block table, so a wrong, missing, foreign or stale slot changes every later token.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from paged_jax.blocks.block_manager import BlockCopy, BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.scheduling.plan import NeedsValues, Plan, PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence

VOCAB_SIZE = 17
EMPTY = -1


def sampling_params(
    max_tokens: int | None = 8,
    *,
    min_tokens: int = 0,
    stop_token_ids: SequenceOf[int] = (),
    ignore_eos: bool = False,
    num_samples: int = 1,
    prompt_logprobs: int | None = None,
) -> types.SimpleNamespace:
    """The fields of SamplingParams that the scheduler reads."""
    return types.SimpleNamespace(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        prompt_logprobs=prompt_logprobs,
        num_samples=num_samples,
    )


def make_request(
    request_id: Hashable,
    prompt: int | SequenceOf[int],
    max_tokens: int | None = 8,
    *,
    eos_token_ids: Iterable[int] = (),
    salt: str | None = None,
    is_prefix: bool = False,
    **params: object,
) -> Request:
    """A request; an integer prompt is a length, filled with tokens that depend on the id."""
    if isinstance(prompt, int):
        seed = zlib.crc32(repr(request_id).encode())
        prompt = [(seed + 7 * i * i) % VOCAB_SIZE for i in range(prompt)]
    arguments = sampling_params(max_tokens, **params)
    return Request(
        request_id,
        prompt,
        arguments,
        eos_token_ids=frozenset(eos_token_ids),
        namespace=Namespace(salt=salt),
        is_prefix=is_prefix,
    )


def encode(tokens: SequenceOf[int]) -> np.ndarray:
    """What the slots of a sequence must hold, from its first position on."""
    return np.arange(len(tokens), dtype=np.int64) * VOCAB_SIZE + np.asarray(tokens, np.int64)


def next_token(context: np.ndarray, *, sample_index: int = 0) -> int:
    """The model: a hash of all that the slots of the context hold; each sample has its own."""
    return zlib.crc32(context.tobytes(), sample_index) % VOCAB_SIZE


def tokens_alone(
    request: Request, *, max_tokens: int, sample_index: int = 0
) -> tuple[list[int], str]:
    """Output and finish reason of a sequence that has the machine to itself."""
    tokens, output = list(request.prompt_token_ids), []
    while len(output) < max_tokens:
        output.append(next_token(encode(tokens), sample_index=sample_index))
        tokens.append(output[-1])
        if output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            return output, "stop"
    return output, "length"


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


class SlotExecutor:
    """Runs plans on a ``SlotPool`` and row state, and checks whatever a row reads."""

    def __init__(self, manager: BlockManager, *, max_num_seqs: int) -> None:
        self._manager = manager
        self._pool = SlotPool(manager.num_usable + 1, manager.block_size)
        self._last_tokens: list[int | None] = [None] * max_num_seqs
        self._streams: dict[Sequence, list[int]] = {}

    def execute(self, plan: Plan) -> list[int]:
        """Do a step; returns one token for each sampling row."""
        self._pool.copy_blocks(plan.copies)
        for sequence in plan.admitted:
            self._last_tokens[sequence.state_slot] = None
        rows = plan.prefill_rows + plan.decode_rows
        written: list[tuple[int, int]] = []
        for row in rows:
            written += self._write(row, is_decode=row in plan.decode_rows)
        assert len(set(written)) == len(written), "two rows write one slot"
        for row in plan.branch_rows:
            self._streams.setdefault(row.sequence, [])
            assert row.num_new == 0
            assert row.start == row.sequence.num_prompt
        rows = plan.prefill_rows + plan.branch_rows + plan.decode_rows
        contexts = [self._read(row) for row in rows]
        tokens = []
        for row, context in zip(rows, contexts, strict=True):
            if row.samples:
                token = next_token(context, sample_index=row.sequence.sample_index)
                self._streams[row.sequence].append(token)
                self._last_tokens[row.sequence.state_slot] = token
                tokens.append(token)
        return tokens

    def _write(self, row: PlanRow, *, is_decode: bool) -> list[tuple[int, int]]:
        sequence, stop = row.sequence, row.start + row.num_new
        stream = self._streams.setdefault(sequence, [])
        if is_decode:
            tokens = [self._last_tokens[sequence.state_slot]]
        else:
            tokens = sequence.token_slice(row.start, stop)
        everything = [*sequence.prompt_token_ids, *stream]
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
        tokens = [*sequence.prompt_token_ids, *self._streams[sequence]][:kv_len]
        np.testing.assert_array_equal(context, encode(tokens), err_msg=repr(sequence))
        return context


class SimulatedServer:
    """The engine's loop, one step in flight, over scheduler and ``SlotExecutor``; checks each step.

    Attributes:
      emitted: the tokens of each sequence as they were emitted.
      prefixes: requests for prefixes to stay; those that are resident have a ``pin_id``.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        prefill_row_len: int = 8,
        prefill_chunk_len: int | None = None,
        max_model_len: int = 1000,
        prefix_cache: bool = True,
        manager: BlockManager | None = None,
    ) -> None:
        self.manager = manager or BlockManager(num_blocks=num_blocks, block_size=block_size)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_row_len=prefill_row_len,
            prefill_chunk_len=prefill_chunk_len,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache,
        )
        self.executor = SlotExecutor(self.manager, max_num_seqs=max_num_seqs)
        self.emitted: dict[Sequence, list[int]] = {}
        self.prefixes: list[Request] = []
        self.num_steps = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_chunk_len = prefill_chunk_len or max_num_batched_tokens
        self._max_row_len = prefill_row_len
        self._in_flight: tuple[Plan, list[int]] | None = None

    def add(self, request: Request) -> Sequence:
        """Add a request; returns its first sequence."""
        group = self.scheduler.add(request)
        self.emitted.update((sequence, []) for sequence in group.sequences)
        if request.is_prefix:
            self.prefixes.append(request)
        return group.leader

    def unpin(self, request: Request) -> None:
        """Let go of a prefix that is resident."""
        self.prefixes.remove(request)
        if request.pin_id is not None:
            self.manager.unpin(request.pin_id)

    def step(self) -> Plan | None:
        """Plan, dispatch, then take the previous step's tokens; None when nothing was planned."""
        plan = self.scheduler.schedule()
        if isinstance(plan, NeedsValues):
            assert self._in_flight is not None, "asks for values although none is in flight"
            self.collect()
            plan = self.scheduler.schedule()
        assert not isinstance(plan, NeedsValues), "asks for values although none is in flight"
        self._check(plan)
        if plan.is_empty:
            self.collect()
            assert not self.scheduler.has_unfinished, "nothing planned, although requests live"
            return None
        self.num_steps += 1
        tokens = self.executor.execute(plan)
        self.collect()
        self._in_flight = plan, tokens
        self.scheduler.check_integrity()
        return plan

    def collect(self) -> None:
        """Take the tokens in flight, if any."""
        if self._in_flight is not None:
            for sequence, token in self.scheduler.update(*self._in_flight):
                self.emitted[sequence].append(token)
        self._in_flight = None
        self.scheduler.check_integrity()

    def drain(self, *, max_steps: int = 10_000) -> None:
        """Step until no request lives, then check outputs and that all blocks are free."""
        first = self.num_steps
        while self.scheduler.has_unfinished:
            self.step()
            assert self.num_steps - first <= max_steps
        self.collect()
        for sequence in self.emitted:
            self.check_output(sequence)
        for request in tuple(self.prefixes):
            self.unpin(request)
        self.manager.begin_step()
        self.manager.check_integrity()
        assert self.manager.num_free == self.manager.num_usable

    def check_output(self, sequence: Sequence) -> None:
        """The output of an ended sequence is what it would have been alone."""
        emitted = self.emitted[sequence]
        assert emitted == sequence.output_token_ids
        expected, reason = tokens_alone(
            sequence.request, max_tokens=sequence.max_tokens, sample_index=sequence.sample_index
        )
        if sequence.finish_reason == "cancelled":
            assert emitted == expected[: len(emitted)]
        else:
            assert (emitted, sequence.finish_reason) == (expected, reason), sequence
            assert sequence.stop_reason == (emitted[-1] if reason == "stop" else None)

    def _check(self, plan: Plan) -> None:
        scheduler, rows = self.scheduler, plan.prefill_rows
        assert scheduler.num_running or not (scheduler.num_waiting or scheduler.num_preempted)
        decoding = [row.sequence for row in plan.decode_rows]
        assert len(set(decoding)) == len(decoding)
        assert not set(decoding) & {row.sequence for row in rows}
        assert all(row.num_new == 1 and row.samples for row in plan.decode_rows)
        assert len(rows) <= scheduler.max_prefill_rows
        assert all(1 <= row.num_new <= self._max_row_len for row in rows)
        assert sum(row.num_new for row in rows) <= self._max_num_batched_tokens
        for sequence in {row.sequence for row in rows}:
            mine = [row for row in rows if row.sequence is sequence]
            assert sum(row.num_new for row in mine) <= self._max_chunk_len
            assert not any(row.samples for row in mine[:-1])
            ends = mine[-1].start + mine[-1].num_new == sequence.num_prefill
            assert mine[-1].samples == (ends and sequence.max_tokens > 0)
        sampling = {row.sequence.request for row in rows if row.samples}
        assert all(row.samples and row.sequence.request in sampling for row in plan.branch_rows)
        for sequence in plan.admitted:
            mine = [row for row in rows if row.sequence is sequence]
            if mine and sequence.num_preemptions == 0:
                assert mine[0].start == sequence.request.num_cached_tokens
        stats = self.manager.stats()
        most = (scheduler.num_running + self.manager.num_pinned) * (self.manager.block_size - 1)
        assert stats.waste <= most
        assert stats.used + stats.free == stats.total
        assert all(sequence.num_preemptions <= 2 for sequence in scheduler.running)
