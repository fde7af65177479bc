"""Any zoo's model over our caches beside its own cache: logits, continuous batching, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from suites.engine_runs import STANDARD, drive, greedy
from suites.fixed_batch import FixedBatch

from paged_jax import Engine, EngineConfig, KVPool, Model
from paged_jax.batch import BatchLayout
from paged_jax.row_state import create
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.step import make_step

VOCAB_SIZE = 101
# Windows of 8 are crossed; the shortest row pads its chunks.
SEQUENCE_LENS = (37, 9, 26)
NUM_DECODE = 6
TOLERANCE = 1e-4
GIGABYTE = 10**9

# Logits [len(tokens), V] through the zoo's own cache: ZOO_PREFILL tokens at once, then one by one.
ZooLogits = Callable[[tuple[int, ...]], np.ndarray]
ZOO_PREFILL = 3


def randomised(params: Any, seed: int = 0) -> Any:
    """The weights with noise on each, so that norms, biases and positions matter."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + 0.15 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)


def random_sequences(model: Model, seed: int, lens: Sequence[int]) -> list[list[int]]:
    """Token ids of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.spec.vocab_size, length).tolist() for length in lens]


def cached_logits(
    model: Model, sequences: Sequence[Sequence[int]], *, kind: str, chunk: int
) -> list[np.ndarray]:
    """Logits at all positions: rows of one batch, prefilled in chunks, their ends decoded."""
    lens = np.array([len(tokens) for tokens in sequences])
    prompt_lens = lens - NUM_DECODE
    batch = FixedBatch(
        model, kind, num_rows=len(lens), capacity=int(lens.max()), block_size=4, fill=np.nan
    )
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    num_chunks = -(-int(prompt_lens.max()) // chunk)
    for ends, width in [(prompt_lens, chunk)] * num_chunks + [(lens, 1)] * NUM_DECODE:
        starts = batch.starts
        q_lens = np.clip(ends - starts, 0, width)
        tokens = np.zeros((len(lens), width), np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row, : q_lens[row]] = sequence[starts[row] : starts[row] + q_lens[row]]
        at = np.broadcast_to(np.arange(width), tokens.shape)
        logits = batch.run(tokens, q_lens, at)
        for row, new in enumerate(q_lens):
            rows[row].append(logits[row, :new])
    return [np.concatenate(parts) for parts in rows]


def check_logits(model: Model, zoo_logits: ZooLogits, *, kind: str, chunk: int) -> None:
    """Rows of different lengths, chunked and decoded, against the zoo's own cache row by row."""
    sequences = random_sequences(model, 0, SEQUENCE_LENS)
    ours = cached_logits(model, sequences, kind=kind, chunk=chunk)
    for tokens, logits in zip(sequences, ours, strict=True):
        wanted = zoo_logits(tuple(tokens))
        assert wanted.std() > 0.1  # Weights that say nothing would hide everything.
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)


def check_engine(model: Model, zoo_logits: ZooLogits) -> None:
    """Continuous batching in a pool that is too small: each token is the zoo's own choice."""
    prompts = random_sequences(model, 1, [3, 21, 30, 7, 14])
    endless = dataclasses.replace(model, eos_token_ids=())
    engine = Engine(endless, config=EngineConfig(**STANDARD))
    num_running: list[int] = []
    engine.add_requests(prompts, greedy(12))
    outputs = drive(engine, before_step=lambda _: num_running.append(engine.scheduler.num_running))
    assert max(num_running) > 2
    if model.spec.window is None:  # With one, what falls behind it makes room.
        assert engine.stats.num_preemptions > 0
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        token_ids = list(output[-1].token_ids)
        assert len(token_ids) == 12
        logits = zoo_logits((*prompt, *token_ids[:-1]))[len(prompt) - 1 :]
        chosen = logits[np.arange(12), token_ids]
        assert (logits.max(axis=-1) - chosen).max() < 2e-3


def check_memory(model: Model, *, is_decode: bool) -> None:
    """A step on a gigabyte of pool updates it in place, in a small share of memory beside it."""
    spec = model.spec
    num_blocks = GIGABYTE // (spec.kv_values_per_token * 16 * 4)
    shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, 16, spec.head_dim)
    pool = KVPool(jax.ShapeDtypeStruct(shape, jnp.float32))
    layout = BatchLayout(
        num_rows=32 if is_decode else 4,
        num_new=1 if is_decode else 32,
        table_width=16,
        vocab_size=spec.vocab_size,
        is_decode=is_decode,
        flags=SamplerFlags(),
    )
    step = make_step(model.apply, backend=None, donate=True, max_window=spec.window)
    shapes = jax.eval_shape(lambda: (model.params, create(32)))
    packed = jax.ShapeDtypeStruct((layout.num_rows, layout.num_columns), jnp.int32)
    lowered = step.lower(shapes[0], pool, shapes[1], packed, layout=layout)
    memory = lowered.compile().memory_analysis()
    print(f"alias {memory.alias_size_in_bytes}, temp {memory.temp_size_in_bytes}")
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.05 * pool.nbytes


def check_head(model: Model) -> None:
    """Logits are made at the named positions only: [B, 1, V], nowhere [B, T, V]."""
    batch = FixedBatch(model, "paged", num_rows=2, capacity=16, block_size=4)
    tokens, q_lens = np.zeros((2, 7), np.int32), np.array([7, 5])
    arguments = batch.arguments(tokens, q_lens, q_lens[:, None] - 1)
    jaxpr = str(jax.make_jaxpr(batch.step)(*arguments))
    assert f"[2,1,{model.spec.vocab_size}]" in jaxpr
    assert f"[2,7,{model.spec.vocab_size}]" not in jaxpr
