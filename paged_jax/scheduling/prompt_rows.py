"""Rows of prompts: chunks within a step's budget, and the fork of a group at its prompt's end."""

from __future__ import annotations

import dataclasses

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import Plan, PlanRow
from paged_jax.scheduling.sequence import Sequence
from paged_jax.scheduling.window import most_blocks


@dataclasses.dataclass(slots=True)
class PromptBudget:
    """What is left of a step for prompts.

    Attributes:
      num_tokens: token positions.
      num_rows: prefill rows.
      row_len: most tokens of a row (T).
      chunk_len: most tokens of one sequence.
    """

    num_tokens: int
    num_rows: int
    row_len: int
    chunk_len: int


def plan_chunk(
    plan: Plan,
    group: SequenceGroup,
    sequence: Sequence,
    budget: PromptBudget,
    manager: BlockManager,
    *,
    prefix: PrefixMatch | None = None,
) -> None:
    """Add the rows of the next chunk of a prompt, as long as budget and blocks allow.

    A sequence that starts has ``prefix``, if anything, already.
    """
    is_start = sequence.num_computed == 0
    start = prefix.num_tokens if prefix else sequence.num_computed
    row_len = budget.row_len
    num_new = min(
        group.prefill_end(sequence) - start,
        budget.chunk_len,
        budget.num_tokens,
        budget.num_rows * row_len,
    )
    if is_start:
        # Of a prompt beyond its windows, the scheduler looked for the windows' blocks only.
        num_new = min(num_new, manager.room_for_new(prefix))
        has_room = manager.allocate(
            sequence.seq_id, num_tokens=start + num_new, prefix=prefix, demand=group.demand
        )
        assert has_room, "the scheduler looked before"
    else:
        # Blocks that earlier sequences took meanwhile come back: wait, and preempt nobody.
        num_new = min(num_new, manager.room(sequence.seq_id))
        if num_new == 0:
            return
        manager.append(sequence.seq_id, num_tokens=num_new)
    end = start + num_new
    # A beam that resumes computes all tokens but its last, and samples with the others.
    samples = end == sequence.num_prefill == sequence.num_tokens and sequence.max_tokens > 0
    for row_start in range(start, end, row_len):
        row_end = min(row_start + row_len, end)
        is_last = samples and row_end == end
        plan.prefill_rows.append(PlanRow(sequence, row_start, row_end - row_start, is_last))
        budget.num_rows -= 1
    budget.num_tokens -= num_new
    sequence.num_computed = end
    sequence.num_pending += samples
    if group.needs_fork and end == sequence.num_prompt:
        _fork(plan, group, manager, samples=samples)


def _fork(plan: Plan, group: SequenceGroup, manager: BlockManager, *, samples: bool) -> None:
    """Share the prompt that ``group.leader`` has computed; ``samples``: all draw a token."""
    leader, *others = group.active
    group.needs_fork = False
    for sequence in others:
        manager.fork(leader.seq_id, sequence.seq_id)
        sequence.num_computed = leader.num_computed
        if samples:
            plan.branch_rows.append(PlanRow(sequence, sequence.num_computed, 0, True))
            sequence.num_pending += 1


def blocks_owed(group: SequenceGroup, manager: BlockManager) -> int:
    """Blocks that the known tokens of a running group's sequences still take.

    To be asked once a step's chunks are planned: a fork among them leaves every sequence with
    tokens of its own to compute, if the group was preempted before.
    """
    if group.needs_fork:
        num_held = manager.num_held_blocks(group.leader.seq_id)
        return max(group.known_blocks(manager.block_size) - num_held, 0)
    num_owed = 0
    for sequence in group.with_tables:
        if sequence.num_computed < sequence.num_prefill:
            most = most_blocks(sequence.num_prefill, group.window, manager.block_size)
            num_owed += max(most - manager.num_held_blocks(sequence.seq_id), 0)
            if len(group.live) > 1:  # it may have to copy its last block first
                num_owed += manager.num_new_blocks(sequence.seq_id)
    return num_owed
