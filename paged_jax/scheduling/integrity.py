"""What must hold for one sequence between two scheduler calls."""

from __future__ import annotations

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.sequence import Sequence, SequenceStatus


def check_sequence(sequence: Sequence, status: SequenceStatus, manager: BlockManager) -> None:
    """Prove that a live sequence's counters, state slot and table agree with its ``status``.

    Raises:
      RuntimeError: with the numbers, if not.
    """
    is_running = status is SequenceStatus.RUNNING
    has_table = manager.has_table(sequence.seq_id)
    num_held = manager.num_tokens(sequence.seq_id) if has_table else 0
    agrees = _running_agrees(sequence, num_held) if is_running else _idle_agrees(sequence)
    num_sampled = sequence.num_output + sequence.num_pending
    if (
        sequence.status is not status
        or has_table is not is_running
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
    if sequence.num_computed < sequence.num_prefill:
        return sequence.num_pending == 0 and sequence.num_prefill == known
    # The last sampled token is the next step's input; a scoring sequence has none.
    num_inputs = 0 if sequence.max_tokens == 0 else 1
    return sequence.num_tokens - sequence.num_computed == num_inputs


def _idle_agrees(sequence: Sequence) -> bool:
    return sequence.state_slot == -1 and sequence.num_computed == sequence.num_pending == 0
