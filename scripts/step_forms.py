"""What the step benchmark times: one greedy decode step of a model, over different caches."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from paged_jax import Model
from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.pool import KVPool


@dataclasses.dataclass(slots=True)
class Form:
    """A step ``run(params, store, tokens) -> (store, tokens)``; the store is used up each time."""

    run: Callable[..., tuple[Any, Array]]
    params: Any
    store: Any
    tokens: Array
    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> None:
        """Run once and record the time."""
        begin = time.perf_counter()
        self.store, self.tokens = self.run(self.params, self.store, self.tokens)
        self.tokens.block_until_ready()
        self.seconds.append(time.perf_counter() - begin)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "starts"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class UnrolledCache:
    """A contiguous cache with arrays ``[B, K, C, D]`` of keys and of values for each layer.

    The simplest dense cache: one token a row, all rows equally long, no windows.
    """

    layers: tuple[tuple[Array, Array], ...]
    starts: Array

    def attend(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """See ``KVCache.attend``."""
        if any(value is not None for value in options.values()):
            raise NotImplementedError(f"options {options} are not served")
        num_rows, _, num_heads, head_dim = q.shape
        keys, values = self.layers[layer]
        num_kv_heads, capacity = keys.shape[1:3]
        at = (0, 0, self.starts[0], 0)
        keys = jax.lax.dynamic_update_slice(keys, k.transpose(0, 2, 1, 3).astype(keys.dtype), at)
        values = jax.lax.dynamic_update_slice(
            values, v.transpose(0, 2, 1, 3).astype(values.dtype), at
        )
        grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = dot("bkgd,bkcd->bkgc", grouped.astype(keys.dtype), keys)
        is_written = jnp.arange(capacity) <= self.starts[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(is_written, scores * head_dim**-0.5, -jnp.inf), axis=-1)
        out = dot("bkgc,bkcd->bkgd", weights.astype(values.dtype), values)
        layers = (*self.layers[:layer], (keys, values), *self.layers[layer + 1 :])
        return out.reshape(q.shape).astype(q.dtype), dataclasses.replace(self, layers=layers)


@jax.tree_util.register_static
class NoCache:
    """Attention that costs nothing: what is left is the rest of the model."""

    def attend(self, layer: Any, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """Return the queries, with a trace of keys and values, so that both are computed."""
        del layer, options
        return q + (jnp.sum(k) + jnp.sum(v)).astype(q.dtype) * 1e-30, self


def paged_form(
    model: Model, batch: int, context: int, *, block_size: int, dtype: str, num_rows: int = 0
) -> Form:
    """The library's own step: blocks of all rows shuffled in the pool.

    Args:
      model: what to run.
      batch: rows.
      context: tokens that each attends to, the new one included.
      block_size: slots a block.
      dtype: of the pool.
      num_rows: padded rows; 0: as many as the batch.
    """
    num_rows = max(num_rows, batch)
    width = -(-context // block_size)
    num_blocks = 1 + batch * width
    pool = KVPool.create(model.spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    tables = jnp.zeros((num_rows, width), jnp.int32).at[:batch].set(ids.reshape(batch, width))
    is_real = jnp.arange(num_rows) < batch
    starts, q_lens = jnp.where(is_real, context - 1, 0), is_real.astype(jnp.int32)

    def run(params: Any, pool: KVPool, tokens: Array) -> tuple[KVPool, Array]:
        cache = PagedKVCache.from_tables(
            pool, tables, starts, q_lens, num_new=1, num_heads=model.spec.num_heads
        )
        logits, cache = _apply(model, params, tokens, starts, cache)
        return cache.pool, _best(logits)

    return _compiled(run, model.params, pool, num_rows)


def dense_form(model: Model, batch: int, context: int, *, dtype: str) -> Form:
    """The same model over a ``DenseKVCache`` of exactly the context's capacity."""
    store = DenseKVCache.create(model.spec, batch_size=batch, capacity=context, dtype=dtype)
    starts, q_lens = jnp.full(batch, context - 1, jnp.int32), jnp.ones(batch, jnp.int32)

    def run(params: Any, store: DenseKVCache, tokens: Array) -> tuple[DenseKVCache, Array]:
        logits, cache = _apply(model, params, tokens, starts, store.at(starts, q_lens))
        return cache, _best(logits)

    return _compiled(run, model.params, store, batch)


def rest_form(model: Model, batch: int, context: int) -> Form:
    """The step without its attention: projections, MLPs, head, argmax."""
    starts = jnp.full(batch, context - 1, jnp.int32)

    def run(params: Any, store: NoCache, tokens: Array) -> tuple[NoCache, Array]:
        logits, _ = _apply(model, params, tokens, starts, store)
        return store, _best(logits)

    return _compiled(run, model.params, NoCache(), batch)


def unrolled_form(model: Model, batch: int, context: int, *, dtype: str) -> Form:
    """The simplest dense step: an array of keys and of values for each layer, read whole.

    ``model`` has weights of its own for each layer (``unstack_layers``), and no windows.
    """
    spec = model.spec
    shape = (batch, spec.num_kv_heads, context, spec.head_dim)
    starts = jnp.full(batch, context - 1, jnp.int32)
    layers = range(spec.num_layers)
    arrays = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in layers)

    def run(params: Any, store: UnrolledCache, tokens: Array) -> tuple[UnrolledCache, Array]:
        logits, store = _apply(model, params, tokens, starts, store)
        return store, _best(logits)

    return _compiled(run, model.params, UnrolledCache(arrays, starts + 0), batch)


def _apply(model: Model, params: Any, tokens: Array, starts: Array, cache: Any) -> Any:
    zeros = jnp.zeros_like(tokens)
    return model.apply(params, tokens, starts[:, None], cache, logits_at=zeros)


def _best(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _compiled(run: Callable[..., Any], params: Any, store: Any, num_rows: int) -> Form:
    tokens = jnp.ones((num_rows, 1), jnp.int32)
    begin = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=(1,)).lower(params, store, tokens).compile()
    form = Form(compiled, params, store, tokens, time.perf_counter() - begin)
    form.step()
    form.seconds.clear()
    return form
