"""What a step keeps on the device for each resident sequence, between steps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paged_jax.config import require


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["last_token", "output_len", "base_key", "prompt_seen", "output_counts"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowState:
    """State of R resident sequences, one entry each, and a dummy entry R for padding rows.

    Attributes:
      last_token: the token sampled last, the next step's input.
      output_len: tokens sampled so far: the output position of the next one.
      base_key: raw threefry key data of (seed, sample index); see ``sampling.noise``.
      prompt_seen: tokens in the prompt, while some request uses penalties, else None.
      output_counts: times each token is in the output, while some request uses penalties.
    """

    last_token: Int32[Array, " R+1"]
    output_len: Int32[Array, " R+1"]
    base_key: UInt32[Array, "R+1 2"]
    prompt_seen: Bool[Array, "R+1 V"] | None = None
    output_counts: Int32[Array, "R+1 V"] | None = None

    @property
    def num_rows(self) -> int:
        """R: resident sequences, and the slot that padding rows name."""
        return self.last_token.shape[0] - 1


def create(num_rows: int) -> RowState:
    """An empty state for ``num_rows`` sequences, without counts.

    Raises:
      ValueError: ``num_rows`` is not positive.
    """
    require(num_rows > 0, f"num_rows={num_rows} must be positive")
    return RowState(
        last_token=jnp.zeros(num_rows + 1, jnp.int32),
        output_len=jnp.zeros(num_rows + 1, jnp.int32),
        base_key=jnp.zeros((num_rows + 1, 2), jnp.uint32),
    )


def with_penalties(state: RowState, vocab_size: int) -> RowState:
    """The state with zero counts; rows that use penalties then load theirs."""
    shape = (state.num_rows + 1, vocab_size)
    return dataclasses.replace(
        state,
        prompt_seen=jnp.zeros(shape, jnp.bool_),
        output_counts=jnp.zeros(shape, jnp.int32),
    )


def without_penalties(state: RowState) -> RowState:
    """The state without counts."""
    return dataclasses.replace(state, prompt_seen=None, output_counts=None)


def _safe_slots(state: RowState, slots: Int32[Array, " B"]) -> Int32[Array, " B"]:
    # jax wraps negative indices and clamps large ones: both must reach the dummy entry instead.
    inside = (slots >= 0) & (slots < state.num_rows)
    return jnp.where(inside, slots, state.num_rows)


def start_rows(
    state: RowState,
    slots: Int32[Array, " B"],
    last_tokens: Int32[Array, " B"],
    output_lens: Int32[Array, " B"],
    base_keys: UInt32[Array, "B 2"],
) -> RowState:
    """Set the entries of sequences that start, or come back after a preemption.

    Args:
      state: the state to change.
      slots: entries to set; R, or anything else outside 0 .. R - 1, for none.
      last_tokens: what the next decode step reads, if it reads a token (0 when it does not).
      output_lens: tokens that the sequence has already output, 0 for a new one.
      base_keys: from ``sampling.noise.base_key``.
    """
    slots = _safe_slots(state, slots)
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(last_tokens),
        output_len=state.output_len.at[slots].set(output_lens),
        base_key=state.base_key.at[slots].set(base_keys),
    )


def load_counts(
    state: RowState,
    slot: Int32[Array, ""],
    tokens: Int32[Array, " N"],
    prompt_len: Int32[Array, ""],
    total_len: Int32[Array, ""],
) -> RowState:
    """Rebuild one sequence's counts from the host's tokens; padding is not counted.

    Args:
      state: a state with counts.
      slot: the sequence's entry.
      tokens: prompt, then output, then padding, of any value.
      prompt_len: tokens of the prompt.
      total_len: tokens of prompt and output.

    Raises:
      ValueError: the state has no counts.
    """
    require(
        state.prompt_seen is not None and state.output_counts is not None,
        "state.output_counts=None must be present: call with_penalties first",
    )
    assert state.prompt_seen is not None
    assert state.output_counts is not None
    vocab_size = state.prompt_seen.shape[1]
    slot = _safe_slots(state, slot)
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    # V is out of range, so mode="drop" drops it.
    prompt = jnp.where(index < prompt_len, tokens, vocab_size)
    output = jnp.where((index >= prompt_len) & (index < total_len), tokens, vocab_size)
    seen = jnp.zeros(vocab_size, jnp.bool_).at[prompt].set(True, mode="drop")
    counts = jnp.zeros(vocab_size, jnp.int32).at[output].add(1, mode="drop")
    return dataclasses.replace(
        state,
        prompt_seen=state.prompt_seen.at[slot].set(seen),
        output_counts=state.output_counts.at[slot].set(counts),
    )


def record_run(
    state: RowState,
    slots: Int32[Array, " B"],
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
) -> RowState:
    """Append the first ``counts`` (at least 1) of each row's tokens; slot R for padding rows.

    Token counts stay as they are: a row that uses penalties samples one token a step.
    """
    slots = _safe_slots(state, slots)
    last = jnp.take_along_axis(tokens, counts[:, None] - 1, axis=1)[:, 0]
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(last),
        output_len=state.output_len.at[slots].add(counts),
    )


def record(state: RowState, slots: Int32[Array, " B"], tokens: Int32[Array, " B"]) -> RowState:
    """Append a step's sampled tokens; rows that do not sample name slot R."""
    slots = _safe_slots(state, slots)
    counts = state.output_counts
    if counts is not None:
        counts = counts.at[slots, tokens].add(1)
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(tokens),
        output_len=state.output_len.at[slots].add(1),
        output_counts=counts,
    )
