"""The engine's loop over the real scheduler and an executor without a device, for tests."""

from __future__ import annotations

import types
import zlib
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf

from suites.beam_simulation import check_search
from suites.slot_executor import SlotExecutor, StepValues
from suites.slot_model import VOCAB_SIZE, encode, next_token

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import NeedsValues, Plan
from paged_jax.scheduling.preemption import PreemptionCosts, PreemptionMode
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence
from paged_jax.scheduling.speculation import Drafter

# A byte a token: full blocks are swapped from 2 tokens a block on, single tokens recomputed.
COSTS = PreemptionCosts(
    prefill_tokens_per_second=1.0, swap_bytes_per_second=8.0, swap_seconds_per_block=0.5
)


def sampling_params(
    max_tokens: int | None = 8,
    *,
    min_tokens: int = 0,
    stop_token_ids: SequenceOf[int] = (),
    ignore_eos: bool = False,
    num_samples: int = 1,
    beam_width: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    needs_penalties: bool = False,
    prompt_logprobs: int | None = None,
) -> types.SimpleNamespace:
    """The fields of SamplingParams that the scheduler reads."""
    return types.SimpleNamespace(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        prompt_logprobs=prompt_logprobs,
        num_samples=beam_width or num_samples,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        needs_penalties=needs_penalties,
    )


def make_request(
    request_id: Hashable,
    prompt: int | SequenceOf[int],
    max_tokens: int | None = 8,
    *,
    eos_token_ids: Iterable[int] = (),
    priority: int = 0,
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
        priority=priority,
        namespace=Namespace(salt=salt),
        is_prefix=is_prefix,
    )


def tokens_alone(
    request: Request, *, max_tokens: int, sample_index: int = 0, window: int | None = None
) -> tuple[list[int], str]:
    """Output and finish reason of a sequence that has the machine to itself."""
    tokens, output = list(request.prompt_token_ids), []
    while len(output) < max_tokens:
        context = encode(tokens)[-(window or len(tokens)) :]
        output.append(next_token(context, sample_index=sample_index))
        tokens.append(output[-1])
        if output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            return output, "stop"
    return output, "length"


class Oracle:
    """A drafter that knows what comes, and is wrong on purpose: never, at once, or somewhere."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def propose(self, sequence: Sequence, *, limit: int) -> list[int]:
        assert sequence.num_pending == 1, "asked before the values are known"
        tokens = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        chance = zlib.crc32(repr((sequence.seq_id, len(tokens))).encode())
        num_drafts = min(limit, chance % (self._num_draft_tokens + 1))
        num_right = chance // 64 % (num_drafts + 2)
        for place in range(num_drafts):
            token = next_token(encode(tokens), sample_index=sequence.sample_index)
            tokens.append((token + (place >= num_right)) % VOCAB_SIZE)
        return tokens[len(tokens) - num_drafts :]

    def forget(self, sequence: Sequence) -> None:
        assert sequence.is_finished


class SimulatedServer:
    """The engine's loop, one step in flight, over scheduler and ``SlotExecutor``; checks each step.

    Attributes:
      emitted: the tokens of each sequence as they were emitted.
      searches: the groups that are beam searches.
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
        window: int | None = None,
        mode: PreemptionMode = "recompute",
        num_host_blocks: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.manager = manager or BlockManager(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_row_len=prefill_row_len,
            prefill_chunk_len=prefill_chunk_len,
            max_model_len=max_model_len,
            window=window,
            preemptor=Preemptor(self.manager, mode=mode, costs=COSTS, block_nbytes=block_size),
            drafter=drafter,
            prefix_cache=prefix_cache,
        )
        self.executor = SlotExecutor(self.manager, max_num_seqs=max_num_seqs, window=window)
        self._window = window
        self.emitted: dict[Sequence, list[int]] = {}
        self.searches: list[SequenceGroup] = []
        self.prefixes: list[Request] = []
        self.num_steps = 0
        self._num_host_blocks = self.manager.num_free_host
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_chunk_len = prefill_chunk_len or max_num_batched_tokens
        self._max_row_len = prefill_row_len
        self._in_flight: tuple[Plan, StepValues] | None = None
        self._has_priorities = False

    def add(self, request: Request) -> Sequence:
        """Add a request; returns its first sequence."""
        self._has_priorities = self._has_priorities or request.priority != 0
        group = self.scheduler.add(request)
        if group.beam is None:
            self.emitted.update((sequence, []) for sequence in group.sequences)
        else:
            self.searches.append(group)
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
        values = self.executor.execute(plan)
        self.collect()
        self._in_flight = plan, values
        self.scheduler.check_integrity()
        return plan

    def collect(self) -> None:
        """Take the tokens in flight, if any."""
        if self._in_flight is not None:
            plan, values = self._in_flight
            for sequence, token in self.scheduler.update(plan, *values):
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
        for group in self.searches:
            check_search(group)
        for request in tuple(self.prefixes):
            self.unpin(request)
        self.manager.begin_step()
        self.manager.check_integrity()
        assert self.manager.num_free == self.manager.num_usable
        assert self.manager.num_swapped == 0
        assert self.manager.num_free_host == self._num_host_blocks

    def check_output(self, sequence: Sequence) -> None:
        """The output of an ended sequence is what it would have been alone."""
        emitted = self.emitted[sequence]
        assert emitted == sequence.output_token_ids
        expected, reason = tokens_alone(
            sequence.request,
            max_tokens=sequence.max_tokens,
            sample_index=sequence.sample_index,
            window=self._window,
        )
        if sequence.finish_reason == "cancelled":
            assert emitted == expected[: len(emitted)]
        else:
            assert (emitted, sequence.finish_reason) == (expected, reason), sequence
            assert sequence.stop_reason == (emitted[-1] if reason == "stop" else None)

    def _check(self, plan: Plan) -> None:
        scheduler, rows = self.scheduler, plan.prefill_rows
        if not plan.swap_outs:
            assert scheduler.num_running or not (scheduler.num_waiting or scheduler.num_preempted)
        decoding = [row.sequence for row in plan.decode_rows + plan.verify_rows]
        assert len(set(decoding)) == len(decoding)
        assert not set(decoding) & {row.sequence for row in rows}
        assert all(row.num_new == 1 and row.samples for row in plan.decode_rows)
        assert not any(row.drafts for row in plan.decode_rows + rows)
        for row in plan.verify_rows:
            assert row.num_new == 1 + len(row.drafts) == row.num_sampled > 1
            assert row.start + row.num_new <= row.sequence.max_computed
            assert not row.sequence.request.params.needs_penalties
            assert row.sequence.num_output >= row.sequence.request.params.min_tokens
        assert len(rows) <= scheduler.max_prefill_rows
        assert all(1 <= row.num_new <= self._max_row_len for row in rows)
        assert sum(row.num_new for row in rows) <= self._max_num_batched_tokens
        for sequence in {row.sequence for row in rows}:
            mine = [row for row in rows if row.sequence is sequence]
            assert sum(row.num_new for row in mine) <= self._max_chunk_len
            assert not any(row.samples for row in mine[:-1])
            ends = mine[-1].start + mine[-1].num_new == sequence.num_prefill
            is_beam = sequence.request.is_search
            resumes = is_beam and sequence.num_output > 0
            assert mine[-1].samples == (ends and sequence.max_tokens > 0 and not resumes)
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
        if not self._has_priorities:
            assert all(sequence.num_preemptions <= 2 for sequence in scheduler.running)
        for group in {scheduler._lineup.group_of(row.sequence) for row in plan.decode_rows}:
            if group.beam is not None:
                mine = [row.sequence for row in plan.decode_rows if row.sequence in group.sequences]
                assert mine == group.beam.beams, "beams sample together, by rank"
