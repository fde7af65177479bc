"""Plans one step: who decodes, whose prompt goes on, who starts, and who has to give up blocks."""

from __future__ import annotations

import dataclasses

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.lineup import Lineup
from paged_jax.scheduling.plan import NEEDS_VALUES, NeedsValues, Plan, PlanRow
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.prefixes import Prefixes
from paged_jax.scheduling.prompt_rows import PromptBudget, blocks_owed, plan_chunk
from paged_jax.scheduling.sequence import Sequence
from paged_jax.scheduling.speculation import Speculation
from paged_jax.scheduling.window import drop_past_window


class StepPlanner:
    """Fills a step in this order: decode rows, prompts in progress, who was preempted, who is new.

    Args:
      manager: the tables.
      lineup: the queues.
      preemptor: how blocks are taken away.
      prefixes: what starts with cached blocks.
      speculation: drafts, or None.
      window: keys that a query sees at most in any layer, or None.
      budget: of each step for prompts.
    """

    __slots__ = (
        "_budget",
        "_lineup",
        "_manager",
        "_preemptor",
        "_prefixes",
        "_speculation",
        "_window",
    )

    def __init__(
        self,
        manager: BlockManager,
        lineup: Lineup,
        *,
        preemptor: Preemptor,
        prefixes: Prefixes,
        speculation: Speculation | None,
        window: int | None,
        budget: PromptBudget,
    ) -> None:
        self._manager = manager
        self._lineup = lineup
        self._preemptor = preemptor
        self._prefixes = prefixes
        self._speculation = speculation
        self._window = window
        self._budget = budget

    def plan(self, step: int, *, has_values_in_flight: bool) -> Plan | NeedsValues:
        """Plan step number ``step``; what it computes counts as computed from now on.

        Raises:
          RuntimeError: blocks ran out with one running sequence left: someone else holds some.
        """
        self._manager.begin_step()
        if self._awaits_values():
            return NEEDS_VALUES
        decoding, prefilling = self._candidates()
        plan = Plan(step)
        if not self._make_room(plan, decoding, prefilling, has_values_in_flight):
            return NEEDS_VALUES
        # Blocks left by swap-outs come with the next step: until then all decode, or nobody.
        if not plan.swap_outs or self._fits(decoding, self._manager.num_free):
            self._plan_decodes(plan, decoding)
        if not plan.swap_outs:
            self._plan_prompts(plan, prefilling)
        if self._speculation is not None:
            self._speculation.plan_drafts(plan, self._manager)
        plan.copies.extend(self._manager.step_copies)
        return plan

    def _awaits_values(self) -> bool:
        """Whether a running group's next rows depend on tokens in flight."""
        speculation = self._speculation
        for group in self._lineup.running:
            if group.awaits_values:
                return True
            if speculation is not None and any(map(speculation.waits_for, group.with_tables)):
                return True
        return False

    def _candidates(self) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that decode next, and those in the middle of a prompt, by rank."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for group in self._lineup.running:
            can_decode = group.can_decode
            for sequence in group.with_tables:
                if self._window is not None:
                    drop_past_window(sequence, self._window, self._manager)
                if sequence.num_computed < sequence.num_prefill:
                    prefilling.append(sequence)
                elif not can_decode:
                    continue
                elif len(sequence.output_token_ids) + sequence.num_pending < sequence.max_tokens:
                    decoding.append(sequence)
        return decoding, prefilling

    def _make_room(
        self,
        plan: Plan,
        decoding: list[Sequence],
        prefilling: list[Sequence],
        has_values_in_flight: bool,
    ) -> bool:
        """Preempt until every decoding sequence can append, after swap-outs from the next step on.

        False to wait for values first: they may end a sequence, whose blocks are enough.
        """
        manager, lineup = self._manager, self._lineup
        if manager.num_free >= len(decoding):
            return True
        while not self._fits(decoding, manager.num_free_next):
            if has_values_in_flight:
                return False
            if len(lineup.running) == 1:
                raise RuntimeError(
                    f"the one running request needs a block, {manager.num_free_next} of "
                    f"{manager.num_usable} are free, and it holds the rest: {lineup.latest}"
                )
            victim = lineup.latest
            for sequences in (decoding, prefilling):
                while sequences and sequences[-1].request is victim.request:
                    sequences.pop()
            self._preemptor.preempt(victim, plan)
            lineup.put_back(victim)
        return True

    def _fits(self, decoding: list[Sequence], num_free: int) -> bool:
        """Whether each can append a token in that many blocks."""
        return self._manager.num_new_blocks_for([s.seq_id for s in decoding]) <= num_free

    def _plan_decodes(
        self, plan: Plan, decoding: list[Sequence], *, from_host: bool = False
    ) -> None:
        append, rows = self._manager.append, plan.decode_rows
        for sequence in decoding:
            copies = append(sequence.seq_id)
            assert copies is not None, "room was made before"
            is_new = from_host or sequence.request.is_search
            rows.append(PlanRow(sequence, sequence.num_computed, 1, True, is_new))
            sequence.num_computed += 1
            sequence.num_pending += 1

    def _plan_prompts(self, plan: Plan, prefilling: list[Sequence]) -> None:
        manager, lineup = self._manager, self._lineup
        budget = dataclasses.replace(self._budget)
        groups = [lineup.group_of(sequence) for sequence in prefilling]
        for group, sequence in zip(groups, prefilling, strict=True):
            plan_chunk(plan, group, sequence, budget, manager)
        debt = sum(blocks_owed(group, manager) for group in dict.fromkeys(groups))
        while lineup.free_slots:
            group = lineup.next
            if group is None:
                return
            is_swapped = self._preemptor.is_swapped(group)
            has_budget = budget.num_tokens > 0 and budget.num_rows > 0
            if len(group.live) > len(lineup.free_slots) or not (is_swapped or has_budget):
                return
            prefix = None if is_swapped else self._prefixes.lookup(group)
            if not self._fits_beside(group, debt, prefix):
                return
            if is_swapped:
                self._resume(plan, group)
            else:
                self._start(group, prefix)
            plan.admitted.extend(group.live)
            for sequence in group.with_tables:
                if sequence.num_computed < sequence.num_prefill:
                    plan_chunk(plan, group, sequence, budget, manager, prefix=prefix)
            debt += blocks_owed(group, manager)

    def _fits_beside(self, group: SequenceGroup, debt: int, prefix: PrefixMatch | None) -> bool:
        """Whether all known tokens fit beside the prompts in progress, which ``debt`` blocks.

        What is shared with others, by ``prefix``, is there already.
        """
        manager, lineup = self._manager, self._lineup
        worst_case = group.max_blocks(manager.block_size)
        if self._preemptor.is_swapped(group):
            num_blocks = self._preemptor.num_blocks_to_resume(group)
        else:
            num_blocks = group.known_blocks(manager.block_size)
        num_held = 0 if prefix is None else manager.num_held_of(prefix)
        num_new = min(num_blocks + len(group.live), worst_case) - num_held
        if lineup.worst_case_blocks + worst_case > manager.num_usable:
            # No request thrashes: each preemption doubles what must be left for all who run to grow
            # by, until it can stay for good.
            num_new += ((1 << group.num_preemptions) - 1) * (lineup.num_running + len(group.live))
        return manager.can_admit(group.demand, num_blocks=num_new + debt)

    def _start(self, group: SequenceGroup, prefix: PrefixMatch | None) -> None:
        if prefix and group.num_preemptions == 0:
            group.request.num_cached_tokens = prefix.num_tokens
        group.restart()
        most = group.max_blocks(self._manager.block_size)
        self._lineup.start(group, worst_case_blocks=most)

    def _resume(self, plan: Plan, group: SequenceGroup) -> None:
        """Go on with a swapped group where it was: its decoding sequences do so in this step."""
        most = group.max_blocks(self._manager.block_size)
        self._lineup.start(group, worst_case_blocks=most)
        self._preemptor.swap_in(group, plan)
        if group.can_decode:
            decoding = [s for s in group.with_tables if s.num_computed >= s.num_prefill]
            self._plan_decodes(plan, decoding, from_host=True)
