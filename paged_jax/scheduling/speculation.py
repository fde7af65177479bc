"""Speculative decoding on the host: rows that verify drafts, and what is kept of them.

A decoding sequence with a draft computes its last token and the drafted ones in one row. Each
position samples with its own key, as it would in a step of its own, so a sampled token is right as
long as all drafts before it were. Those are kept; the slots of the others are given back.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.plan import Plan, PlanRow
from paged_jax.scheduling.sequence import Sequence


class Drafter(Protocol):
    """Guesses what comes next; wrong guesses cost time and change nothing."""

    def propose(self, sequence: Sequence, *, limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the sequence's known ones."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        ...


class Speculation:
    """Which sequences speculate, their rows, and counts.

    Args:
      drafter: where drafts come from.
      window: keys that a query sees at most in any layer, or None. With one, drafts take no new
        block: a sequence holds no more of them than its window needs.

    Attributes:
      num_drafted_tokens: drafted tokens that were verified, since somebody set it to 0.
      num_accepted_tokens: of those, the ones that sampling drew too.
    """

    __slots__ = ("_drafter", "_window", "num_accepted_tokens", "num_drafted_tokens")

    def __init__(self, drafter: Drafter, *, window: int | None = None) -> None:
        self._drafter = drafter
        self._window = window
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def waits_for(self, sequence: Sequence) -> bool:
        """Whether tokens in flight decide where the sequence's next row starts, or its drafts."""
        next_position = sequence.num_output + sequence.num_pending
        return sequence.num_pending > 0 and can_speculate(sequence, next_position)

    def plan_drafts(self, plan: Plan, manager: BlockManager) -> None:
        """Turn decode rows into verification rows where there is a draft, and room for it.

        To be called last: only blocks that nothing else of the step takes hold drafts.
        """
        rows, plan.decode_rows = plan.decode_rows, []
        for row in rows:
            sequence = row.sequence
            drafts: list[int] = []
            num_left = sequence.max_tokens - sequence.num_output - 1
            if num_left > 0 and can_speculate(sequence, sequence.num_output):
                limit = min(num_left, self._room(sequence, manager))
                drafts = self._drafter.propose(sequence, limit=limit) if limit else []
            if not drafts:
                plan.decode_rows.append(row)
                continue
            copies = manager.append(sequence.seq_id, num_tokens=len(drafts))
            assert copies == (), "the row's first position made the last block its own"
            sequence.num_computed += len(drafts)
            sequence.num_pending += len(drafts)
            plan.verify_rows.append(
                row._replace(num_new=1 + len(drafts), from_host=True, drafts=tuple(drafts))
            )

    def _room(self, sequence: Sequence, manager: BlockManager) -> int:
        if self._window is None:
            return manager.room(sequence.seq_id)
        return -manager.num_tokens(sequence.seq_id) % manager.block_size

    def keep_accepted(
        self, row: PlanRow, token_ids: SequenceOf[int], manager: BlockManager
    ) -> SequenceOf[int]:
        """Give back the positions of a live sequence's rejected drafts.

        Args:
          row: a verification row.
          token_ids: what its positions sampled.
          manager: holds the sequence's table.

        Returns:
          The tokens to emit: the accepted drafts, and the one that was sampled after them.
        """
        kept = token_ids[: 1 + num_accepted(row.drafts, token_ids)]
        self.num_drafted_tokens += len(row.drafts)
        self.num_accepted_tokens += len(kept) - 1
        sequence = row.sequence
        sequence.num_computed = row.start + len(kept)
        manager.trim(sequence.seq_id, num_tokens=sequence.num_computed)
        return kept

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._drafter.forget(sequence)


def can_speculate(sequence: Sequence, position: int) -> bool:
    """Whether the tokens from an output position on depend on nothing but the tokens before them.

    Penalties look at counts, which the device keeps for the accepted tokens only, and before
    ``min_tokens`` the end tokens are banned, position by position.
    """
    request, params = sequence.request, sequence.request.params
    return not (request.is_search or params.needs_penalties) and position >= params.min_tokens


def num_accepted(drafts: SequenceOf[int], token_ids: SequenceOf[int]) -> int:
    """How many leading drafts equal what their positions sampled.

    >>> num_accepted([5, 6, 7], [5, 6, 9, 1])
    2
    """
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
