"""Counters: compilations of the process, and what the engine's steps did with pool and time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(slots=True)
class CompilationCount:
    """Backend compilations inside a ``count_compilations`` block, eager operations included."""

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Count what XLA compiles while the block runs, through ``jax.monitoring``.

    A program that JAX takes from its persistent compilation cache counts too: it is a new shape.
    """
    counted = CompilationCount()
    is_active = True

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if is_active and event == COMPILE_EVENT:
            counted.count += 1
            counted.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counted
    finally:
        is_active = False
        unregister = getattr(jax.monitoring, "unregister_event_duration_listener", None)
        if unregister is not None:
            unregister(listen)


@dataclasses.dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made (or since ``reset``).

    Attributes:
      num_steps: plans executed.
      num_prompt_tokens: prompt positions computed, recomputation included.
      num_output_tokens: tokens given to requests.
      num_positions: token positions computed, padding included.
      num_padding_positions: of those, the padding.
      num_preemptions: sequences that lost their blocks.
      num_swap_preemptions: of those, swapped out.
      num_swap_refusals: of the others, those that the host pool had no room for.
      num_swapped_out_blocks: blocks that went to the host pool.
      num_swapped_in_blocks: blocks that came back.
      swapped_bytes: both together.
      num_copied_blocks: copies of partly filled blocks: copy-on-write, and of cached prefixes.
      prefix_cache_queries: prompt tokens looked up in the prefix cache, once each time that a
        request starts (or starts again after a preemption).
      prefix_cache_hits: those of them that were found and not computed.
      num_drafted_tokens: drafted tokens that speculation verified.
      num_accepted_tokens: of those, the ones that were sampled too: steps saved.
      peak_used_blocks: most blocks in use after any step.
      filled_slots: sum over steps of slots that hold a token.
      used_slots: sum over steps of slots in used blocks.
      schedule_seconds: host time in the scheduler (schedule and update).
      pack_seconds: host time turning plans into arrays.
      step_seconds: wall time of ``Engine.step``.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_positions: int = 0
    num_padding_positions: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_swap_refusals: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    swapped_bytes: int = 0
    num_copied_blocks: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    peak_used_blocks: int = 0
    filled_slots: int = 0
    used_slots: int = 0
    schedule_seconds: float = 0.0
    pack_seconds: float = 0.0
    step_seconds: float = 0.0

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)

    @property
    def block_utilisation(self) -> float:
        """Share of the slots in used blocks that held a real token, over all steps."""
        return self.filled_slots / self.used_slots if self.used_slots else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        num_drafted = self.num_drafted_tokens
        return self.num_accepted_tokens / num_drafted if num_drafted else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the looked up prompt tokens that were cached."""
        queries = self.prefix_cache_queries
        return self.prefix_cache_hits / queries if queries else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the computed token positions that were padding."""
        return self.num_padding_positions / self.num_positions if self.num_positions else 0.0
