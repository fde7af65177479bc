"""The device's half of beam search: the best continuations of every group of beams.

Each beam's best tokens are found by themselves, then one sort puts the candidates of all groups in
order, group after group. So neither the number of groups nor their widths is part of a program.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

NO_GROUP = 2**31 - 1
"""The group of a row that is no beam: it sorts after all others."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["group", "score"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamRows:
    """Which rows are beams.

    Attributes:
      group: the search that a row is a beam of, numbered in row order from 0; else ``NO_GROUP``.
      score: a beam's sum of log-probabilities so far, less that of its group's best beam.
    """

    group: Int32[Array, " N"]
    score: Float32[Array, " N"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["score", "row", "token"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamCandidates:
    """Continuations of beams by one token; E is N times those kept of each row.

    Those of group 0 come first, then those of group 1, and so on. In a group the best come first;
    equal ones stand by row, then by token id. A group of w beams has w / N of the E entries.

    Attributes:
      score: the beam's ``BeamRows.score`` plus the token's log-probability; -inf where it is
        banned.
      row: the beam's row.
      token: the token.
    """

    score: Float32[Array, " E"]
    row: Int32[Array, " E"]
    token: Int32[Array, " E"]


def candidate_bucket(num_candidates: int, *, vocab_size: int) -> int:
    """The padded number of continuations that are kept of each beam: 8, 64, 512, ..., at most V.

    >>> [candidate_bucket(number, vocab_size=3000) for number in (1, 8, 9, 600)]
    [8, 8, 64, 3000]
    """
    bucket = 8
    while bucket < num_candidates:
        bucket *= 8
    return min(bucket, vocab_size)


def beam_candidates(
    logits: Float32[Array, "N V"], beams: BeamRows, *, num_candidates: int
) -> BeamCandidates:
    """The best ``num_candidates`` continuations of each beam, merged and ordered by group.

    Args:
      logits: biased; rows that are no beams may hold anything.
      beams: of the same rows.
      num_candidates: at least the group's width times (1 + its number of end tokens), or V.
    """
    num_rows, size = logits.shape[0], num_candidates
    scores = jax.nn.log_softmax(logits, axis=1) + beams.score[:, None]
    # top_k orders -0.0 below 0.0. The barrier keeps XLA from merging what follows into top_k,
    # which makes it a full sort.
    scores = jnp.where(scores == 0, jnp.float32(0), scores)
    top, tokens = lax.optimization_barrier(lax.top_k(scores, size))
    rows = lax.broadcasted_iota(jnp.int32, (num_rows, size), 0)
    groups = jnp.broadcast_to(beams.group[:, None], (num_rows, size))
    # Stable, so that equal candidates stay in the order of rows and token ids.
    _, negated, row, token = lax.sort(
        (groups.ravel(), -top.ravel(), rows.ravel(), tokens.ravel()), num_keys=2, is_stable=True
    )
    return BeamCandidates(score=-negated, row=row, token=token)
