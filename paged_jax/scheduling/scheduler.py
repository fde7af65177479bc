"""First come, first served continuous batching with chunked prefill (paper section 4.5)."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.limits import capped_max_tokens
from paged_jax.scheduling.lineup import Lineup
from paged_jax.scheduling.plan import NEEDS_VALUES, NeedsValues, Plan, PlanRow
from paged_jax.scheduling.prefixes import Prefixes
from paged_jax.scheduling.prompt_rows import PromptBudget, blocks_owed, plan_chunk
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import FinishReason, Sequence, SequenceStatus

# A request preempted this often comes back only when it can stay: no request thrashes.
_MAX_OPTIMISTIC_PREEMPTIONS = 2


class Scheduler:
    """Decides what each step computes; owns the waiting line, the running set and state slots.

    Every step all decoding sequences get one row, then prompts in progress continue, then waiting
    requests are admitted while sequences, tokens, rows and blocks allow. Counters advance when a
    plan is made, so the next one can be made before its tokens have arrived. When blocks run out
    the latest arrival gives up all of its blocks and goes back to the front of the line; prompt
    and generated tokens are then its new prompt. While anything is preempted, nothing new starts.
    A request's sequences (``SequenceGroup``) start, lose their blocks and resume together.
    Full blocks are published in the prefix cache once their step has returned; whoever starts, new
    or resumed, looks its known tokens up there and computes only the others.

    Each step costs O(1) for each running sequence, and nothing for pool blocks or waiting requests.

    Args:
      block_manager: the tables, used by this scheduler alone.
      max_num_seqs: most running sequences; their state slots are ``0 .. max_num_seqs - 1``.
      max_num_batched_tokens: most prompt tokens in one step.
      prefill_row_len: most tokens of a prefill row (T).
      prefill_chunk_len: most tokens of one prompt in one step; None means the whole budget.
      max_model_len: longest context in tokens.
      prefix_cache: publish and share what every request computes; False: registered prefixes alone
        are shared.

    Attributes:
      num_preemptions: sequences that have lost their blocks so far, each time counted.
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
        prefix_cache: bool = True,
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
        self._lineup = Lineup(max_num_seqs)
        self._prefixes = Prefixes(block_manager, is_automatic=prefix_cache)
        self._num_added = 0
        self._num_sequences = 0
        self._num_steps = 0
        self._num_in_flight = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return sum(len(group.with_tables) for group in self._lineup.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started yet."""
        return len(self._lineup.waiting)

    @property
    def num_preempted(self) -> int:
        """Requests that lost their blocks and wait to resume."""
        return len(self._lineup.preempted)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request lives."""
        return bool(self._lineup.live)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold blocks, in arrival order."""
        groups = self._lineup.running
        return tuple(sequence for group in groups for sequence in group.with_tables)

    @property
    def max_prefill_rows(self) -> int:
        """Most prefill rows of a step."""
        return -(-self._max_num_batched_tokens // self._row_len)

    def add(self, request: Request) -> SequenceGroup:
        """Put a request at the end of the line.

        Raises:
          ValueError: the prompt is empty or leaves no room for one new token of each sequence (with
            ``max_tokens=0``: does not fit itself) in ``max_model_len`` or in the whole pool, the
            request wants more sequences than ``max_num_seqs``, or a live request has the same id;
            or it is a prefix to stay that would leave too little room.
        """
        other = self._lineup.live.get(request.request_id)
        if other is not None:
            raise ValueError(f"request_id={request.request_id!r} must be new, it is live: {other}")
        max_tokens = capped_max_tokens(
            request,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            num_usable=self._prefixes.num_usable(request),
            block_size=self._manager.block_size,
        )
        if request.is_prefix:
            self._prefixes.require_room(request, self._lineup.live.values())
        request.arrival = self._num_added
        group = SequenceGroup(request, first_seq_id=self._num_sequences, max_tokens=max_tokens)
        self._num_added += 1
        self._num_sequences += request.num_samples
        self._lineup.add(group)
        return group

    def cancel(self, request_id: Hashable) -> bool:
        """End a request in whatever state it is; False when no live request has that id."""
        group = self._lineup.live.get(request_id)
        if group is None:
            return False
        for sequence in tuple(group.live):
            self.finish(sequence, "cancelled")
        return True

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """End a sequence and free its blocks at once; False when it had ended before.

        A stop string completed by the very token that reached ``max_tokens`` wins: 'stop' replaces
        'length'. The request ends with the last of its sequences.
        """
        if sequence.is_finished:
            if reason == "stop" and sequence.finish_reason == "length":
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return False
        if self._manager.has_table(sequence.seq_id):
            self._prefixes.release(sequence, reason)
        self._lineup.end(sequence)
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
        for group in self._lineup.running:
            for sequence in group.with_tables:
                if sequence.num_computed < sequence.num_prefill:
                    prefilling.append(sequence)
                elif len(sequence.output_token_ids) + sequence.num_pending < sequence.max_tokens:
                    decoding.append(sequence)
        if not self._make_room(decoding, prefilling):
            return NEEDS_VALUES
        plan = Plan(self._num_steps + 1)
        self._plan_decodes(plan, decoding)
        self._plan_prompts(plan, prefilling)
        plan.copies.extend(self._manager.step_copies)
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
        if plan.step == self._num_steps:
            self._manager.begin_step()
        self._prefixes.publish(plan)
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
        self._lineup.check_integrity(self._manager)

    def _make_room(self, decoding: list[Sequence], prefilling: list[Sequence]) -> bool:
        """Preempt until every decoding sequence can append; False to wait for values first."""
        manager = self._manager
        if manager.num_free >= len(decoding):
            return True
        while manager.num_new_blocks_for([s.seq_id for s in decoding]) > manager.num_free:
            if self._num_in_flight:
                return False
            if len(self._lineup.running) == 1:
                raise RuntimeError(
                    f"the one running request needs a block, {manager.num_free} of "
                    f"{manager.num_usable} are free, and it holds the rest: {self.running[0]}"
                )
            victim = self._lineup.latest
            for sequences in (decoding, prefilling):
                while sequences and sequences[-1].request is victim.request:
                    sequences.pop()
            self._preempt(victim)
        return True

    def _plan_decodes(self, plan: Plan, decoding: list[Sequence]) -> None:
        append, rows = self._manager.append, plan.decode_rows
        for sequence in decoding:
            copies = append(sequence.seq_id)
            assert copies is not None, "room was made before"
            rows.append(PlanRow(sequence, sequence.num_computed, 1, True))
            sequence.num_computed += 1
            sequence.num_pending += 1

    def _plan_prompts(self, plan: Plan, prefilling: list[Sequence]) -> None:
        manager = self._manager
        budget = PromptBudget(
            self._max_num_batched_tokens, self.max_prefill_rows, self._row_len, self._chunk_len
        )
        debt = 0
        for sequence in prefilling:
            group = self._lineup.group_of(sequence)
            plan_chunk(plan, group, sequence, budget, manager)
            debt += blocks_owed(group, sequence, manager)
        while budget.num_tokens and budget.num_rows and self._lineup.free_slots:
            group = self._lineup.next
            if group is None:
                return
            prefix = self._prefixes.lookup(group)
            if not self._can_start(group, debt, prefix):
                return
            self._start(group, prefix)
            plan.admitted.extend(group.live)
            plan_chunk(plan, group, group.leader, budget, manager, prefix=prefix)
            debt += blocks_owed(group, group.leader, manager)

    def _can_start(self, group: SequenceGroup, debt: int, prefix: PrefixMatch | None) -> bool:
        """Whether all known tokens fit beside the prompts in progress, which ``debt`` blocks.

        What is shared with others, by ``prefix``, is there already.
        """
        manager, num_live = self._manager, len(group.live)
        if num_live > len(self._lineup.free_slots):
            return False
        worst_case = group.max_blocks(manager.block_size)
        num_blocks = group.known_blocks(manager.block_size) + num_live
        num_new = min(num_blocks, worst_case) - self._prefixes.num_held(prefix)
        if num_new + debt > manager.num_free:
            return False
        can_be_preempted = group.num_preemptions < _MAX_OPTIMISTIC_PREEMPTIONS
        if can_be_preempted:
            return True
        return self._lineup.worst_case_blocks + worst_case <= manager.num_usable

    def _start(self, group: SequenceGroup, prefix: PrefixMatch | None) -> None:
        if prefix and group.num_preemptions == 0:
            group.request.num_cached_tokens = prefix.num_tokens
        group.needs_fork = len(group.live) > 1
        most = group.max_blocks(self._manager.block_size)
        self._lineup.start(group, worst_case_blocks=most)
        for sequence in group.live:
            sequence.num_prefill = sequence.num_tokens

    def _preempt(self, group: SequenceGroup) -> None:
        num_shared = group.leader.num_prompt
        for sequence in group.live:
            is_leader = sequence is group.leader
            num_own = sequence.num_computed - (0 if is_leader else num_shared)
            self.num_preemptions += 1
            self.num_recomputed_tokens += max(num_own, 0)
            if self._manager.has_table(sequence.seq_id):
                self._manager.free(sequence.seq_id)
            sequence.num_preemptions += 1
            sequence.num_computed = 0
        self._lineup.put_back(group)
