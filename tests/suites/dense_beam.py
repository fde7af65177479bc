"""Beam search by its definition: every step looks at all continuations of all beams, no cache.

    score(hypothesis) = sum of its log-probabilities / (number of its tokens) ** length_penalty

The end token counts in both. Continuations are ordered by sum; equal ones by beam, then by token.
Of those that end, the ones among the best ``width`` become hypotheses; of those that do not, the
best ``width`` are the next beams. At ``max_tokens`` the beams become hypotheses too. The best
``width`` hypotheses are kept. Once there are so many, the search ends: with ``early_stopping``
True, at once; else when the best beam's sum, divided as if it ended at its length now (False, or a
penalty of at most 0) or at ``max_tokens`` ("never"), is no better than the worst of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

LogprobsOf = Callable[[list[list[int]]], np.ndarray]


class Found(NamedTuple):
    """A hypothesis, or a beam; ``has_ended`` with an end token."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    has_ended: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """What a search is asked for.

    Attributes:
      width: beams.
      max_tokens: tokens of the longest hypothesis.
      ends: tokens that end one.
      min_tokens: no end before so many tokens: their log-probability is -inf (by ``logprobs_of``).
      length_penalty: see above.
      early_stopping: see above.
    """

    width: int
    max_tokens: int
    ends: Collection[int] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def found(self, tokens: tuple[int, ...], logprob: float, *, has_ended: bool = False) -> Found:
        """The same with its score."""
        score = logprob / max(len(tokens), 1) ** self.length_penalty
        return Found(tokens, logprob, score, has_ended)


class State(NamedTuple):
    """A search after a step, or before the first one."""

    beams: list[Found]
    hypotheses: list[Found]


def run(search: Search, logprobs_of: LogprobsOf) -> list[State]:
    """All states of a search, the last one's hypotheses being its result, best first.

    Args:
      search: what is asked for.
      logprobs_of: for outputs so far (lists of tokens, all equally long), the log-probabilities of
        their next token: float64 [number of outputs, V].
    """
    states = [State([search.found((), 0.0)], [])]
    for length in range(1, search.max_tokens + 1):
        beams, hypotheses = states[-1]
        sums = logprobs_of([list(beam.tokens) for beam in beams])
        sums = sums + np.array([[beam.logprob] for beam in beams])
        parents, tokens = np.indices(sums.shape).reshape(2, -1)
        order = np.lexsort((tokens, parents, -sums.ravel()))
        order = order[np.isfinite(sums.ravel()[order])]
        next_beams: list[Found] = []
        for rank, entry in enumerate(order):
            if rank >= search.width and len(next_beams) == search.width:
                break
            token = int(tokens[entry])
            output = (*beams[parents[entry]].tokens, token)
            has_ended = token in search.ends
            found = search.found(output, float(sums.ravel()[entry]), has_ended=has_ended)
            if not has_ended and len(next_beams) < search.width:
                next_beams.append(found)
            elif has_ended and rank < search.width:
                hypotheses = [*hypotheses, found]
        if length == search.max_tokens:
            hypotheses = hypotheses + next_beams
        hypotheses = sorted(hypotheses, key=lambda one: -one.score)[: search.width]
        states.append(State(next_beams, hypotheses))
        if not next_beams or _has_ended(search, states[-1], length):
            break
    return states


def _has_ended(search: Search, state: State, length: int) -> bool:
    if len(state.hypotheses) < search.width:
        return False
    if search.early_stopping is True:
        return True
    if search.early_stopping == "never" and search.length_penalty > 0:
        length = search.max_tokens
    return state.beams[0].logprob / length**search.length_penalty <= state.hypotheses[-1].score
