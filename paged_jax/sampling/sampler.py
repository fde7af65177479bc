"""The sampler: from a step's logits to its tokens, as pure functions to be jitted."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from paged_jax.config import require
from paged_jax.row_state import RowState
from paged_jax.sampling.draw import draw, first_argmax
from paged_jax.sampling.inputs import SamplerFlags, SamplerInputs
from paged_jax.sampling.logprobs import TokenLogprobs, token_logprobs
from paged_jax.sampling.noise import position_keys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "has_nan", "logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """What a step sampled.

    Attributes:
      tokens: always inside the vocabulary.
      has_nan: the row's logits are no distribution (NaN, +inf, or nothing above -inf), and its
        token means nothing.
      logprobs: under the unmodified logits, if the flags ask for them.
    """

    tokens: Int32[Array, " B"]
    has_nan: Bool[Array, " B"]
    logprobs: TokenLogprobs | None


def adjust_logits(
    logits: Float32[Array, "B V"],
    inputs: SamplerInputs,
    state: RowState,
    slots: Int32[Array, " B"],
    *,
    flags: SamplerFlags,
) -> Float32[Array, "B V"]:
    """Add the biases, then apply the penalties (repetition, presence, frequency).

    Repetition looks at prompt and output, the other two at the output only.

    Raises:
      ValueError: the flags ask for penalties and the state holds no counts.
    """
    if flags.bias_width:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = logits.at[rows, inputs.bias_ids].add(inputs.bias_values)
    if not flags.penalties:
        return logits
    require(
        state.prompt_seen is not None and state.output_counts is not None,
        "state.output_counts=None must be present where flags.penalties is True",
    )
    assert state.prompt_seen is not None
    assert state.output_counts is not None
    counts = state.output_counts[slots]
    seen = state.prompt_seen[slots] | (counts > 0)
    repetition = inputs.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits -= jnp.where(counts > 0, inputs.presence[:, None], 0)
    return logits - inputs.frequency[:, None] * counts.astype(jnp.float32)


def sample(
    logits: Float[Array, "B V"],
    inputs: SamplerInputs,
    state: RowState,
    slots: Int32[Array, " B"],
    *,
    flags: SamplerFlags,
    offsets: Int32[Array, " B"] | int = 0,
) -> SampleResult:
    """Sample one token a row; ``record`` in row_state then appends it.

    Args:
      logits: any floating dtype; computed on in float32.
      inputs: the rows' parameters.
      state: read for keys, output positions and counts.
      slots: the rows' entries in ``state``; R for padding rows.
      flags: static.
      offsets: how far after the state's next output position each row's token stands, where a
        sequence samples several at once.

    Raises:
      ValueError: the flags ask for penalties and the state holds no counts.
    """
    logits = logits.astype(jnp.float32)
    slots = jnp.where((slots >= 0) & (slots < state.num_rows), slots, state.num_rows)
    adjusted = adjust_logits(logits, inputs, state, slots, flags=flags)
    if flags.greedy_only:
        tokens = first_argmax(adjusted)
    else:
        keys = position_keys(state.base_key[slots], state.output_len[slots] + offsets)
        tokens = draw(adjusted, inputs, keys)
    # XLA's CPU maximum loses NaN, so it is looked for by itself.
    best = jnp.max(logits, axis=1)
    has_nan = jnp.any(jnp.isnan(logits), axis=1) | ~jnp.isfinite(best)
    logprobs = None
    if flags.num_logprobs is not None:
        logprobs = token_logprobs(logits, tokens, num_logprobs=flags.num_logprobs)
    return SampleResult(tokens=tokens, has_nan=has_nan, logprobs=logprobs)
