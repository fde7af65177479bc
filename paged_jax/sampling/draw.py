"""Exact min-p, top-k and top-p draws without sorting the vocabulary.

A row's tokens are ordered by logit, equal ones by id. Each filter keeps a prefix of that order,
so a kept set is given by its length or its last token, and a token is in it if few enough
tokens, with little enough probability, come before it. Two paths give the same token, since
noise belongs to a token id:

1. *Candidates*: the best C tokens in order. If they hold everything that the filters keep, the
   token with the largest weight / noise among the kept ones is the draw.
2. *Rejection*, for rows whose kept set may be larger: take the token with the largest
   weight / noise of all; if the filters keep it, it is the draw; if not, they keep nothing
   after it either, so look again among the tokens before it. The first look succeeds with
   probability of at least about top_p, and the tokens left shrink geometrically.

The mass that top_p is a share of needs the k-th best token when top_k exceeds C: found by
bisection on the logits' bit patterns, in the steps that ask for it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from paged_jax.sampling.inputs import SamplerInputs
from paged_jax.sampling.noise import exponential
from paged_jax.sampling.params import GREEDY_TEMPERATURE

NUM_CANDIDATES = 64
REJECTION_ROWS = 8


def first_argmax(values: Float32[Array, "B V"]) -> Int32[Array, " B"]:
    """Index of the largest value, the first of equal ones; in range whatever the values.

    Two passes that XLA vectorises: eight times as fast on CPU as ``jnp.argmax``.
    """
    size = values.shape[1]
    best = jnp.max(values, axis=1, keepdims=True)
    index = jnp.where(values == best, jnp.arange(size, dtype=jnp.int32), size - 1)
    return jnp.min(index, axis=1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "best", "keys", "temperature", "top_p", "limit", "log_min_p"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """A step's rows, ready to draw; per-row values are columns [B, 1]."""

    logits: Float32[Array, "B V"]  # adjusted, without -0.0
    best: Float32[Array, "B 1"]
    keys: UInt32[Array, "B 2"]
    temperature: Float32[Array, "B 1"]
    top_p: Float32[Array, "B 1"]
    limit: Int32[Array, "B 1"]  # top_k, 1 .. V
    log_min_p: Float32[Array, "B 1"]

    def scaled(self, logits: Float32[Array, "B N"]) -> Float32[Array, "B N"]:
        # At most 0 before the division: a small temperature gives -inf, never NaN.
        return (logits - self.best) / self.temperature

    def weight(self, logits: Float32[Array, "B N"]) -> Float32[Array, "B N"]:
        """Unnormalised probability, 1 for the best; 0 where min-p removes the token."""
        scaled = self.scaled(logits)
        return jnp.where(scaled >= self.log_min_p, jnp.exp(scaled), 0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["logits", "ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Places:
    """Places in the rows' order, each array [B, N] or broadcast to it."""

    logits: Float32[Array, "B N"]
    ids: Int32[Array, "B N"]

    def before(self, place: _Places) -> Bool[Array, "B N"]:
        """Which of these come strictly before another place in the order."""
        tied = (self.logits == place.logits) & (self.ids < place.ids)
        return (self.logits > place.logits) | tied


def _kept(
    rows: _Rows,
    place_logits: Float32[Array, "B N"],
    count_before: Int32[Array, "B N"],
    mass_before: Float32[Array, "B N"],
    mass: Float32[Array, "B 1"],
) -> Bool[Array, "B N"]:
    """Which places the three filters keep; ``mass`` is what min-p and top-k leave."""
    by_mass = (rows.top_p >= 1) | (mass_before < rows.top_p * mass)
    by_min_p = rows.scaled(place_logits) >= rows.log_min_p
    return (count_before == 0) | ((count_before < rows.limit) & by_mass & by_min_p)


def _kth_mass(rows: _Rows, weights: Float32[Array, "B V"]) -> Float32[Array, "B 1"]:
    """Weight of each row's best ``limit`` tokens, by bisection for the last one's logit."""
    bits = lax.bitcast_convert_type(rows.logits, jnp.int32)
    ordered = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))  # int32 order is float order

    def halve(_, bounds):
        low, high = bounds  # count(ordered >= low) >= limit, count(ordered >= high) < limit
        middle = (low & high) + ((low ^ high) >> 1)
        count = jnp.sum(ordered >= middle, axis=1, keepdims=True, dtype=jnp.int32)
        enough = count >= rows.limit
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = jnp.full_like(rows.limit, np.iinfo(np.int32).min)
    stop = jnp.full_like(rows.limit, np.iinfo(np.int32).max)
    kth, _ = lax.fori_loop(0, 32, halve, (start, stop))
    above = jnp.sum(ordered > kth, axis=1, keepdims=True, dtype=jnp.int32)
    mass_above = jnp.sum(jnp.where(ordered > kth, weights, 0), axis=1, keepdims=True)
    tied_weight = jnp.max(jnp.where(ordered == kth, weights, 0), axis=1, keepdims=True)
    return mass_above + tied_weight * (rows.limit - above).astype(jnp.float32)


def _reject_rows(
    rows: _Rows, settled: Bool[Array, "B 1"], tokens: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    batch, vocab_size = rows.logits.shape
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None]
    everything = _Places(logits=rows.logits, ids=ids)
    weights = rows.weight(rows.logits)
    scores = weights / exponential(rows.keys, ids)
    total = jnp.sum(weights, axis=1, keepdims=True)
    deep = ~settled & (rows.limit < vocab_size) & (rows.top_p < 1)
    mass = lax.cond(
        jnp.any(deep),
        lambda: jnp.where(deep, _kth_mass(rows, weights), total),
        lambda: total,
    )

    def look(carry):
        bound, tokens, settled = carry
        drawn = first_argmax(jnp.where(everything.before(bound), scores, -1))[:, None]
        place = _Places(logits=jnp.take_along_axis(rows.logits, drawn, axis=1), ids=drawn)
        before = everything.before(place)
        count = jnp.sum(before, axis=1, keepdims=True, dtype=jnp.int32)
        mass_before = jnp.sum(jnp.where(before, weights, 0), axis=1, keepdims=True)
        kept = _kept(rows, place.logits, count, mass_before, mass)
        tokens = jnp.where(settled[:, 0], tokens, drawn[:, 0])
        return place, tokens, settled | kept

    end = _Places(
        logits=jnp.full((batch, 1), -jnp.inf, jnp.float32),
        ids=jnp.full((batch, 1), vocab_size, jnp.int32),
    )
    carry = (end, tokens, settled)
    _, tokens, _ = lax.while_loop(lambda carry: ~jnp.all(carry[2]), look, carry)
    return tokens


def _reject(
    rows: _Rows, settled: Bool[Array, "B 1"], tokens: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """Draw for the rows that are not settled, a few at a time: the cost follows their number."""
    batch = tokens.shape[0]
    size = min(REJECTION_ROWS, batch)
    order = jnp.argsort(settled[:, 0], stable=True)  # those to draw for come first
    order = jnp.pad(order, (0, -batch % size), mode="edge")

    def draw_some(i, tokens):
        index = lax.dynamic_slice(order, (i * size,), (size,))
        some = jax.tree.map(lambda field: field[index], rows)
        return tokens.at[index].set(_reject_rows(some, settled[index], tokens[index]))

    num_left = jnp.sum(~settled, dtype=jnp.int32)
    return lax.fori_loop(0, (num_left + (size - 1)) // size, draw_some, tokens)


def draw(
    logits: Float32[Array, "B V"],
    inputs: SamplerInputs,
    keys: UInt32[Array, "B 2"],
    *,
    num_candidates: int = NUM_CANDIDATES,
) -> Int32[Array, " B"]:
    """One token a row by temperature, min-p, top-k and top-p, in that order.

    Args:
      logits: biased and penalised; a row with NaN, +inf or nothing above -inf gives any token.
      inputs: temperature and filters of the rows.
      keys: from ``noise.position_keys``.
      num_candidates: tokens that are looked at before the whole vocabulary is (C).
    """
    vocab_size = logits.shape[1]
    # lax.top_k orders -0.0 below 0.0: equal logits must compare equal everywhere here.
    logits = jnp.where(logits == 0, jnp.float32(0), logits)
    # The barrier keeps XLA from merging the slices below into top_k, which makes it a full sort
    # (20 times the time on CPU).
    top, top_ids = lax.optimization_barrier(lax.top_k(logits, min(num_candidates, vocab_size)))
    no_limit = (inputs.top_k < 1) | (inputs.top_k > vocab_size)
    greedy = (inputs.temperature <= np.float32(GREEDY_TEMPERATURE)) | ~jnp.isfinite(top[:, 0])
    rows = _Rows(
        logits=logits,
        best=top[:, :1],
        keys=keys,
        temperature=jnp.where(greedy, 1, inputs.temperature)[:, None],
        top_p=inputs.top_p[:, None],
        limit=jnp.where(no_limit, vocab_size, inputs.top_k)[:, None],
        log_min_p=jnp.log(inputs.min_p)[:, None],
    )
    size = top.shape[1]
    weights = rows.weight(top)
    rank = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), top.shape)
    shallow = rows.limit <= size
    mass = jnp.where(
        shallow,
        jnp.sum(jnp.where(rank < rows.limit, weights, 0), axis=1, keepdims=True),
        jnp.sum(rows.weight(logits), axis=1, keepdims=True),
    )
    mass_before = jnp.pad(jnp.cumsum(weights, axis=1)[:, :-1], ((0, 0), (1, 0)))
    kept = _kept(rows, top, rank, mass_before, mass)
    scores = jnp.where(kept, weights / exponential(keys, top_ids), -1)
    # Equal scores: the lower id, as on the other path. Candidates are not in id order.
    winning = scores == jnp.max(scores, axis=1, keepdims=True)
    tokens = jnp.min(jnp.where(winning, top_ids, vocab_size - 1), axis=1)
    tokens = jnp.where(greedy, top_ids[:, 0], tokens)
    # Filters keep prefixes: once a candidate is out, all after it are. But between C and V,
    # top_k leaves less mass than was summed here, so top_p may not be what ends the prefix.
    whole = (rows.limit == vocab_size) | (rows.top_p >= 1)
    ended = jnp.where(whole, ~kept[:, -1:], weights[:, -1:] == 0)
    settled = greedy[:, None] | shallow | ended
    return _reject(rows, settled, tokens)
