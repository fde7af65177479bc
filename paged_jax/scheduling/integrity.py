"""What must hold for queues, groups and sequences between two scheduler calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.block_pool import NULL_BLOCK
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.line import Line, rank
from paged_jax.scheduling.sequence import Sequence, SequenceStatus
from paged_jax.scheduling.window import first_needed


class Queues(NamedTuple):
    """The scheduler's queues and counters, to be checked."""

    running: Line
    preempted: Line
    waiting: Line
    live: Iterable[SequenceGroup]
    free_slots: list[int]
    num_slots: int
    worst_case_blocks: int


def check_queues(queues: Queues, manager: BlockManager) -> None:
    """Prove that queues, state slots, tables and counters agree.

    Raises:
      RuntimeError: with the numbers, if not.
    """
    slots = [sequence.state_slot for group in queues.running for sequence in group.live]
    line = [*queues.running, *queues.preempted, *queues.waiting]
    by_rank = sorted(line, key=rank)
    worst_case = sum(group.worst_case_blocks for group in queues.running)
    num_tables = sum(len(group.with_tables) for group in queues.running)
    swapped = [group for group in queues.preempted if manager.is_swapped(group.leader.seq_id)]
    num_swapped = sum(len(group.with_tables) for group in swapped)
    admitted = [*queues.running, *queues.preempted]
    for holds, what in (
        (sorted(slots + queues.free_slots) == list(range(queues.num_slots)), "state slots"),
        (by_rank == sorted(line, key=lambda group: group.request.priority), "arrival order"),
        (admitted == [group for group in by_rank if group in admitted], "order"),
        (set(line) == set(queues.live) and all(group.live for group in line), "live requests"),
        (manager.num_sequences == num_tables, "tables"),
        (manager.num_swapped == num_swapped, "swapped tables"),
        (queues.worst_case_blocks == worst_case, "worst case"),
    ):
        if not holds:
            raise RuntimeError(
                f"{what} broken: slots={slots}, free slots={queues.free_slots}, line={line}, "
                f"live={queues.live}, tables={manager.num_sequences} for {num_tables}, "
                f"swapped={manager.num_swapped} for {num_swapped}, "
                f"worst case={queues.worst_case_blocks}, recounted={worst_case}"
            )
    for groups, status in (
        (queues.running, SequenceStatus.RUNNING),
        (queues.preempted, SequenceStatus.PREEMPTED),
        (queues.waiting, SequenceStatus.WAITING),
    ):
        for group in groups:
            _check_group(group, status, manager)


def _check_group(group: SequenceGroup, status: SequenceStatus, manager: BlockManager) -> None:
    if status is SequenceStatus.RUNNING and manager.shares:
        most = group.max_blocks(manager.block_size)
        held: set[int] = set()
        for sequence in group.with_tables:
            if manager.has_table(sequence.seq_id):
                held.update(_needed_blocks(sequence, group.window, manager))
        if not len(held) <= most <= group.worst_case_blocks:
            raise RuntimeError(
                f"{group} holds {len(held)} blocks, counted {group.worst_case_blocks}, at most "
                f"{most}"
            )
    for sequence in group.live:
        is_running = status is SequenceStatus.RUNNING
        has_table = is_running and sequence in group.with_tables
        check_sequence(sequence, status, manager, has_table=has_table)


def _needed_blocks(sequence: Sequence, window: int | None, manager: BlockManager) -> list[int]:
    """The blocks that the next row of a sequence reads; no hole may be among them."""
    begin = first_needed(sequence.num_computed, window) // manager.block_size
    blocks = manager.table_array(sequence.seq_id)[begin:].tolist()
    if NULL_BLOCK in blocks:
        raise RuntimeError(f"{sequence} has holes in {blocks}, the blocks that it needs next")
    return blocks


def check_sequence(
    sequence: Sequence, status: SequenceStatus, manager: BlockManager, *, has_table: bool
) -> None:
    """Prove that a live sequence's counters, state slot and table agree with its ``status``.

    Raises:
      RuntimeError: with the numbers, if not.
    """
    is_running = status is SequenceStatus.RUNNING
    num_held = manager.num_tokens(sequence.seq_id) if manager.has_table(sequence.seq_id) else 0
    is_swapped = manager.is_swapped(sequence.seq_id)
    if is_running:
        agrees = _running_agrees(sequence, num_held)
    else:
        agrees = sequence.state_slot == -1 and _idle_agrees(sequence, is_swapped=is_swapped)
    num_sampled = sequence.num_output + sequence.num_pending
    if (
        sequence.status is not status
        or manager.has_table(sequence.seq_id) is not has_table
        or num_sampled > sequence.max_tokens
        or not agrees
    ):
        raise RuntimeError(
            f"{sequence} is in the {status.value} queue with state_slot={sequence.state_slot}, "
            f"prefill={sequence.num_prefill}, max_tokens={sequence.max_tokens} and "
            f"{num_held} positions in its table"
        )


def _running_agrees(sequence: Sequence, num_held: int) -> bool:
    if num_held != sequence.num_computed:
        return False
    known = sequence.num_prompt + sequence.num_output
    if sequence.request.is_search and sequence.num_output:
        known -= 1  # the last token is for the step in which all beams sample
    if sequence.num_computed < sequence.num_prefill:
        return sequence.num_pending == 0 and sequence.num_prefill == known
    # The last sampled token is the next step's input; a scoring sequence has none.
    num_inputs = 0 if sequence.max_tokens == 0 else 1
    return sequence.num_tokens - sequence.num_computed == num_inputs


def _idle_agrees(sequence: Sequence, *, is_swapped: bool) -> bool:
    if is_swapped:
        return sequence.num_pending == 0 and _running_agrees(sequence, sequence.num_computed)
    return sequence.num_computed == sequence.num_pending == 0
