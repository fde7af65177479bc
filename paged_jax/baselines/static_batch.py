"""A fixed batch, greedy, over either cache: what decode scripts do without a paged pool.

All prompts are prefilled together and decoded together until the longest one ends; rows that are
done go on being computed, as in any static batch.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.config import require
from paged_jax.model import Model
from paged_jax.pool import KVPool

CacheKind = Literal["paged", "dense"]


@dataclasses.dataclass(frozen=True, slots=True)
class StaticRun:
    """What a static batch yielded.

    Attributes:
      token_ids: generated tokens, a list a prompt, ``max_tokens`` each.
      margins: how far the best logit of each step led the second, ``[B, steps]``.
      logits: ``[B, V]`` of every step, if kept.
      cache_nbytes: bytes that the cache reserved.
      prefill_seconds: wall time of the prompts' step, compilation excluded.
      decode_seconds: wall time of all decode steps, compilation excluded.
    """

    token_ids: list[list[int]]
    margins: np.ndarray
    logits: list[np.ndarray]
    cache_nbytes: int
    prefill_seconds: float
    decode_seconds: float


def run_static_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    cache: CacheKind = "dense",
    capacity: int | None = None,
    block_size: int = 16,
    dtype: Any = jnp.float32,
    forced: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
) -> StaticRun:
    """Prefill and greedily decode a fixed batch.

    Args:
      model: what to run.
      prompts: token ids, none empty.
      max_tokens: tokens to generate, a number a prompt.
      cache: 'dense' reserves ``capacity`` positions a row; 'paged' reserves the same room as
        blocks, in shuffled order.
      capacity: positions a row; None means the longest that a row needs.
      block_size: token positions a block, for 'paged'.
      dtype: element type of the cache.
      forced: tokens to feed instead of the batch's own, to compare logits step by step.
      keep_logits: return every step's logits.

    Raises:
      ValueError: lengths do not match, a prompt is empty, or ``capacity`` is too small.
    """
    longest = _longest(prompts, max_tokens)
    capacity = longest if capacity is None else capacity
    require(capacity >= longest, f"capacity={capacity} must hold the longest row's {longest}")
    batch = _StaticBatch(model, len(prompts), cache, capacity, block_size, dtype)
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lens.max())), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    batch.compile(tokens.shape[1])
    kept: list[np.ndarray] = []
    begin = time.perf_counter()
    logits, sampled, margin = batch.step(tokens, np.zeros_like(lens), lens)
    sampled.block_until_ready()
    prefill_end = time.perf_counter()
    columns, margins, starts, ones = [sampled], [margin], lens, np.ones_like(lens)
    for index in range(max(max_tokens) - 1):
        if keep_logits:
            kept.append(np.asarray(logits))
        inputs = sampled if forced is None else _forced_column(forced, index)
        logits, sampled, margin = batch.step(inputs[:, None], starts, ones)
        starts = starts + 1
        columns.append(sampled)
        margins.append(margin)
    if keep_logits:
        kept.append(np.asarray(logits))
    generated = np.stack([np.asarray(column) for column in columns], axis=1)
    decode_end = time.perf_counter()
    return StaticRun(
        token_ids=[generated[row, :count].tolist() for row, count in enumerate(max_tokens)],
        margins=np.stack([np.asarray(margin) for margin in margins], axis=1),
        logits=kept,
        cache_nbytes=batch.nbytes,
        prefill_seconds=prefill_end - begin,
        decode_seconds=decode_end - prefill_end,
    )


class _StaticBatch:
    """The cache and the jitted step of a fixed batch; the cache is donated from step to step."""

    def __init__(
        self,
        model: Model,
        batch_size: int,
        kind: CacheKind,
        capacity: int,
        block_size: int,
        dtype: Any,
    ) -> None:
        self._params = model.params
        self._tables: np.ndarray | None = None
        if kind == "dense":
            self._storage: Any = DenseKVCache.create(
                model.spec, batch_size=batch_size, capacity=capacity, dtype=dtype
            )
        else:
            require(kind == "paged", f"cache={kind!r} must be 'dense' or 'paged'")
            width = -(-capacity // block_size)
            ids = np.random.default_rng(0).permutation(batch_size * width) + 1
            self._tables = ids.astype(np.int32).reshape(batch_size, width)
            self._storage = KVPool.create(
                model.spec, num_blocks=ids.size + 1, block_size=block_size, dtype=dtype
            )
        self.nbytes: int = self._storage.nbytes
        self._batch_size = batch_size
        self._compiled: dict[int, Any] = {}
        step = functools.partial(_static_step, model.apply)
        self._step = jax.jit(step, donate_argnames=("storage",))

    def compile(self, prompt_len: int) -> None:
        """Compile the shapes of the prompts' and of the decode steps, outside the timed part."""
        zeros = np.zeros(self._batch_size, np.int32)
        for num_new in {prompt_len, 1}:
            tokens = np.zeros((self._batch_size, num_new), np.int32)
            lowered = self._step.lower(self._params, **self._arguments(tokens, zeros, zeros))
            self._compiled[num_new] = lowered.compile()

    def step(
        self, tokens: Any, starts: np.ndarray, q_lens: np.ndarray
    ) -> tuple[Array, Int[Array, "B"], Array]:
        """Compute one step; return last-position logits, their argmax and its lead."""
        compiled = self._compiled[tokens.shape[1]]
        arguments = self._arguments(tokens, starts, q_lens)
        self._storage, logits, sampled, margin = compiled(self._params, **arguments)
        return logits, sampled, margin

    def _arguments(self, tokens: Any, starts: np.ndarray, q_lens: np.ndarray) -> dict[str, Any]:
        return {
            "storage": self._storage,
            "tables": self._tables,
            "tokens": tokens,
            "starts": starts,
            "q_lens": q_lens,
        }


def _static_step(
    apply: Any, params: Any, *, storage: Any, tables: Any, tokens: Any, starts: Any, q_lens: Any
) -> tuple[Any, Array, Array, Array]:
    num_new = tokens.shape[1]
    if tables is None:
        cache: Any = storage.at(starts, q_lens)
    else:
        cache = PagedKVCache.from_tables(storage, tables, starts, q_lens, num_new=num_new)
    positions = starts[:, None] + jnp.arange(num_new, dtype=jnp.int32)
    logits_at = jnp.maximum(q_lens - 1, 0)[:, None]
    logits, cache = apply(params, tokens, positions, cache, logits_at=logits_at)
    storage = cache if tables is None else cache.pool
    best, ids = jax.lax.top_k(logits[:, 0], 2)
    return storage, logits[:, 0], ids[:, 0].astype(jnp.int32), best[:, 0] - best[:, 1]


def _forced_column(forced: Sequence[Sequence[int]], index: int) -> np.ndarray:
    """Each row's token at ``index``; rows that have ended repeat their last one."""
    return np.array([row[min(index, len(row) - 1)] for row in forced], np.int32)


def _longest(prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> int:
    require(
        len(prompts) == len(max_tokens) > 0,
        f"max_tokens has {len(max_tokens)} entries, must have one a prompt ({len(prompts)} > 0)",
    )
    require(all(len(prompt) > 0 for prompt in prompts), "prompts must not be empty")
    require(min(max_tokens) >= 1, f"max_tokens={min(max_tokens)} must be >= 1")
    # A row that has ended is computed on until the longest one ends.
    return max(len(prompt) for prompt in prompts) + max(max_tokens) - 1
