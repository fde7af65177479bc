"""Continuous batching with chunked prefill, first come, first served or by priority (paper 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as SequenceOf

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.beam import Candidate
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.limits import capped_max_tokens
from paged_jax.scheduling.lineup import Lineup
from paged_jax.scheduling.plan import NEEDS_VALUES, NeedsValues, Plan
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.prefixes import Prefixes
from paged_jax.scheduling.prompt_rows import PromptBudget
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import FinishReason, Sequence, SequenceStatus
from paged_jax.scheduling.speculation import Drafter, Speculation
from paged_jax.scheduling.step_planner import StepPlanner

TakeToken = Callable[[Sequence, int], str | None]


class Scheduler:
    """Decides what each step computes; owns the waiting line, the running set and state slots.

    Every step all decoding sequences get one row, then prompts in progress continue, then waiting
    requests are admitted while sequences, tokens, rows and blocks allow. Counters advance when a
    plan is made, so the next one can be made before its tokens have arrived. When blocks run out
    whoever ranks last (lowest priority, then latest arrival) gives up all of its blocks and goes
    back to the line, swapped out or to be computed again (``Preemptor``). While it waits nobody
    starts who ranks after it. A request's sequences (``SequenceGroup``) start, lose their blocks
    and resume together.
    Full blocks are published in the prefix cache once their step has returned; whoever starts, new
    or resumed, looks its known tokens up there and computes only the others.

    Each step costs O(1) for each running sequence, and nothing for pool blocks or for those who
    wait, but for the first of them: where sequences and tokens are left, its prompt is looked up.

    Args:
      block_manager: the tables, used by this scheduler alone.
      max_num_seqs: most running sequences; their state slots are ``0 .. max_num_seqs - 1``.
      max_num_batched_tokens: most prompt tokens in one step.
      prefill_row_len: most tokens of a prefill row (T).
      prefill_chunk_len: most tokens of one prompt in one step; None means the whole budget.
      max_model_len: longest context in tokens.
      window: keys that a query sees at most in any layer: blocks that fell behind are freed before
        each step. None: a query sees everything before it.
      preemptor: how blocks are taken away; None: by recomputation.
      drafter: where the drafts of speculative decoding come from; None: no speculation.
      prefix_cache: publish and share what every request computes; False: registered prefixes alone
        are shared.

    Attributes:
      max_prefill_rows: most prefill rows of a step.
      preemptor: counts what it does.
      speculation: what it did so far, or None.

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
        window: int | None = None,
        preemptor: Preemptor | None = None,
        drafter: Drafter | None = None,
        prefix_cache: bool = True,
    ) -> None:
        chunk_len = max_num_batched_tokens if prefill_chunk_len is None else prefill_chunk_len
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("prefill_row_len", prefill_row_len),
            ("prefill_chunk_len", chunk_len),
            ("max_model_len", max_model_len),
            ("window", 1 if window is None else window),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        self._manager = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._window = window
        self.preemptor = preemptor or Preemptor(block_manager)
        self.speculation = None if drafter is None else Speculation(drafter, window=window)
        self._lineup = Lineup(max_num_seqs)
        self._prefixes = Prefixes(block_manager, is_automatic=prefix_cache)
        self.max_prefill_rows = -(-max_num_batched_tokens // prefill_row_len)
        self._planner = StepPlanner(
            block_manager,
            self._lineup,
            preemptor=self.preemptor,
            prefixes=self._prefixes,
            speculation=self.speculation,
            window=window,
            budget=PromptBudget(
                max_num_batched_tokens, self.max_prefill_rows, prefill_row_len, chunk_len
            ),
        )
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
        """The sequences that hold blocks, in order of rank."""
        groups = self._lineup.running
        return tuple(sequence for group in groups for sequence in group.with_tables)

    def add(self, request: Request) -> SequenceGroup:
        """Put a request in the line, behind all others of its priority.

        Raises:
          ValueError: the prompt is empty or leaves no room for one new token of each sequence (with
            ``max_tokens=0``: does not fit itself) in ``max_model_len`` or in the whole pool, the
            request wants more sequences than ``max_num_seqs``, or a live request has the same id;
            or it is a prefix to stay that would leave too little room, or its contiguous regions
            would not fit the pool.
        """
        if request.request_id in self._lineup.live:
            raise ValueError(
                f"request_id={request.request_id!r} must be new: a live request has it"
            )
        max_tokens = capped_max_tokens(
            request,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            num_usable=self._prefixes.num_usable(request),
            block_size=self._manager.block_size,
            window=self._window,
        )
        if request.is_prefix:
            self._prefixes.require_room(request, self._lineup.live.values())
        request.arrival = self._num_added
        group = SequenceGroup(
            request,
            first_seq_id=self._num_sequences,
            max_tokens=max_tokens,
            window=self._window,
        )
        self._manager.require_fits(group.demand)
        self._num_added += 1
        self._num_sequences += request.num_samples
        self._lineup.add(group)
        return group

    def cancel(self, request_id: Hashable) -> bool:
        """End a request in whatever state it is; False when no live request has that id."""
        group = self._lineup.live.get(request_id)
        if group is None:
            return False
        if group.beam is not None:
            group.beam.cancel()
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
        manager, seq_id = self._manager, sequence.seq_id
        if manager.has_table(seq_id):
            self._prefixes.release(sequence, reason)
        elif manager.is_swapped(seq_id):
            manager.free(seq_id, reason=reason)
        self._lineup.end(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
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
        plan = self._planner.plan(self._num_steps + 1, has_values_in_flight=self._num_in_flight > 0)
        if isinstance(plan, NeedsValues):
            return plan
        if not plan.is_empty:
            self._num_steps += 1
            self._num_in_flight += 1
        elif self._num_in_flight:
            return NEEDS_VALUES
        return plan

    def update(
        self,
        plan: Plan,
        sampled_token_ids: SequenceOf[int],
        candidates: Mapping[Request, SequenceOf[Candidate]] | None = None,
        *,
        take_token: TakeToken | None = None,
    ) -> list[tuple[Sequence, int]]:
        """Take a step's tokens, in the order of ``plan.sampling_rows``; finish who is done.

        Every plan that is not empty comes back here once, even when its requests have ended: tokens
        of those are dropped. A scoring sequence (``max_tokens=0``) ends here, with the step that
        computes the end of its prompt, and emits nothing; nor do beams, which take candidates.

        Args:
          plan: what ``schedule`` returned.
          sampled_token_ids: ``PlanRow.num_sampled`` tokens for each sampling row; those of beams
            mean nothing.
          candidates: of each beam search with rows that sample, best first.
          take_token: called with each emitted token; a stop string that it returns ends the
            sequence there.

        Returns:
          Each emitted token with its sequence, in row order.

        Raises:
          ValueError: there are not as many tokens as the rows yield.
        """
        rows = plan.sampling_rows
        num_sampled = sum(row.num_sampled for row in rows)
        if len(sampled_token_ids) != num_sampled:
            raise ValueError(
                f"sampled_token_ids has {len(sampled_token_ids)} tokens, it must have "
                f"{num_sampled} for the {len(rows)} sampling rows of step {plan.step}"
            )
        if not plan.is_empty:
            self._num_in_flight -= 1
        if plan.step == self._num_steps:
            # No later step is planned: what this one moved and wrote is over.
            self._manager.begin_step()
        self._prefixes.publish(plan)
        for row in plan.prefill_rows:
            sequence = row.sequence
            is_end = row.start + row.num_new == sequence.num_prefill
            if sequence.max_tokens == 0 and is_end:
                self.finish(sequence, "length")
        emitted: list[tuple[Sequence, int]] = []
        searching: dict[SequenceGroup, None] = {}
        begin = 0
        for row in rows:
            sequence, tokens = row.sequence, sampled_token_ids[begin : begin + row.num_sampled]
            begin += row.num_sampled
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_pending -= row.num_sampled
            if sequence.request.is_search:
                searching[self._lineup.group_of(sequence)] = None
                continue
            if self.speculation is not None and row.drafts:
                tokens = self.speculation.keep_accepted(row, tokens, self._manager)
            emitted += self._emit(sequence, tokens, take_token)
        for group in searching:
            self._advance(group, (candidates or {})[group.request])
        return emitted

    def _emit(
        self, sequence: Sequence, tokens: SequenceOf[int], take_token: TakeToken | None
    ) -> list[tuple[Sequence, int]]:
        """Append tokens up to the one that ends the sequence, if one does; returns those."""
        emitted: list[tuple[Sequence, int]] = []
        request = sequence.request
        for token in tokens:
            sequence.output_token_ids.append(token)
            emitted.append((sequence, token))
            num_output = len(sequence.output_token_ids)
            if token in request.stop_ids and num_output > request.params.min_tokens:
                self.finish(sequence, "stop", token)
            elif num_output >= sequence.max_tokens:
                self.finish(sequence, "length")
            stop = None if take_token is None else take_token(sequence, token)
            if stop is not None:
                self.finish(sequence, "stop", stop)
            if sequence.is_finished:
                break
        return emitted

    def check_integrity(self) -> None:
        """Prove that queues, state slots, tables and counters agree (the block manager's too).

        Raises:
          RuntimeError: with the numbers, if not.
        """
        self._manager.check_integrity()
        self._lineup.check_integrity(self._manager)

    def _advance(self, group: SequenceGroup, candidates: SequenceOf[Candidate]) -> None:
        """Go on with a beam search, or end it."""
        assert group.beam is not None
        if group.beam.advance(candidates, self._manager):
            for sequence in tuple(group.live):
                self.finish(sequence, group.beam.hypotheses[0].finish_reason)
