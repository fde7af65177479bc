"""Greedy decoding of a fixed batch, without an engine: the same few lines for paged and dense."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.model import Model
from paged_jax.pool import KVPool


class FixedBatch:
    """Rows that prefill and decode together, against a paged pool or a dense cache.

    Args:
      model: what to run.
      kind: 'paged' or 'dense'.
      num_rows: rows of the batch (B).
      capacity: most tokens a row.
      block_size: slots a block.
      fill: what unused slots hold; nothing may depend on it.
    """

    def __init__(
        self,
        model: Model,
        kind: str,
        *,
        num_rows: int,
        capacity: int,
        block_size: int = 16,
        fill: float = 0.0,
    ) -> None:
        self.model = model
        self.starts = np.zeros(num_rows, np.int32)
        dtype = jax.tree.leaves(model.params)[0].dtype
        if kind == "dense":
            self.store: Any = DenseKVCache.create(
                model.spec, batch_size=num_rows, capacity=capacity, dtype=dtype, fill=fill
            )
            self.tables = None
        else:
            width = -(-capacity // block_size)
            num_blocks = 1 + num_rows * width
            self.store = KVPool.create(
                model.spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype, fill=fill
            )
            # Shuffled, so that neighbours in a sequence are strangers in the pool.
            ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
            self.tables = jnp.asarray(ids.reshape(num_rows, width))
        self.step = jax.jit(functools.partial(_step, model), donate_argnums=(1,))

    def arguments(self, tokens: np.ndarray, q_lens: np.ndarray, logits_at: np.ndarray) -> tuple:
        """What ``step`` takes."""
        arrays = (tokens, self.starts, q_lens, logits_at)
        arrays = [jnp.asarray(array, dtype=jnp.int32) for array in arrays]
        return (self.model.params, self.store, self.tables, *arrays)

    def run(self, tokens: Any, q_lens: Any, logits_at: Any = None) -> np.ndarray:
        """Feed ``q_lens`` new tokens a row; return logits [B, N, V], by default of the last one."""
        q_lens = np.asarray(q_lens, np.int32)
        if logits_at is None:
            logits_at = np.maximum(q_lens - 1, 0)[:, None]
        logits, self.store = self.step(*self.arguments(np.asarray(tokens), q_lens, logits_at))
        self.starts = self.starts + q_lens
        return np.asarray(logits)

    def prefill(self, prompts: Sequence[Sequence[int]], *, chunk: int) -> np.ndarray:
        """Feed whole prompts, ``chunk`` tokens at a time; return each one's last logits [B, V]."""
        lens = np.array([len(prompt) for prompt in prompts])
        last = np.zeros((len(prompts), self.model.spec.vocab_size), np.float32)
        for start in range(0, int(lens.max()), chunk):
            q_lens = np.clip(lens - start, 0, chunk)
            tokens = np.zeros((len(prompts), chunk), np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : q_lens[row]] = prompt[start : start + chunk]
            logits = self.run(tokens, q_lens)[:, 0]
            ends = (lens > start) & (lens <= start + chunk)
            last[ends] = logits[ends]
        return last

    def decode_greedy(self, logits: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return [B, num_tokens] token ids, the first being the argmax of ``logits``."""
        out = []
        for _ in range(num_tokens):
            out.append(logits.argmax(-1).astype(np.int32))
            if len(out) < num_tokens:
                logits = self.run(out[-1][:, None], np.ones(len(logits)))[:, 0]
        return np.stack(out, axis=1)


def _step(
    model: Model,
    params: Any,
    store: Any,
    tables: Any,
    tokens: Any,
    starts: Any,
    q_lens: Any,
    at: Any,
) -> tuple[Any, Any]:
    num_new = tokens.shape[1]
    positions = starts[:, None] + jnp.arange(num_new, dtype=jnp.int32)
    if tables is None:
        return model.apply(params, tokens, positions, store.at(starts, q_lens), logits_at=at)
    cache = PagedKVCache.from_tables(store, tables, starts, q_lens, num_new=num_new)
    logits, cache = model.apply(params, tokens, positions, cache, logits_at=at)
    return logits, cache.pool
