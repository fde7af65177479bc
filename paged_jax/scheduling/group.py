"""All sequences of one request, scheduled, preempted and resumed together (paper section 4.4)."""

from __future__ import annotations

from paged_jax.blocks.demand import Demand
from paged_jax.scheduling.beam import BeamSearch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence
from paged_jax.scheduling.window import most_blocks


class SequenceGroup:
    """A request's sequences; compared by identity.

    The prompt is computed once, by the first live sequence. The others then fork its block table,
    so full prompt blocks are held once and the partly filled one is copied by whoever writes to it.
    After a preemption this happens again, then each sequence computes its own tokens.

    Of a beam search, the sequences are places for beams (``BeamSearch``): all end together, and
    those that hold a beam are ``active``. The search goes on when all its beams stand at their last
    token, so after a preemption each computes its known tokens but that one.

    Attributes:
      request: what they answer.
      window: keys that a query sees at most in any layer; None: everything before it.
      sequences: one a sample, in order of ``sample_index``.
      live: those that have not ended, in the same order.
      beam: the search that they are used for, if one is.
      needs_fork: whether the prompt is still to be computed, for all, by ``leader``.
      worst_case_blocks: blocks that the group was counted with when it last started.
    """

    __slots__ = (
        "beam",
        "live",
        "needs_fork",
        "request",
        "sequences",
        "window",
        "worst_case_blocks",
    )

    def __init__(
        self, request: Request, *, first_seq_id: int, max_tokens: int, window: int | None = None
    ) -> None:
        self.request = request
        self.window = window
        self.sequences = tuple(
            Sequence(request, seq_id=first_seq_id + i, max_tokens=max_tokens, sample_index=i)
            for i in range(request.num_samples)
        )
        self.live = list(self.sequences)
        self.beam = BeamSearch(self.sequences) if request.is_search else None
        self.needs_fork = len(self.active) > 1
        self.worst_case_blocks = 0

    @property
    def active(self) -> list[Sequence]:
        """The live sequences that have tokens to compute: all, or a search's beams, best first."""
        return self.live if self.beam is None else self.beam.beams

    @property
    def leader(self) -> Sequence:
        """The active sequence that computes the prompt."""
        return self.active[0]

    @property
    def demand(self) -> Demand:
        """What its live sequences will want to hold."""
        expected, first = self.request.expected_output, self.live[0]
        num_output = first.max_tokens if expected is None else expected
        return Demand(tuple(s.seq_id for s in self.live), first.num_prompt, num_output)

    @property
    def num_preemptions(self) -> int:
        """How often the group lost its blocks."""
        return self.leader.num_preemptions

    @property
    def with_tables(self) -> list[Sequence]:
        """The live sequences that hold blocks while the group runs."""
        return self.active[:1] if self.needs_fork else self.active

    @property
    def awaits_values(self) -> bool:
        """Whether nothing can be planned before a step's values are on the host."""
        return self.beam is not None and self.leader.num_pending > 0

    @property
    def can_decode(self) -> bool:
        """Whether those that stand at their last token may go on: beams wait for each other."""
        return self.beam is None or all(s.num_computed >= s.num_prefill for s in self.active)

    def restart(self) -> None:
        """Set how far prompts go when the group starts, or resumes without its blocks."""
        self.needs_fork = len(self.active) > 1
        for sequence in self.active:
            sequence.num_prefill = self.known_end(sequence)

    def known_end(self, sequence: Sequence) -> int:
        """Position up to which a sequence that starts, or resumes without blocks, has a prompt.

        The last token of a beam is left: all beams of a search sample in one step.
        """
        return sequence.num_tokens - (self.beam is not None and sequence.num_output > 0)

    def prefill_end(self, sequence: Sequence) -> int:
        """Position up to which a live sequence computes known tokens before something happens."""
        return sequence.num_prompt if self.needs_fork else sequence.num_prefill

    def max_blocks(self, block_size: int) -> int:
        """Blocks that the live sequences hold if each runs to its ``max_tokens``."""
        return self._num_blocks([s.max_computed for s in self.live], block_size)

    def known_blocks(self, block_size: int) -> int:
        """Blocks that the live sequences' known tokens take, each with its own last blocks."""
        return self._num_blocks([s.num_tokens for s in self.active], block_size)

    def _num_blocks(self, lens: list[int], block_size: int) -> int:
        alone = sum(most_blocks(length, self.window, block_size) for length in lens)
        if len(lens) == 1:
            return alone
        shared = self.leader.num_prompt // block_size
        return min(alone, shared + sum(-(-length // block_size) - shared for length in lens))

    def __repr__(self) -> str:
        return f"SequenceGroup({len(self.live)} live of {len(self.sequences)}: {self.sequences[0]})"
