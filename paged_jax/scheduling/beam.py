"""The host's half of beam search: which continuations live on, which have ended, and when to stop.

The rules are those of Hugging Face's ``generate(num_beams=...)``; docs/beam_search.md states them.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import FinishReason, Sequence


class Candidate(NamedTuple):
    """A beam's continuation by one token.

    ``logprob`` is the sum of its log-probabilities, the new token's included, ``parent`` the rank
    of its beam.
    """

    logprob: float
    parent: int
    token_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A sequence that a search has found.

    Attributes:
      token_ids: its output, the end token included.
      logprob: sum of its log-probabilities.
      score: ``logprob / len(token_ids) ** length_penalty``.
      finish_reason: 'stop' with an end token, 'length', or 'cancelled'.
      stop_reason: the end token, if there is one.
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


def most_candidates(request: Request) -> int:
    """Candidates that a step of a search can need: of the best so many, enough are no ends."""
    return request.num_samples * (1 + len(request.stop_ids))


class BeamSearch:
    """The beams of one request, kept in its sequences, and the hypotheses found so far.

    A beam's sequence holds its tokens and its block table. What a beam shares with others, prompt
    or output, is held once: children of one beam fork its table, and a beam without children frees
    its own.

    Args:
      sequences: as many as the search is wide.

    Attributes:
      beams: the live beams' sequences, best first; before the first token, one with the prompt.
      hypotheses: best first, at most as many as the search is wide.
    """

    __slots__ = ("_params", "_sequences", "_stop_ids", "beams", "hypotheses")

    def __init__(self, sequences: tuple[Sequence, ...]) -> None:
        request = sequences[0].request
        self._sequences = sequences
        self._params = request.params
        self._stop_ids = request.stop_ids
        self.beams = [sequences[0]]
        self.hypotheses: list[Hypothesis] = []

    @property
    def width(self) -> int:
        """Most live beams, and most hypotheses."""
        return len(self._sequences)

    def advance(self, candidates: SequenceOf[Candidate], manager: BlockManager) -> bool:
        """Take a step's candidates, best first; returns whether the search is over.

        End tokens count only among the best ``width``; of the others the best ``width`` live on,
        even where a step has none left (the vocabulary is that small).
        """
        length = self.beams[0].num_output + 1
        survivors: list[Candidate] = []
        for rank, candidate in enumerate(candidates):
            if not candidate.logprob > -float("inf"):
                break  # banned, as are all that follow
            if candidate.token_id in self._stop_ids and length > self._params.min_tokens:
                if rank < self.width:
                    self._keep(candidate, "stop")
            elif len(survivors) < self.width:
                survivors.append(candidate)
        if length == self.beams[0].max_tokens:
            for candidate in survivors:
                self._keep(candidate, "length")
            return True
        if not survivors:
            if not self.hypotheses:
                self._keep_beams("length")
            return True
        if len(self.hypotheses) == self.width and self._is_settled(survivors[0].logprob, length):
            return True
        self._branch(survivors, manager)
        return False

    def cancel(self) -> None:
        """Make hypotheses of the live beams, as far as they have come."""
        self._keep_beams("cancelled")

    def _is_settled(self, best_logprob: float, length: int) -> bool:
        """Whether to stop, there being ``width`` hypotheses."""
        early_stopping, penalty = self._params.early_stopping, self._params.length_penalty
        if early_stopping is True:
            return True
        if early_stopping == "never" and penalty > 0:
            length = self.beams[0].max_tokens
        return best_logprob / length**penalty <= self.hypotheses[-1].score

    def _branch(self, survivors: list[Candidate], manager: BlockManager) -> None:
        """Turn survivors into beams: forks and frees of block tables, copies of token lists."""
        parents = self.beams
        outputs = [parent.output_token_ids for parent in parents]
        with_child = {candidate.parent for candidate in survivors}
        for rank, parent in enumerate(parents):
            if rank not in with_child:
                manager.free(parent.seq_id, reason="beam")
        kept = {parents[rank] for rank in with_child}
        spare = [sequence for sequence in self._sequences if sequence not in kept]
        self.beams = []
        for candidate in survivors:
            child = parent = parents[candidate.parent]
            if parent in kept:
                kept.remove(parent)  # its first child takes its table, later ones fork that
            else:
                child = spare.pop()
                manager.fork(parent.seq_id, child.seq_id)
                child.num_computed, child.num_prefill = parent.num_computed, parent.num_prefill
            child.output_token_ids = [*outputs[candidate.parent], candidate.token_id]
            child.cumulative_logprob = candidate.logprob
            self.beams.append(child)
        for sequence in spare:
            sequence.output_token_ids = []
            sequence.cumulative_logprob = 0.0
            sequence.num_computed, sequence.num_prefill = 0, sequence.num_prompt

    def _keep(self, candidate: Candidate, reason: FinishReason) -> None:
        tokens = (*self.beams[candidate.parent].output_token_ids, candidate.token_id)
        self._add(tokens, candidate.logprob, reason)

    def _keep_beams(self, reason: FinishReason) -> None:
        for beam in self.beams:
            self._add(tuple(beam.output_token_ids), beam.cumulative_logprob, reason)

    def _add(self, tokens: tuple[int, ...], logprob: float, reason: FinishReason) -> None:
        hypothesis = Hypothesis(
            token_ids=tokens,
            logprob=logprob,
            score=logprob / max(len(tokens), 1) ** self._params.length_penalty,
            finish_reason=reason,
            stop_reason=tokens[-1] if reason == "stop" else None,
        )
        bisect.insort_right(self.hypotheses, hypothesis, key=lambda one: -one.score)
        del self.hypotheses[self.width :]
