"""What must hold for queues, groups and sequences between two scheduler calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


class Queues(NamedTuple):
    """The scheduler's queues and counters, to be checked."""

    running: Collection[SequenceGroup]
    preempted: Collection[SequenceGroup]
    waiting: Collection[SequenceGroup]
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
    arrivals = [group.request.arrival for group in line]
    worst_case = sum(group.worst_case_blocks for group in queues.running)
    num_tables = sum(len(group.with_tables) for group in queues.running)
    for holds, what in (
        (sorted(slots + queues.free_slots) == list(range(queues.num_slots)), "state slots"),
        (arrivals == sorted(set(arrivals)), "arrival order"),
        (set(line) == set(queues.live) and all(group.live for group in line), "live requests"),
        (manager.num_sequences == num_tables, "tables"),
        (queues.worst_case_blocks == worst_case, "worst case"),
    ):
        if not holds:
            raise RuntimeError(
                f"{what} broken: slots={slots}, free slots={queues.free_slots}, line={line}, "
                f"live={queues.live}, tables={manager.num_sequences} for {num_tables}, "
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
    if status is SequenceStatus.RUNNING:
        most = group.max_blocks(manager.block_size)
        held = {
            int(block)
            for sequence in group.with_tables
            if manager.has_table(sequence.seq_id)
            for block in manager.table_array(sequence.seq_id)
        }
        if not len(held) <= most <= group.worst_case_blocks:
            raise RuntimeError(
                f"{group} holds {len(held)} blocks, counted {group.worst_case_blocks}, at most "
                f"{most}"
            )
    for sequence in group.live:
        is_running = status is SequenceStatus.RUNNING
        has_table = is_running and sequence in group.with_tables
        check_sequence(sequence, status, manager, has_table=has_table)


def check_sequence(
    sequence: Sequence, status: SequenceStatus, manager: BlockManager, *, has_table: bool
) -> None:
    """Prove that a live sequence's counters, state slot and table agree with its ``status``.

    Raises:
      RuntimeError: with the numbers, if not.
    """
    is_running = status is SequenceStatus.RUNNING
    num_held = manager.num_tokens(sequence.seq_id) if manager.has_table(sequence.seq_id) else 0
    agrees = _running_agrees(sequence, num_held) if is_running else _idle_agrees(sequence)
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
    if sequence.request.params.beam_width is not None and sequence.num_output:
        known -= 1  # the last token is for the step in which all beams sample
    if sequence.num_computed < sequence.num_prefill:
        return sequence.num_pending == 0 and sequence.num_prefill == known
    # The last sampled token is the next step's input; a scoring sequence has none.
    num_inputs = 0 if sequence.max_tokens == 0 else 1
    return sequence.num_tokens - sequence.num_computed == num_inputs


def _idle_agrees(sequence: Sequence) -> bool:
    return sequence.state_slot == -1 and sequence.num_computed == sequence.num_pending == 0
