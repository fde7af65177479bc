"""Counts what an engine's steps do."""

from __future__ import annotations

from paged_jax.blocks.block_manager import BlockManager, BlockStats
from paged_jax.metrics import EngineStats
from paged_jax.scheduling.plan import Plan
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.step_result import StepHandle


class StepCounters:
    """Adds each step to an engine's totals.

    Args:
      stats: the totals.
      scheduler: counts drafts.
      manager: counts what the prefix cache was asked for.
      block_nbytes: bytes of a block over all layers.
    """

    __slots__ = ("_block_nbytes", "_manager", "_prefix_stats", "_scheduler", "_stats")

    def __init__(
        self,
        stats: EngineStats,
        scheduler: Scheduler,
        manager: BlockManager,
        *,
        block_nbytes: int,
    ) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._manager = manager
        self._block_nbytes = block_nbytes
        self._prefix_stats = manager.prefix_stats()

    def dispatch(self, plan: Plan, handle: StepHandle) -> BlockStats:
        """Count a step that went to the device; returns what is used of the pool now."""
        stats, manager = self._stats, self._manager
        stats.num_steps += 1
        stats.num_prompt_tokens += sum(row.num_new for row in plan.prefill_rows)
        stats.num_positions += handle.num_positions
        stats.num_padding_positions += handle.num_positions - handle.num_real_positions
        stats.num_copied_blocks += len(plan.copies)
        self._count_preemptions(plan)
        prefixes, before = manager.prefix_stats(), self._prefix_stats
        stats.prefix_cache_queries += prefixes.query_tokens - before.query_tokens
        stats.prefix_cache_hits += prefixes.hit_tokens - before.hit_tokens
        self._prefix_stats = prefixes
        stats.pack_seconds += handle.pack_seconds
        blocks = manager.stats()
        stats.peak_used_blocks = max(stats.peak_used_blocks, blocks.used)
        stats.used_slots += blocks.used * manager.block_size
        stats.filled_slots += blocks.filled
        return blocks

    def collect(self) -> None:
        """Count the drafts of a step whose values were taken."""
        speculation = self._scheduler.speculation
        if speculation is not None:
            self._stats.num_drafted_tokens += speculation.num_drafted_tokens
            self._stats.num_accepted_tokens += speculation.num_accepted_tokens
            speculation.num_drafted_tokens = speculation.num_accepted_tokens = 0

    def _count_preemptions(self, plan: Plan) -> None:
        stats = self._stats
        for preemption in plan.preemptions:
            num_sequences = len(preemption.sequences)
            stats.num_preemptions += num_sequences
            stats.num_swap_preemptions += num_sequences * preemption.is_swap
            stats.num_swap_refusals += num_sequences * preemption.is_refused
        stats.num_swapped_out_blocks += len(plan.swap_outs)
        stats.num_swapped_in_blocks += len(plan.swap_ins)
        num_swaps = len(plan.swap_outs) + len(plan.swap_ins)
        stats.swapped_bytes += num_swaps * self._block_nbytes
