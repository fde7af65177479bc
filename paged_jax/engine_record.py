"""What the engine writes to its event record: requests, preemptions, and a line a step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from paged_jax.blocks.block_manager import BlockManager, BlockStats
from paged_jax.config import EngineConfig
from paged_jax.events import EventLog
from paged_jax.scheduling.plan import Plan
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence


class EngineRecord:
    """Turns what happens to an engine's requests into lines of the event record.

    Args:
      log: where the lines go; the block manager's own go there too.
      scheduler: which is asked for the concurrency at each moment.
      block_manager: likewise.
    """

    def __init__(self, log: EventLog, *, scheduler: Scheduler, block_manager: BlockManager) -> None:
        self._log = log
        self._scheduler = scheduler
        self._manager = block_manager
        self._last_step = 0
        scheduler.preemptor.on_preempt = self.preempt

    def begin_step(self) -> None:
        """A step is planned: lines carry its number from now on."""
        self._log.step = self._last_step + 1

    def arrive(self, sequences: SequenceOf[Sequence]) -> None:
        """A request came; its sequences."""
        first = sequences[0]
        lens = {"prompt_tokens": first.num_prompt, "max_tokens": first.max_tokens}
        self._request("arrive", sequences, lens)

    def preempt(self, sequences: SequenceOf[Sequence], mode: str) -> None:
        """A running request loses its blocks; its sequences that have not ended."""
        computed = [sequence.num_computed for sequence in sequences]
        self._request("preempt", sequences, {"reason": mode, "computed_tokens": computed})

    def dispatch(self, plan: Plan, blocks: BlockStats) -> None:
        """A step went to the device; requests that it started or resumed come first."""
        self._last_step = plan.step
        admitted: dict[Request, list[Sequence]] = {}
        for sequence in plan.admitted:
            admitted.setdefault(sequence.request, []).append(sequence)
        for sequences in admitted.values():
            self._request("resume" if sequences[0].num_preemptions else "start", sequences, {})
        fields = {
            "prompt_tokens": sum(row.num_new for row in plan.prefill_rows),
            "decode_tokens": sum(row.num_new for row in plan.decode_rows),
            "copies": len(plan.copies),
            "filled": blocks.filled,
            "waste": blocks.waste,
            "cached": blocks.cached,
            "saved": blocks.saved,
            "reserved": blocks.reserved,
            "external": blocks.external,
        }
        self._log.write("step", self._concurrency() | fields)

    def end(self, sequences: SequenceOf[Sequence]) -> None:
        """A request ended; all its sequences."""
        fields = {
            "prompt_tokens": sequences[0].num_prompt,
            "output_tokens": [sequence.num_output for sequence in sequences],
            "reasons": [sequence.finish_reason for sequence in sequences],
            "preemptions": max(sequence.num_preemptions for sequence in sequences),
        }
        self._request("end", sequences, fields)

    def fail(self, error: BaseException) -> None:
        """A step failed, and with it the engine."""
        self._log.write("fail", {"error": type(error).__name__})
        self._log.flush()

    def flush(self) -> None:
        """Nothing is left to do: write all lines."""
        self._log.flush()

    def _request(self, event: str, sequences: SequenceOf[Sequence], fields: dict[str, Any]) -> None:
        names = {
            "request": str(sequences[0].request.request_id),
            "seqs": [sequence.seq_id for sequence in sequences],
        }
        self._log.write(event, names | fields | self._concurrency())

    def _concurrency(self) -> dict[str, int]:
        scheduler, num_free = self._scheduler, self._manager.num_free
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "preempted": scheduler.num_preempted,
            "used": self._manager.num_usable - num_free,
            "free": num_free,
        }


def open_event_log(config: EngineConfig, *, num_blocks: int) -> EventLog | None:
    """Begin the record that the settings ask for, or None.

    Raises:
      ValueError: ``event_log`` cannot be written.
    """
    if config.event_log is None:
        return None
    return EventLog(
        config.event_log,
        max_bytes=config.event_log_bytes,
        max_files=config.event_log_files,
        about={"num_blocks": num_blocks, "block_size": config.block_size},
    )
