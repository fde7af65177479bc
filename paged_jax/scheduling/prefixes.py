"""Shared prefixes in the scheduler: what a request need not compute, and what others may find."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.prefix_cache import PrefixMatch
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import Plan
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import FinishReason, Sequence, SequenceStatus


class Prefixes:
    """The prefix cache as the scheduler uses it (paper section 4.4, shared prefix).

    Args:
      manager: the tables, and what is cached of them.
      is_automatic: publish what every sequence computes; False: registered prefixes alone are
        shared.
    """

    __slots__ = ("_is_automatic", "_manager")

    def __init__(self, manager: BlockManager, *, is_automatic: bool) -> None:
        self._manager = manager
        self._is_automatic = is_automatic

    def lookup(self, group: SequenceGroup) -> PrefixMatch | None:
        """Find what is cached of the tokens that a group's leader is about to compute.

        Nothing for a request that wants the log-probabilities of its prompt, whose every position
        must be computed. Good until the next change of the block manager.
        """
        leader = group.leader
        end = leader.num_prompt if len(group.active) > 1 else group.known_end(leader)
        match = self._lookup(group.request, leader.token_slice(0, end))
        if match is None or not self._manager.room_for_new(match):
            # A prompt beyond its windows may start where there is no room for all of its beginning.
            return None
        return match

    def publish(self, plan: Plan) -> None:
        """Let others find the blocks that a step filled, which has returned.

        To be called before the step's tokens are taken: what the host knows by then is what the
        step was fed. A sequence that ended earlier ran past its stop and is passed over.
        """
        if not self._is_automatic:
            return
        size = self._manager.block_size
        for row in chain(plan.prefill_rows, plan.decode_rows):
            fills_block = row.start % size + row.num_new >= size
            if fills_block and row.sequence.status is SequenceStatus.RUNNING:
                self._publish(row.sequence, row.start + row.num_new)
        for row in plan.verify_rows:
            # Which drafts are right is not known yet: blocks that they fill come a step later.
            if row.sequence.status is SequenceStatus.RUNNING:
                self._publish(row.sequence, row.start + 1)

    def _publish(self, sequence: Sequence, end: int) -> None:
        begin = self._manager.num_published(sequence.seq_id)
        end = min(end, sequence.num_prompt + sequence.num_output)
        if end - begin >= self._manager.block_size:
            tokens = sequence.token_slice(begin, end)
            namespace = sequence.request.namespace
            self._manager.publish(sequence.seq_id, namespace, tokens, begin=begin)

    def release(self, sequence: Sequence, reason: FinishReason) -> None:
        """Give up the blocks of a sequence that ends; those of a registered prefix stay."""
        request = sequence.request
        if request.is_prefix and reason == "length":
            tokens = sequence.prompt_token_ids
            request.pin_id = self._manager.pin(sequence.seq_id, request.namespace, tokens)
        else:
            self._manager.free(sequence.seq_id, reason=reason)

    def num_usable(self, request: Request) -> int:
        """Blocks that a request can come to hold: all but registered ones that it does not share.

        What it shares of those stays: a prefix that is let go of leaves more room, not less.
        """
        manager = self._manager
        if not manager.num_pinned:
            return manager.num_usable
        pinned = manager.pinned_blocks
        match = self._lookup(request, request.prompt_token_ids)
        num_shared = len(pinned.intersection(match.blocks)) if match else 0
        return manager.num_usable - len(pinned) + num_shared

    def require_room(self, request: Request, live: Iterable[SequenceGroup]) -> None:
        """Refuse a prefix beside which a live request, or any, could not have the pool to itself.

        Raises:
          ValueError: ``request.is_prefix``, and it is such.
        """
        manager = self._manager
        num_prompt = len(request.prompt_token_ids)
        num_left = self.num_usable(request) - manager.blocks_for(num_prompt)
        needs = {group.request.request_id: group.max_blocks(manager.block_size) for group in live}
        most = max(needs, key=needs.__getitem__, default=None)
        if num_left < needs.get(most, 1):
            who = "any request" if most is None else f"request {most!r}"
            raise ValueError(
                f"a prefix of {num_prompt} tokens would leave {num_left} of {manager.num_usable} "
                f"blocks, it must leave {who} the {needs.get(most, 1)} that it may come to hold"
            )

    def _lookup(self, request: Request, token_ids: SequenceOf[int]) -> PrefixMatch | None:
        manager = self._manager
        if request.params.prompt_logprobs is not None:
            return None
        if not (self._is_automatic or manager.num_pinned):
            return None
        return manager.lookup(request.namespace, token_ids)
