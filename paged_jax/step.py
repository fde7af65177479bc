"""The jitted step: embed, attend through the block tables, sample. One program a batch layout.

Prefill chunks (T > 1, tokens from the host), decode (T = 1, tokens from the device's own last
samples) and the verification of drafts (T > 1, every position samples) are the same function at
different shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from paged_jax.batch import BatchLayout, StepInputs, unpack
from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.config import require
from paged_jax.model import ApplyFn
from paged_jax.pool import KVPool, run_pool_op
from paged_jax.row_state import RowState, record, record_run, start_rows
from paged_jax.sampling.beam import BeamCandidates, beam_candidates
from paged_jax.sampling.logprobs import TokenLogprobs, prompt_logprobs
from paged_jax.sampling.sampler import SampleResult, adjust_logits, sample
from pallas_kernels.block_copy import block_copy


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sampled", "prompt", "beams"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What one dispatch yields.

    Attributes:
      sampled: a token a row (meaningless where the row does not sample) and its log-probabilities;
        where the layout verifies, T tokens a row, one row after the other.
      prompt: log-probabilities of the prompt's own tokens, when asked for.
      beams: the best continuations of rows that are beams, when there are any.
    """

    sampled: SampleResult
    prompt: TokenLogprobs | None
    beams: BeamCandidates | None


@functools.lru_cache(maxsize=16)
def make_step(
    apply: ApplyFn,
    *,
    backend: str | None,
    donate: bool,
    interpret: bool = False,
    num_heads: int | None = None,
    max_window: int | None = None,
    is_dense: bool = False,
) -> Callable[..., Any]:
    """Build the jitted step of a model, or return it: engines of one model share their programs.

    Args:
      apply: the model (docs/design.md, "What a model sees"); hashable, as functions are.
      backend: attention backend, or None.
      donate: give pool and row state to the step, so that they are updated in place.
      interpret: run a GPU backend in Pallas's interpreter (for tests).
      num_heads: the model's query heads (H), which lets the layers share one plan on a GPU.
      max_window: keys that a query may attend to in any layer; None: all.
      is_dense: the pool's blocks are the regions of a ``DenseKVCache``, each as long as a context:
        block id i is region i - 1, and there is no null block.

    Returns:
      ``step(params, pool, state, packed, *, layout) -> (pool, state, StepOutputs)``.
    """

    def step(
        params: Any, pool: KVPool, state: RowState, packed: Array, *, layout: BatchLayout
    ) -> tuple[KVPool, RowState, StepOutputs]:
        inputs = unpack(packed, layout)
        if is_dense:
            regions = inputs.block_tables[:, 0] - 1
            cache = DenseKVCache(pool.blocks, inputs.start, inputs.num_new, regions)
        else:
            cache = PagedKVCache.from_tables(
                pool,
                inputs.block_tables,
                inputs.start,
                inputs.num_new,
                num_new=layout.num_new,
                num_heads=num_heads,
                backend=backend,
                interpret=interpret,
                max_window=max_window,
            )
        pool, logits = _run_model(apply, params, cache, state, inputs, layout)
        if layout.verifies:
            state, sampled = _verify_rows(logits, state, inputs, layout)
            return pool, state, StepOutputs(sampled, None, None)
        prompt = None
        if layout.prompt_logprobs is not None:
            assert inputs.targets is not None  # packed whenever prompt logprobs are wanted
            prompt = prompt_logprobs(logits, inputs.targets, num_logprobs=layout.prompt_logprobs)
            last = jnp.maximum(inputs.num_new - 1, 0)
            logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)
        logits = logits[:, 0]  # [B, V]
        if layout.num_branches:
            logits = logits[inputs.logits_row]  # [B + F, V]
        state, sampled = _sample_rows(logits, state, inputs, layout)
        beams = _continue_beams(logits, state, inputs, layout)
        return pool, state, StepOutputs(sampled, prompt, beams)

    donated = ("pool", "state") if donate else ()
    return jax.jit(step, static_argnames=("layout",), donate_argnames=donated)


def _run_model(
    apply: ApplyFn,
    params: Any,
    cache: PagedKVCache | DenseKVCache,
    state: RowState,
    inputs: StepInputs,
    layout: BatchLayout,
) -> tuple[KVPool, Array]:
    """Compute the rows' new positions; return the pool and logits ``[B, 1 or T, V]``."""
    tokens = inputs.tokens
    if tokens is None:
        host_token, last_token = inputs.host_token, state.last_token[inputs.state_slot]
        tokens = jnp.where(host_token >= 0, host_token, last_token)[:, None]  # [B, 1]
    offsets = jnp.arange(layout.num_new, dtype=jnp.int32)
    is_new = offsets < inputs.num_new[:, None]
    positions = jnp.where(is_new, inputs.start[:, None] + offsets, 0)
    if layout.prompt_logprobs is None and not layout.verifies:
        logits_at = jnp.maximum(inputs.num_new - 1, 0)[:, None]  # [B, 1]
    else:
        logits_at = jnp.broadcast_to(offsets, is_new.shape)  # [B, T]
    result = apply(params, tokens, positions, cache, logits_at=logits_at)
    return _checked(result, given=cache, shape=logits_at.shape, vocab_size=layout.vocab_size)


def _checked(
    result: Any,
    *,
    given: PagedKVCache | DenseKVCache,
    shape: tuple[int, ...],
    vocab_size: int,
) -> tuple[KVPool, Array]:
    """Tell a model's author, at trace time, what ``apply`` returned wrongly."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    require(
        is_pair and isinstance(result[1], type(given)),
        f"apply returned {type(result).__name__}, must return the pair (logits, cache)",
    )
    logits, cache = result
    require(
        cache.pool.blocks is not given.pool.blocks,
        "apply returned the cache that it was given: return the one that cache.attend returns",
    )
    wanted = (*shape, vocab_size)
    require(
        jnp.shape(logits) == wanted,
        f"apply returned logits of shape {jnp.shape(logits)}, must be {wanted}: [B, N, V], at the "
        "positions logits_at only, with ModelSpec.vocab_size entries",
    )
    return cache.pool, logits


def _sample_rows(
    logits: Array, state: RowState, inputs: StepInputs, layout: BatchLayout
) -> tuple[RowState, SampleResult]:
    """Draw each row's next token and remember it for the next step."""
    slots = inputs.state_slot
    new_slots = slots
    if layout.is_decode:
        new_slots = jnp.where(inputs.host_token >= 0, slots, state.num_rows)
    unread = jnp.zeros_like(slots)  # overwritten by the token that is sampled below
    state = start_rows(state, new_slots, unread, inputs.first_position, inputs.base_key)
    sampled = sample(logits, inputs.sampler, state, slots, flags=layout.flags)
    return record(state, slots, sampled.tokens), sampled


def _continue_beams(
    logits: Array, state: RowState, inputs: StepInputs, layout: BatchLayout
) -> BeamCandidates | None:
    """Score what may follow each beam, by the logits with their biases."""
    if inputs.beams is None:
        return None
    flags = dataclasses.replace(layout.flags, penalties=False)
    logits = logits.astype(jnp.float32)
    biased = adjust_logits(logits, inputs.sampler, state, inputs.state_slot, flags=flags)
    return beam_candidates(biased, inputs.beams, num_candidates=layout.num_candidates)


def _verify_rows(
    logits: Array, state: RowState, inputs: StepInputs, layout: BatchLayout
) -> tuple[RowState, SampleResult]:
    """Draw a token at every position ``[B, T, V]``; remember those that the drafts lead to."""
    assert inputs.tokens is not None  # the host's
    num_rows, num_new = inputs.tokens.shape
    slots = inputs.state_slot
    state = start_rows(state, slots, jnp.zeros_like(slots), inputs.first_position, inputs.base_key)
    each = jax.tree.map(lambda column: jnp.repeat(column, num_new, axis=0), inputs.sampler)
    offsets = jnp.arange(num_new, dtype=jnp.int32)
    sampled = sample(
        logits.reshape(num_rows * num_new, -1),
        each,
        state,
        jnp.repeat(slots, num_new),
        flags=layout.flags,
        offsets=jnp.tile(offsets, num_rows),
    )
    tokens = sampled.tokens.reshape(num_rows, num_new)
    is_new = offsets < inputs.num_new[:, None]  # [B, T]
    is_right = (tokens[:, :-1] == inputs.tokens[:, 1:]) & is_new[:, 1:]
    num_accepted = jnp.sum(jnp.cumprod(is_right, axis=1, dtype=jnp.int32), axis=1)
    has_nan = jnp.any(sampled.has_nan.reshape(num_rows, num_new) & is_new, axis=1)
    state = record_run(state, slots, tokens, 1 + num_accepted)
    return state, dataclasses.replace(sampled, has_nan=has_nan)


def make_block_copy(
    *, donate: bool, backend: str | None = None, interpret: bool = False
) -> Callable[..., KVPool]:
    """Build the jitted ``copy(pool, pairs i32[2, C]) -> pool``: a step's copies in one launch.

    Args:
      donate: give the pool to the copy, so that it is updated in place.
      backend: backend to use where it has such a copy, or None for the best one here.
      interpret: run a GPU backend in Pallas's interpreter (for tests).
    """

    def copy(pool: KVPool, pairs: Int[Array, "2 C"]) -> KVPool:
        def run(backend: str | None) -> Any:
            src, dst = pairs[0], pairs[1]
            options = {"backend": backend, "interpret": interpret}
            return block_copy(pool.blocks, src, dst, kv_scales=pool.scales, **options)

        return run_pool_op(run, backend, like=pool)

    return jax.jit(copy, donate_argnames=("pool",) if donate else ())
