"""What beam searches find where no model runs: a random one, whose beams fork and die alike."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from paged_jax.scheduling.beam import Candidate

_NUM_DRAWS = 4096
_NUM_STICKS = 64


class BeamModel:
    """Next-token distributions, each drawn for itself, by breaking a stick.

    The likeliest token takes a share of Beta(1, c) of the stick, the next one as much of what is
    left, and so on (a Dirichlet process' weights). With a small concentration c one token has it
    all, so each beam goes on by itself and what beams share is their prompt; with a large one many
    tokens are alike, the children of few beams take over, and beams share most of their outputs.

    Args:
      width: of the searches.
      seed: of the draws.
      concentration: c.
    """

    __slots__ = ("_draws", "_rng", "_width")

    def __init__(self, *, width: int, seed: int, concentration: float) -> None:
        rng = np.random.default_rng(seed)
        size = _NUM_DRAWS, max(_NUM_STICKS, width)
        shares = np.clip(rng.beta(1, concentration, size), 1e-12, 1 - 1e-12)
        left = np.cumsum(np.log1p(-shares), axis=1)
        logprobs = np.log(shares)
        logprobs[:, 1:] += left[:, :-1]
        self._draws: list[list[float]] = (-np.sort(-logprobs, axis=1)[:, :width]).tolist()
        self._rng = rng
        self._width = width

    def candidates(self, logprobs: Sequence[float], *, token_id: int) -> list[Candidate]:
        """The best continuations of all beams, best first, as many as the search is wide.

        Args:
          logprobs: of the beams so far, best first.
          token_id: of each beam's likeliest token; the others' follow.
        """
        draws = self._rng.integers(_NUM_DRAWS, size=len(logprobs)).tolist()
        found = [
            Candidate(logprob + more, parent, token_id + rank)
            for parent, (logprob, draw) in enumerate(zip(logprobs, draws, strict=True))
            for rank, more in enumerate(self._draws[draw])
        ]
        found.sort(key=attrgetter("logprob"), reverse=True)
        return found[: self._width]
