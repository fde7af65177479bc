"""What one step does: moves of blocks, then prefill and decode rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from paged_jax.blocks.block_manager import BlockCopy, BlockSwap
from paged_jax.scheduling.sequence import Sequence


class PlanRow(NamedTuple):
    """Positions ``start .. start + num_new - 1`` of a sequence, computed in one step.

    The row attends to ``start + num_new`` positions. When ``samples``, its last position yields
    the sequence's next token. A prefill row's tokens are known on the host
    (``sequence.token_slice``); a decode row's one token is the device's last sampled one, unless
    ``from_host``: then it is the host's, and the row's state on the device starts anew. Of a beam
    search all rows sample in one step, by rank; candidates are taken from them, not tokens.

    A verification row computes the sequence's last token and then its ``drafts``, from the host;
    each of its positions samples a token.
    """

    sequence: Sequence
    start: int
    num_new: int
    samples: bool
    from_host: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Tokens that the row yields, right ones or not."""
        return self.samples + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """Its tokens, where the host knows them."""
        stop = self.start + self.num_new - len(self.drafts)
        return [*self.sequence.token_slice(self.start, stop), *self.drafts]


class Preemption(NamedTuple):
    """A group that loses its blocks: its live ``sequences`` go to the host pool, or are recomputed.

    ``is_refused``: they were to be swapped, and the host pool had no room.
    """

    sequences: tuple[Sequence, ...]
    is_swap: bool
    is_refused: bool


@dataclasses.dataclass(slots=True)
class Plan:
    """One step's work, in the order in which the device does it: swaps, copies, then rows.

    Attributes:
      step: number of this step, from 1.
      preemptions: who loses its blocks before this step.
      swap_outs: blocks that go to the host pool, before anything else.
      swap_ins: blocks that come back from it, which may be where others have just left.
      copies: ``(src, dst)`` block copies; no block is in both columns.
      prefill_rows: rows of prompts; several may belong to one sequence, in position order.
      branch_rows: rows that compute nothing (``num_new=0``): the other sequences of a group whose
        prompt ends in this step draw their first token from the logits of its sampling row.
      decode_rows: one row of one token for each decoding sequence without a draft.
      verify_rows: one row for each decoding sequence with a draft.
      admitted: sequences that got their ``state_slot`` in this step (new or resumed): their row
        state must be set up, from ``prompt_token_ids`` and ``output_token_ids``.
    """

    step: int
    preemptions: list[Preemption] = dataclasses.field(default_factory=list)
    swap_outs: list[BlockSwap] = dataclasses.field(default_factory=list)
    swap_ins: list[BlockSwap] = dataclasses.field(default_factory=list)
    copies: list[BlockCopy] = dataclasses.field(default_factory=list)
    prefill_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    branch_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    decode_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    verify_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    admitted: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; a step may do nothing but swap."""
        swaps = self.swap_outs or self.swap_ins
        return not (self.prefill_rows or self.decode_rows or self.verify_rows or swaps)

    @property
    def rows(self) -> list[PlanRow]:
        """All rows: prefill rows, then branch rows, decode rows and verification rows."""
        return self.prefill_rows + self.branch_rows + self.decode_rows + self.verify_rows

    @property
    def sampling_rows(self) -> list[PlanRow]:
        """The rows that yield tokens, in the order of a step's results, which is that of ``rows``.

        A row yields ``num_sampled`` tokens, one after the other: one, or several if it verifies.
        """
        prefill_rows = [row for row in self.prefill_rows if row.samples]
        return prefill_rows + self.branch_rows + self.decode_rows + self.verify_rows

    @property
    def num_new_tokens(self) -> int:
        """Token positions computed."""
        return sum(row.num_new for row in self.rows)


class NeedsValues:
    """Returned by ``Scheduler.schedule`` when sampled tokens in flight must arrive first."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NEEDS_VALUES"


NEEDS_VALUES = NeedsValues()
