import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from paged_jax.sampling.draw import draw, first_argmax
from paged_jax.sampling.inputs import pack_inputs
from paged_jax.sampling.noise import base_key, exponential, position_keys
from paged_jax.sampling.params import SamplingParams

jitted_draw = jax.jit(draw, static_argnames="num_candidates")


def keys_for(num_rows, *, seed=0, position=0):
    keys = jnp.asarray(np.stack([base_key(seed, 0)] * num_rows))
    positions = jnp.arange(position, position + num_rows, dtype=jnp.int32)
    return position_keys(keys, positions)


def draw_rows(logits, params, keys, *, num_candidates=64):
    inputs = pack_inputs(params, num_rows=len(params), bias_width=0)
    tokens = jitted_draw(
        jnp.asarray(logits), jax.tree.map(jnp.asarray, inputs), keys, num_candidates=num_candidates
    )
    return np.asarray(tokens)


def kept_by_full_sort(logits, params):
    """The kept tokens, best first, and whether rounding could change which they are."""
    logits = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.is_greedy:
        return order[:1], False
    scaled = (logits[order] - logits.max()) / np.float32(params.temperature)
    log_min_p = np.log(np.float64(np.float32(params.min_p))) if params.min_p else -np.inf
    finite = scaled[np.isfinite(scaled)]
    unsure = 0 < params.min_p < 1 and bool((np.abs(finite - log_min_p) < 1e-5).any())
    keep = scaled >= log_min_p
    order, scaled = order[keep], scaled[keep]
    if 1 <= params.top_k < len(order):
        order, scaled = order[: params.top_k], scaled[: params.top_k]
    if params.top_p < 1:
        weights = np.exp(scaled)
        before = np.cumsum(weights) - weights
        target = float(np.float32(params.top_p)) * weights.sum()
        unsure |= bool((np.abs(before[1:] - target) < 1e-5 * weights.sum()).any())
        keep = before < target
        keep[0] = True
        order = order[keep]
    return order, unsure


def expected_token(logits, params, noise):
    order, unsure = kept_by_full_sort(logits, params)
    temperature = 1.0 if params.is_greedy else np.float32(params.temperature)
    scaled = (logits[order].astype(np.float64) - logits.max()) / temperature
    scores = np.exp(scaled) / noise[order].astype(np.float64)
    best = np.sort(scores)[::-1]
    unsure |= len(best) > 1 and best[1] > best[0] * (1 - 1e-5)
    return order[np.argmax(scores)], unsure


CHOICES = {
    "temperature": [0.0, 1e-4, 0.3, 0.8, 1.0, 1.7, 50.0],
    "top_k": [-1, 0, 1, 2, 3, 7, 20, 40, 96, 97, 102, 10**10],
    "top_p": [0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0],
    "min_p": [0.0, 0.0, 1e-3, 0.05, 0.4, 1.0],
}
VOCAB = 97
ROWS = 256


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "some -inf", "half precision"])
def test_equals_a_full_sort_on_every_path(seed, kind):
    rng = np.random.default_rng(seed)
    picks = rng.random((ROWS, len(CHOICES)))
    params = [
        SamplingParams(
            **{
                name: values[int(pick * len(values))]
                for (name, values), pick in zip(CHOICES.items(), row, strict=True)
            }
        )
        for row in picks
    ]
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    if kind == "tied":
        logits = np.round(logits)
        logits[rng.random(logits.shape) < 0.1] = -0.0
    elif kind == "flat":
        logits[:] = 0.25
    elif kind == "some -inf":
        logits[:, 1:][rng.random((ROWS, VOCAB - 1)) < 0.7] = -np.inf
    elif kind == "half precision":
        logits = np.clip(logits * 8000, -65000, 65000).astype(np.float16).astype(np.float32)
    keys = keys_for(ROWS, seed=seed)
    noise = np.asarray(exponential(keys, jnp.arange(VOCAB, dtype=jnp.int32)[None]))
    # 4 candidates: mostly rejection, and bisection where top_k is in between; 97: candidates only.
    paths = {n: draw_rows(logits, params, keys, num_candidates=n) for n in (4, 64, VOCAB)}
    num_unsure = 0
    for row in range(ROWS):
        token, unsure = expected_token(logits[row], params[row], noise[row])
        num_unsure += unsure
        drawn = {n: int(tokens[row]) for n, tokens in paths.items()}
        assert unsure or set(drawn.values()) == {int(token)}, (params[row], drawn, token)
    assert kind == "flat" or num_unsure <= ROWS // 3


def test_top_p_is_a_share_of_what_top_k_leaves():
    logits = np.tile(np.linspace(0.0, -1.0, 60, dtype=np.float32), (512, 1))
    params = SamplingParams(top_k=12, top_p=0.5)
    kept, _ = kept_by_full_sort(logits[0], params)
    assert len(kept) < 7
    for num_candidates in (8, 64):
        tokens = draw_rows(logits, [params] * 512, keys_for(512), num_candidates=num_candidates)
        assert set(tokens.tolist()) == set(kept.tolist())


DISTRIBUTIONS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.5),
    "top_p": SamplingParams(temperature=2.0, top_p=0.7),
    "top_k": SamplingParams(top_k=7),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.5, min_p=0.02, top_k=20, top_p=0.9),
}


@pytest.mark.parametrize("params", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("num_candidates", [4, 40])
def test_frequencies_fit_the_probabilities(params, num_candidates):
    num_draws = 20_000
    logits = np.random.default_rng(5).normal(size=40).astype(np.float32) * 1.5
    kept, unsure = kept_by_full_sort(logits, params)
    assert not unsure
    tokens = draw_rows(
        np.tile(logits, (num_draws, 1)),
        [params] * num_draws,
        keys_for(num_draws, seed=99),
        num_candidates=num_candidates,
    )
    counts = np.bincount(tokens, minlength=40)
    assert counts.sum() == counts[kept].sum()
    weights = np.exp(logits[kept].astype(np.float64) / params.temperature)
    expected = num_draws * weights / weights.sum()
    rare = expected < 5
    observed = np.append(counts[kept][~rare], counts[kept][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_flat_vocabulary_is_drawn_evenly():
    num_draws, vocab = 2048, 10_000
    tokens = draw_rows(
        np.zeros((num_draws, vocab), np.float32),
        [SamplingParams()] * num_draws,
        keys_for(num_draws),
    )
    counts = np.bincount(tokens * 32 // vocab, minlength=32)
    assert stats.chisquare(counts).pvalue > 1e-3
    # Seeds that differ by one bit, or positions next to each other, share nothing.
    assert len(np.unique(tokens)) > 1780


def test_rows_without_a_distribution_give_a_token_in_range():
    logits = np.zeros((6, 40), np.float32)
    logits[0, 3] = np.nan
    logits[1, :] = -np.nan
    logits[2, 5] = np.inf
    logits[3, :] = -np.inf
    logits[4, 7] = -np.float32(np.nan)  # sorts last, so the best token looks healthy
    for num_candidates in (4, 64):
        tokens = draw_rows(
            logits, [SamplingParams()] * 6, keys_for(6), num_candidates=num_candidates
        )
        assert ((tokens >= 0) & (tokens < 40)).all()


def test_both_zeros_are_equal():
    logits = np.array([[-0.0, 0.0, -0.0, 0.0]] * 64, np.float32)
    for params, kept in [(SamplingParams(top_k=1), 1), (SamplingParams(top_k=2), 2)]:
        for num_candidates in (1, 4):
            tokens = draw_rows(logits, [params] * 64, keys_for(64), num_candidates=num_candidates)
            assert sorted(set(tokens.tolist())) == list(range(kept))


def test_first_argmax_takes_the_first_of_equals_and_stays_in_range():
    values = jnp.array([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [np.nan] * 3, [-np.inf] * 3])
    tokens = np.asarray(first_argmax(values))
    assert tokens[:2].tolist() == [1, 0]
    assert ((tokens >= 0) & (tokens < 3)).all()


def test_the_vocabulary_is_not_sorted():
    vocab = 5003
    inputs = pack_inputs([SamplingParams(top_p=0.9)] * 4, num_rows=4, bias_width=0)
    compiled = jax.jit(draw).lower(jnp.zeros((4, vocab)), inputs, keys_for(4)).compile()
    sorts = [line for line in compiled.as_text().splitlines() if re.search(r" sort\(", line)]
    assert not [line for line in sorts if str(vocab) in line]
