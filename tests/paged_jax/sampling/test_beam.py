"""Candidates of beams, chosen and ordered on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.beam import NO_GROUP, BeamRows, beam_candidates


@pytest.mark.parametrize("num_candidates", [1, 5, 12])
def test_each_groups_best_in_order(num_candidates):
    """Three groups among rows that are no beams; ties, zeros of both signs, bans, NaN elsewhere."""
    rng = np.random.default_rng(num_candidates)
    groups = np.array([0, 0, 0, NO_GROUP, 1, 2, 2, NO_GROUP], np.int32)
    logits = rng.integers(-3, 4, (8, 12)).astype(np.float32)
    logits[logits == 0] *= -1
    logits[:, 2] = -np.inf
    logits[3] = np.nan
    logits[1], logits[6] = logits[0], logits[5]
    scores = np.array([0, 0, -1, 9, 0, 0, -0.5, 9], np.float32)
    beams = BeamRows(group=jnp.asarray(groups), score=jnp.asarray(scores))
    found = jax.jit(beam_candidates, static_argnames="num_candidates")(
        logits, beams, num_candidates=num_candidates
    )
    sums = np.asarray(jax.nn.log_softmax(logits, axis=1) + scores[:, None])
    begin = 0
    for group in range(3):
        rows = np.flatnonzero(groups == group)
        end = begin + num_candidates * len(rows)
        parents, tokens = np.indices((len(rows), 12)).reshape(2, -1)
        order = np.lexsort((tokens, parents, -sums[rows].ravel()))[:num_candidates]
        some = slice(begin, begin + num_candidates)
        np.testing.assert_array_equal(found.row[some], rows[parents[order]])
        np.testing.assert_array_equal(found.token[some], tokens[order])
        np.testing.assert_array_equal(found.score[some], sums[rows].ravel()[order])
        begin = end
