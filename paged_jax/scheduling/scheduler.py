"""First come, first served continuous batching with chunked prefill (paper section 4.5)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.integrity import check_sequence
from paged_jax.scheduling.limits import capped_max_tokens
from paged_jax.scheduling.plan import NEEDS_VALUES, NeedsValues, Plan, PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import FinishReason, Sequence, SequenceStatus

# A sequence preempted this often comes back only when it can stay: no request thrashes.
_MAX_OPTIMISTIC_PREEMPTIONS = 2


@dataclasses.dataclass(slots=True)
class _Budget:
    """What is left of a step for prompts."""

    num_tokens: int
    num_rows: int


class Scheduler:
    """Decides what each step computes; owns the waiting line, the running set and state slots.

    Every step all decoding sequences get one row, then prompts in progress continue, then waiting
    requests are admitted while sequences, tokens, rows and blocks allow. Counters advance when a
    plan is made, so the next one can be made before its tokens have arrived. When blocks run out
    the latest arrival gives up all of its blocks and goes back to the front of the line; prompt
    and generated tokens are then its new prompt. While anything is preempted, nothing new starts.

    Each step costs O(1) for each running sequence, and nothing for pool blocks or waiting requests.

    Args:
      block_manager: the tables, used by this scheduler alone.
      max_num_seqs: most running sequences; their state slots are ``0 .. max_num_seqs - 1``.
      max_num_batched_tokens: most prompt tokens in one step.
      prefill_row_len: most tokens of a prefill row (T).
      prefill_chunk_len: most tokens of one prompt in one step; None means the whole budget.
      max_model_len: longest context in tokens.

    Attributes:
      num_preemptions: preemptions so far.
      num_recomputed_tokens: computed tokens that preemptions have thrown away.

    Raises:
      ValueError: a limit is below 1.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_row_len: int,
        prefill_chunk_len: int | None = None,
        max_model_len: int,
    ) -> None:
        chunk_len = max_num_batched_tokens if prefill_chunk_len is None else prefill_chunk_len
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("prefill_row_len", prefill_row_len),
            ("prefill_chunk_len", chunk_len),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        self._manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._row_len = prefill_row_len
        self._chunk_len = chunk_len
        self._max_model_len = max_model_len
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        # All three are in arrival order, everyone preempted is later than everyone running, and
        # everyone waiting is later still.
        self._running: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._live: dict[Hashable, Sequence] = {}
        self._free_slots = list(range(max_num_seqs))[::-1]
        # Blocks that the running sequences hold if each runs to its max_tokens.
        self._worst_case_blocks = 0
        self._num_added = 0
        self._num_steps = 0
        self._num_in_flight = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started yet."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Sequences that lost their blocks and wait to resume."""
        return len(self._preempted)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request lives."""
        return bool(self._live)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in arrival order."""
        return tuple(self._running)

    @property
    def max_prefill_rows(self) -> int:
        """Most prefill rows of a step."""
        return -(-self._max_num_batched_tokens // self._row_len)

    def add(self, request: Request) -> Sequence:
        """Put a request at the end of the line.

        Raises:
          ValueError: the prompt is empty or leaves no room for one new token (with
            ``max_tokens=0``: does not fit itself) in ``max_model_len`` or in the whole pool, or a
            live request has the same id.
        """
        if request.request_id in self._live:
            other = self._live[request.request_id]
            raise ValueError(f"request_id={request.request_id!r} must be new, it is live: {other}")
        max_tokens = capped_max_tokens(
            request,
            max_model_len=self._max_model_len,
            num_slots=self._manager.num_usable * self._manager.block_size,
        )
        request.arrival = self._num_added
        sequence = Sequence(request, seq_id=self._num_added, max_tokens=max_tokens)
        self._num_added += 1
        self._live[request.request_id] = sequence
        self._waiting[sequence] = None
        return sequence

    def cancel(self, request_id: Hashable) -> bool:
        """End a request in whatever state it is; False when no live request has that id."""
        sequence = self._live.get(request_id)
        return sequence is not None and self.finish(sequence, "cancelled")

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """End a sequence and free its blocks at once; False when it had ended before.

        A stop string completed by the very token that reached ``max_tokens`` wins: 'stop' replaces
        'length'.
        """
        if sequence.is_finished:
            if reason == "stop" and sequence.finish_reason == "length":
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        elif sequence.status is SequenceStatus.PREEMPTED:
            del self._preempted[sequence]
        else:
            del self._waiting[sequence]
        del self._live[sequence.request.request_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.num_pending = 0
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        return True

    def schedule(self) -> Plan | NeedsValues:
        """Plan one step; everything in it counts as computed from now on.

        Returns:
          The plan (empty only when no request lives), or ``NEEDS_VALUES`` when nothing can be
          planned before tokens in flight have been given to ``update``.

        Raises:
          RuntimeError: blocks ran out with one running sequence left: someone else holds some.
        """
        self._manager.begin_step()
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            if sequence.num_computed < sequence.num_prefill:
                prefilling.append(sequence)
            elif len(sequence.output_token_ids) + sequence.num_pending < sequence.max_tokens:
                decoding.append(sequence)
        if not self._make_room(decoding, prefilling):
            return NEEDS_VALUES
        plan = Plan(self._num_steps + 1)
        self._plan_decodes(plan, decoding)
        self._plan_prompts(plan, prefilling)
        if not plan.is_empty:
            self._num_steps += 1
            self._num_in_flight += 1
        elif self._num_in_flight:
            return NEEDS_VALUES
        return plan

    def update(self, plan: Plan, sampled_token_ids: SequenceOf[int]) -> list[tuple[Sequence, int]]:
        """Take a step's tokens, in the order of ``plan.sampling_rows``; finish who is done.

        Every plan that is not empty comes back here once, even when its requests have ended: tokens
        of those are dropped. A scoring sequence (``max_tokens=0``) ends here, with the step that
        computes the end of its prompt, and emits nothing.

        Returns:
          Each emitted token with its sequence, in row order.

        Raises:
          ValueError: there is not one token for each sampling row.
        """
        rows = plan.sampling_rows
        if len(sampled_token_ids) != len(rows):
            raise ValueError(
                f"sampled_token_ids has {len(sampled_token_ids)} tokens, it must have one for each "
                f"of the {len(rows)} sampling rows of step {plan.step}"
            )
        if not plan.is_empty:
            self._num_in_flight -= 1
        for row in plan.prefill_rows:
            sequence = row.sequence
            is_end = row.start + row.num_new == sequence.num_prefill
            if sequence.max_tokens == 0 and is_end:
                self.finish(sequence, "length")
        emitted: list[tuple[Sequence, int]] = []
        for row, token in zip(rows, sampled_token_ids, strict=True):
            sequence = row.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_pending -= 1
            sequence.output_token_ids.append(token)
            emitted.append((sequence, token))
            num_output = len(sequence.output_token_ids)
            request = sequence.request
            if token in request.stop_ids and num_output > request.params.min_tokens:
                self.finish(sequence, "stop", token)
            elif num_output >= sequence.max_tokens:
                self.finish(sequence, "length")
        return emitted

    def check_integrity(self) -> None:
        """Prove that queues, state slots, tables and counters agree (the block manager's too).

        Raises:
          RuntimeError: with the numbers, if not.
        """
        self._manager.check_integrity()
        slots = [sequence.state_slot for sequence in self._running]
        line = [*self._running, *self._preempted, *self._waiting]
        arrivals = [sequence.request.arrival for sequence in line]
        worst_case = sum(self._manager.blocks_for(s.max_computed) for s in self._running)
        for holds, what in (
            (sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "state slots"),
            (arrivals == sorted(set(arrivals)), "arrival order"),
            (set(line) == set(self._live.values()), "live requests"),
            (self._manager.num_sequences == len(slots), "tables"),
            (self._worst_case_blocks == worst_case, "worst case"),
        ):
            if not holds:
                raise RuntimeError(
                    f"{what} broken: slots={slots}, free slots={self._free_slots}, line={line}, "
                    f"live={len(self._live)}, tables={self._manager.num_sequences}, "
                    f"worst case={self._worst_case_blocks}, recounted={worst_case}"
                )
        for queue, status in (
            (self._running, SequenceStatus.RUNNING),
            (self._preempted, SequenceStatus.PREEMPTED),
            (self._waiting, SequenceStatus.WAITING),
        ):
            for sequence in queue:
                check_sequence(sequence, status, self._manager)

    def _make_room(self, decoding: list[Sequence], prefilling: list[Sequence]) -> bool:
        """Preempt until every decoding sequence can append; False to wait for values first."""
        manager = self._manager
        if manager.num_free >= len(decoding):
            return True
        while sum(manager.num_new_blocks(s.seq_id) for s in decoding) > manager.num_free:
            if self._num_in_flight:
                return False
            if len(self._running) == 1:
                raise RuntimeError(
                    f"the one running sequence needs a block, {manager.num_free} of "
                    f"{manager.num_usable} are free, and it holds the rest: {self.running[0]}"
                )
            victim = next(reversed(self._running))
            (decoding if decoding[-1] is victim else prefilling).pop()
            self._preempt(victim)
        return True

    def _plan_decodes(self, plan: Plan, decoding: list[Sequence]) -> None:
        append, rows = self._manager.append, plan.decode_rows
        for sequence in decoding:
            copies = append(sequence.seq_id)
            assert copies is not None, "room was made before"
            if copies:
                plan.copies.extend(copies)
            rows.append(PlanRow(sequence, sequence.num_computed, 1, True))
            sequence.num_computed += 1
            sequence.num_pending += 1

    def _plan_prompts(self, plan: Plan, prefilling: list[Sequence]) -> None:
        budget = _Budget(self._max_num_batched_tokens, self.max_prefill_rows)
        debt = 0
        for sequence in prefilling:
            self._plan_chunk(plan, sequence, budget)
            debt += self._blocks_owed(sequence)
        while budget.num_tokens and budget.num_rows and self._free_slots:
            line = self._preempted or self._waiting
            if not line:
                return
            sequence = next(iter(line))
            if not self._can_start(sequence, debt):
                return
            del line[sequence]
            self._start(sequence)
            plan.admitted.append(sequence)
            self._plan_chunk(plan, sequence, budget)
            debt += self._blocks_owed(sequence)

    def _plan_chunk(self, plan: Plan, sequence: Sequence, budget: _Budget) -> None:
        """Add the rows of the next chunk of a prompt, as long as budget and blocks allow."""
        manager, start = self._manager, sequence.num_computed
        num_new = min(
            sequence.num_prefill - start,
            self._chunk_len,
            budget.num_tokens,
            budget.num_rows * self._row_len,
        )
        if start == 0:
            has_room = manager.allocate(sequence.seq_id, num_tokens=num_new)
            assert has_room, "_can_start looked before"
        else:
            # Blocks that earlier sequences took meanwhile come back: wait, and preempt nobody.
            num_new = min(num_new, manager.room(sequence.seq_id))
            if num_new == 0:
                return
            plan.copies.extend(manager.append(sequence.seq_id, num_tokens=num_new) or ())
        end = start + num_new
        samples = end == sequence.num_prefill and sequence.max_tokens > 0
        for row_start in range(start, end, self._row_len):
            row_end = min(row_start + self._row_len, end)
            is_last = samples and row_end == end
            plan.prefill_rows.append(PlanRow(sequence, row_start, row_end - row_start, is_last))
            budget.num_rows -= 1
        budget.num_tokens -= num_new
        sequence.num_computed = end
        sequence.num_pending += samples

    def _blocks_owed(self, sequence: Sequence) -> int:
        """Blocks that the rest of a running sequence's prompt will still take."""
        manager = self._manager
        return manager.blocks_for(sequence.num_prefill) - manager.num_blocks(sequence.seq_id)

    def _can_start(self, sequence: Sequence, debt: int) -> bool:
        """Whether the whole prompt fits beside the prompts in progress, which ``debt`` blocks."""
        manager = self._manager
        worst_case = manager.blocks_for(sequence.max_computed)
        num_blocks = manager.blocks_for(sequence.num_tokens) + 1
        if min(num_blocks, worst_case) + debt > manager.num_free:
            return False
        can_be_preempted = sequence.num_preemptions < _MAX_OPTIMISTIC_PREEMPTIONS
        return can_be_preempted or self._worst_case_blocks + worst_case <= manager.num_usable

    def _start(self, sequence: Sequence) -> None:
        sequence.state_slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        sequence.num_prefill = sequence.num_tokens
        self._running[sequence] = None
        self._worst_case_blocks += self._manager.blocks_for(sequence.max_computed)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.num_recomputed_tokens += sequence.num_computed
        self._release(sequence)
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        sequence.status = SequenceStatus.PREEMPTED
        self._preempted[sequence] = None
        self._preempted.move_to_end(sequence, last=False)

    def _release(self, sequence: Sequence) -> None:
        """Take back blocks and state slot of a running sequence: the one place that frees them."""
        del self._running[sequence]
        self._manager.free(sequence.seq_id)
        self._free_slots.append(sequence.state_slot)
        sequence.state_slot = -1
        self._worst_case_blocks -= self._manager.blocks_for(sequence.max_computed)
