"""Somebody's model through the engine and by single calls, against its own dense decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from suites.engine_runs import drive

from paged_jax import Engine, EngineConfig, KVPool, Model, PagedKVCache, SamplingParams

PROMPT_LENS = (11, 2, 7, 1, 9)
Reference = Callable[[list[int]], np.ndarray]


def prompts_for(model: Model, seed: int = 0) -> list[list[int]]:
    """Ragged random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.spec.vocab_size, n).tolist() for n in PROMPT_LENS]


def check_engine(model: Model, reference: Reference, *, num_new: int = 12) -> None:
    """Continuous batching: chunked prompts, arrivals while others decode, a pool too small for all.

    Tokens are what the reference's logits say, and log-probabilities within 1e-4 of its.
    """
    config = EngineConfig(
        block_size=4,
        num_blocks=16,
        max_num_seqs=4,
        prefill_row_len=4,
        max_num_batched_tokens=8,
        max_model_len=32,
        debug_integrity=True,
    )
    engine = Engine(model, config=config)
    params = SamplingParams(temperature=0.0, max_tokens=num_new, logprobs=3)
    prompts = prompts_for(model)
    ids: list[str] = engine.add_requests(prompts[:3], params)

    def act(index: int) -> bool:
        if index == 4:
            ids.extend(engine.add_requests(prompts[3:], params))
        return index < 4

    outputs = drive(engine, before_step=act)
    assert engine.scheduler.preemptor.num_recomputed_tokens > 0
    for prompt, request_id in zip(prompts, ids, strict=True):
        last = outputs[request_id][-1]
        logits = reference([*prompt, *last.token_ids])[len(prompt) - 1 : -1]
        assert list(last.token_ids) == logits.argmax(-1).tolist()
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for step, wanted in zip(last.logprobs, logprobs, strict=True):
            top = dict(step.top)
            assert len(top) == 3
            for token, value in top.items():
                assert abs(value - wanted[token]) < 1e-4


def paged_logits(
    model: Model, tokens: list[int], chunks: Sequence[int], *, dtype: Any = jnp.float32
) -> np.ndarray:
    """Logits ``[n, V]`` by jitted calls of ``chunks`` tokens, over scattered blocks full of NaN."""
    pool = KVPool.create(model.spec, num_blocks=40, block_size=4, dtype=dtype, fill=np.nan)
    tables = jnp.asarray([1 + (np.arange(16) * 7) % 39], jnp.int32)

    @jax.jit
    def step(pool, tokens, starts):
        num_new = tokens.shape[1]
        lens = jnp.full(1, num_new, jnp.int32)
        cache = PagedKVCache.from_tables(pool, tables, starts, lens, num_new=num_new)
        every = jnp.arange(num_new, dtype=jnp.int32)[None]
        logits, cache = model.apply(
            model.params, tokens, starts[:, None] + every, cache, logits_at=every
        )
        return logits[0], cache.pool

    rows, start = [], 0
    for chunk in chunks:
        new = np.asarray([tokens[start : start + chunk]], np.int32)
        logits, pool = step(pool, new, np.full(1, start, np.int32))
        assert pool.blocks.dtype == dtype
        rows.append(np.asarray(logits, np.float32))
        start += chunk
    assert start == len(tokens)
    return np.concatenate(rows)


def step_memory(model: Model, *, num_blocks: int = 4000) -> tuple[int, int, int]:
    """Bytes of the pool, of what a step updates in place, and of its temporaries."""
    pool = jax.eval_shape(lambda: KVPool.create(model.spec, num_blocks=num_blocks, block_size=16))

    def step(pool, params, tokens):
        tables, zero = jnp.ones((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
        cache = PagedKVCache.from_tables(pool, tables, zero, zero + 2, num_new=2)
        at = jnp.ones((2, 1), jnp.int32)
        logits, cache = model.apply(params, tokens, tokens, cache, logits_at=at)
        return logits, cache.pool

    tokens = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, model.params, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return pool.nbytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes
