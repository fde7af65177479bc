"""A model whose logits are an integer hash of the whole context, read back through the cache.

Every key is zero, so attention is the plain mean of the values of all attended positions. Those are
integers under 256 that depend on token, position and channel; mean times count, rounded, is their
exact sum. A second layer's values depend on the first layer's sums. So one wrong, missing, foreign
or stale slot anywhere changes every later logit, and equality can be exact: no near ties.

``expected_greedy`` computes the same in numpy from the tokens alone, with no cache at all. With
``windows``, one a layer, the sums are over the last so many positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from paged_jax.config import ModelSpec
from paged_jax.model import Model

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8
VOCAB_SIZE = 251
MAX_POSITION = 2048


def mix(x: Any) -> Any:
    """Murmur3's finalizer on uint32 (numpy or jax arrays)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def channel_values(xp: Any, state: Any, positions: Any) -> Any:
    """Integers 0..255 for each KV head and channel: [..., K, D] as float32."""
    salt = xp.arange(NUM_KV_HEADS * HEAD_DIM, dtype=xp.uint32) * np.uint32(0x9E3779B1)
    seed = mix(state + positions.astype(xp.uint32) * np.uint32(0x27D4EB2F))
    values = mix(seed[..., None] ^ salt) & np.uint32(255)
    return values.reshape(*seed.shape, NUM_KV_HEADS, HEAD_DIM).astype(xp.float32)


def fold_sums(xp: Any, sums: Any) -> Any:
    """One uint32 from the exact sums [..., K, D]."""
    flat = sums.reshape(*sums.shape[:-2], -1).astype(xp.uint32)
    weights = (
        np.arange(flat.shape[-1], dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    ) * np.uint32(0x01000193)
    return mix(xp.sum(flat * weights, axis=-1, dtype=xp.uint32))


def logits_of(xp: Any, state: Any) -> Any:
    """Float32 logits in 0..16, multiples of 1/4096: [..., V]."""
    ids = xp.arange(VOCAB_SIZE, dtype=xp.uint32) * np.uint32(0x85157AF5)
    return (mix(state[..., None] ^ ids) >> np.uint32(16)).astype(xp.float32) / 4096


def apply(
    params: Any, tokens: Any, positions: Any, cache: Any, *, logits_at: Any
) -> tuple[Any, Any]:
    """The model function that engine and baselines run."""
    state = mix(tokens.astype(jnp.uint32) + params["salt"])
    zeros_q = jnp.zeros((*tokens.shape, NUM_HEADS, HEAD_DIM), jnp.float32)
    zeros_k = jnp.zeros((*tokens.shape, NUM_KV_HEADS, HEAD_DIM), jnp.float32)
    windows = params.get("windows")  # traced: all windows run the same programs
    for layer in range(NUM_LAYERS):
        window = None if windows is None else windows[layer]
        values = channel_values(jnp, state, positions)
        mean, cache = cache.attend(layer, zeros_q, zeros_k, values, window=window)
        # One query head a KV head; the group's others must agree.
        grouped = mean.reshape(*tokens.shape, NUM_KV_HEADS, -1, HEAD_DIM)
        spread = jnp.max(grouped, axis=-2) - jnp.min(grouped, axis=-2)
        counts = positions + 1 if window is None else jnp.minimum(positions + 1, window)
        sums = jnp.round(grouped[..., 0, :] * counts[..., None, None])
        sums = jnp.where(spread == 0, sums, 0)
        state = mix(state ^ fold_sums(jnp, sums))
    picked = jnp.take_along_axis(state, logits_at, axis=1)
    return logits_of(jnp, picked), cache


def make_model(*, salt: int = 0, eos_token_ids: tuple[int, ...] = ()) -> Model:
    """The model as the engine takes it; ``salt`` stands for different weights."""
    spec = ModelSpec(
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position=MAX_POSITION,
    )
    params = {"salt": jnp.uint32(salt)}
    return Model(
        apply=apply, params=params, spec=spec, eos_token_ids=eos_token_ids, name="integer-hash"
    )


def make_window_model(windows: Sequence[int | None], *, is_known: bool = True) -> Model:
    """The model with a window in each layer (None: sees all); ``is_known``: to the engine too."""
    model = make_model()
    sizes = [MAX_POSITION if window is None else window for window in windows]
    largest = None if None in windows or not is_known else max(sizes)
    return dataclasses.replace(
        model,
        params={**model.params, "windows": jnp.array(sizes, jnp.int32)},
        spec=dataclasses.replace(model.spec, window=largest),
        name="integer-hash-windows",
    )


def expected_logits(
    tokens: Any, *, salt: int = 0, windows: Sequence[int | None] = (None,) * NUM_LAYERS
) -> np.ndarray:
    """Logits [len(tokens), V] at every position, from the tokens alone."""
    with np.errstate(over="ignore"):
        positions = np.arange(len(tokens))
        state = mix(np.asarray(tokens).astype(np.uint32) + np.uint32(salt))
        for window in windows:
            sums = np.cumsum(channel_values(np, state, positions), axis=0)
            if window is not None:
                sums[window:] -= sums[:-window].copy()
            state = mix(state ^ fold_sums(np, sums))
        return logits_of(np, state)


def expected_greedy(prompt: Any, num_tokens: int, **variant: Any) -> list[int]:
    """Greedy continuation of ``prompt``; ``variant`` as for ``expected_logits``."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(expected_logits(tokens, **variant)[-1])))
    return tokens[len(prompt) :]
