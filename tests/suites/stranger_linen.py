"""A linen GPT as others write them: it knows Flax's own decode cache, and nothing of ours."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

NUM_LAYERS, NUM_HEADS, HEAD_DIM, WIDTH, VOCAB, MAX_LEN = 3, 4, 8, 24, 40, 64


class Block(nn.Module):
    """Pre-norm; ``normalize_qk`` so that the module's own norms must stay."""

    decode: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=NUM_HEADS,
            qkv_features=NUM_HEADS * HEAD_DIM,
            normalize_qk=True,
            dropout_rate=0.1,
            deterministic=True,
            decode=self.decode,
            dtype=self.dtype,
        )(h, mask=None if self.decode else mask)
        h = nn.Dense(2 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(h)), None


class GPT(nn.Module):
    """Its layers are a loop or a scan (``scans``), remade for gradients or not (``remats``)."""

    scans: bool = False
    remats: bool = False
    decode: bool = False
    window: int | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens, positions):
        x = nn.Embed(VOCAB, WIDTH, dtype=self.dtype)(tokens)
        x = x + nn.Embed(MAX_LEN, WIDTH, dtype=self.dtype, name="wpe")(positions)
        mask = nn.make_causal_mask(tokens)
        if self.window is not None:
            far = jnp.arange(tokens.shape[1])
            mask = mask * (far[:, None] - far < self.window)
        block = nn.remat(Block) if self.remats else Block
        if self.scans:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0, "cache": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=NUM_LAYERS,
            )
            x, _ = scanned(self.decode, self.dtype, name="blocks")(x, mask)
        else:
            for index in range(NUM_LAYERS):
                x, _ = block(self.decode, self.dtype, name=f"block_{index}")(x, mask)
        return nn.Dense(VOCAB, dtype=self.dtype, name="head")(x)


class SetupGPT(nn.Module):
    """Modules in ``setup``; attention by Flax's other name for it, and remade for gradients."""

    def setup(self):
        shape = {"num_heads": NUM_HEADS, "qkv_features": NUM_HEADS * HEAD_DIM}
        self.wte, self.wpe = nn.Embed(VOCAB, WIDTH), nn.Embed(MAX_LEN, WIDTH)
        remat = nn.remat(nn.MultiHeadDotProductAttention)
        self.attention = [nn.MultiHeadAttention(**shape), remat(**shape)]
        self.head = nn.Dense(VOCAB)

    def __call__(self, tokens, positions):
        x = self.wte(tokens) + self.wpe(positions)
        for attention in self.attention:
            x = x + attention(x, mask=nn.make_causal_mask(tokens))
        return self.head(x)


def weights(module: nn.Module, seed: int = 0) -> Any:
    """Random weights."""
    ids = jnp.zeros((1, 4), jnp.int32)
    return {"params": jax.jit(module.init)(jax.random.key(seed), ids, ids)["params"]}


@functools.cache
def _decoder(module: GPT) -> Any:
    """A jitted step of Flax's own cache and that cache, empty."""
    module = module.clone(decode=True)
    whole = jnp.zeros((1, MAX_LEN), jnp.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), whole, whole)["cache"]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @jax.jit
    def step(params, cache, token, position):
        variables = {**params, "cache": cache}
        logits, changed = module.apply(
            variables, token[None, None], position[None, None], mutable="cache"
        )
        return logits[0, 0], changed["cache"]

    return step, cache


def decode(module: GPT, params: Any, tokens: list[int]) -> np.ndarray:
    """Logits ``[n, V]`` by Flax's own cache, one token at a time."""
    step, cache = _decoder(module)
    rows = []
    for position, token in enumerate(tokens):
        logits, cache = step(params, cache, jnp.int32(token), jnp.int32(position))
        rows.append(logits)
    return np.stack(rows).astype(np.float32)


@functools.cache
def _applied(module: nn.Module) -> Any:
    return jax.jit(module.apply)


def whole(module: nn.Module, params: Any, tokens: list[int]) -> np.ndarray:
    """Logits ``[n, V]`` by one call without any cache."""
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(tokens)] = tokens
    logits = _applied(module)(params, row, np.arange(MAX_LEN, dtype=np.int32)[None])
    return np.asarray(logits[0, : len(tokens)], np.float32)
