"""Takes a group's blocks away and brings it back: by recomputation or by swapping."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import Plan, Preemption
from paged_jax.scheduling.preemption import PreemptionCosts, PreemptionMode
from paged_jax.scheduling.sequence import Sequence


class Preemptor:
    """Chooses how a sequence group is preempted, and does it on the tables.

    A group is preempted whole, in whatever state it is, once no value of it is in flight. Swapped
    out it keeps what it has computed, even half a prompt; otherwise it computes all of it anew.

    Args:
      block_manager: the tables.
      mode: 'recompute', 'swap', or 'auto', which takes what ``costs`` say is faster. Where the host
        pool has no room, a group is recomputed in every mode.
      costs: for 'auto'.
      block_nbytes: bytes of a block over all layers, for 'auto'.

    Attributes:
      num_preemptions: sequences that have lost their blocks so far, each time counted.
      num_recomputed_tokens: computed tokens that were thrown away.
      on_preempt: called with a group's sequences when it loses its blocks, and how, or None.

    Raises:
      ValueError: 'auto' without ``costs`` or ``block_nbytes``.
    """

    __slots__ = (
        "_block_nbytes",
        "_costs",
        "_manager",
        "_mode",
        "num_preemptions",
        "num_recomputed_tokens",
        "on_preempt",
    )

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        mode: PreemptionMode = "recompute",
        costs: PreemptionCosts | None = None,
        block_nbytes: int = 0,
    ) -> None:
        if mode == "auto" and (costs is None or block_nbytes < 1):
            raise ValueError(
                f"mode='auto' must come with costs and block_nbytes, not with costs={costs} and "
                f"block_nbytes={block_nbytes}"
            )
        self._manager = block_manager
        self._mode = mode
        self._costs = costs
        self._block_nbytes = block_nbytes
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.on_preempt: Callable[[SequenceOf[Sequence], PreemptionMode], None] | None = None

    def preempt(self, group: SequenceGroup, plan: Plan) -> None:
        """Take a running group's blocks; those it leaves by swapping are free from the next step.

        None of its sequences may be written in this step, or have a value in flight.
        """
        self.num_preemptions += len(group.active)
        for sequence in group.live:
            sequence.num_preemptions += 1
        seq_ids = [sequence.seq_id for sequence in group.with_tables]
        prefers_swap = self._prefers_swap(group, seq_ids)
        swaps = self._manager.swap_out(seq_ids) if prefers_swap else None
        is_swap = swaps is not None
        plan.preemptions.append(
            Preemption(tuple(group.active), is_swap, prefers_swap and not is_swap)
        )
        if self.on_preempt is not None:
            self.on_preempt(group.active, "swap" if is_swap else "recompute")
        if swaps is not None:
            plan.swap_outs.extend(swaps)
            return
        self.num_recomputed_tokens += num_to_recompute(group)
        for seq_id in seq_ids:
            self._manager.free(seq_id, reason="preempt")
        for sequence in group.live:
            sequence.num_computed = 0

    def is_swapped(self, group: SequenceGroup) -> bool:
        """Whether a group is in the host pool."""
        return self._manager.is_swapped(group.leader.seq_id)

    def num_blocks_to_resume(self, group: SequenceGroup) -> int:
        """Blocks for what a swapped group holds and, in the middle of a prompt, the rest of it."""
        if any(sequence.num_computed < sequence.num_prefill for sequence in group.active):
            return group.known_blocks(self._manager.block_size)
        return self._manager.num_swapped_blocks([s.seq_id for s in group.with_tables])

    def swap_in(self, group: SequenceGroup, plan: Plan) -> None:
        """Bring a swapped group's blocks back in this step."""
        swaps = self._manager.swap_in([sequence.seq_id for sequence in group.with_tables])
        assert swaps is not None, "the scheduler looked before"
        plan.swap_ins.extend(swaps)

    def _prefers_swap(self, group: SequenceGroup, seq_ids: list[int]) -> bool:
        manager = self._manager
        if self._mode != "recompute" and manager.num_pinned:
            # Swapped in, it shares no registered prefix any more: it must fit without.
            room = manager.num_usable - len(manager.pinned_blocks)
            if group.max_blocks(manager.block_size) > room:
                return False
        if self._mode != "auto":
            return self._mode == "swap"
        assert self._costs is not None
        num_blocks = manager.num_distinct_blocks(seq_ids)
        swap = self._costs.swap_seconds(num_blocks, block_nbytes=self._block_nbytes)
        return swap < self._costs.recompute_seconds(num_to_recompute(group))


def num_to_recompute(group: SequenceGroup) -> int:
    """Computed tokens of a group; the prompt, which its sequences share, counts once."""
    own = (max(s.num_computed - s.num_prompt, 0) for s in group.active if s is not group.leader)
    return group.leader.num_computed + sum(own)
