"""nnx decoders as others write them: one of Flax's own attention, one with everything its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, VOCAB, MAX_LEN = 3, 4, 2, 8, 24, 40, 64


class Block(nnx.Module):
    """Grouped queries, by Flax's attention."""

    def __init__(self, rope: nnx.RoPE | None, rngs: nnx.Rngs):
        with_rope = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            in_features=WIDTH,
            qkv_features=NUM_HEADS * HEAD_DIM,
            attention_fn=nnx.dot_product_attention if rope is None else with_rope,
            decode=False,
            rngs=rngs,
        )
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x), is_causal=True)
        return x + nnx.gelu(self.mlp(x))


class GPT(nnx.Module):
    """Its layers are a list or stacked weights that are scanned (``scans``)."""

    def __init__(self, *, scans: bool = False, remats: bool = False, rope: bool = False):
        rngs = nnx.Rngs(0)
        self.scans, self.remats = scans, remats
        self.wte = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.wpe = None if rope else nnx.Embed(MAX_LEN, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        make = functools.partial(Block, nnx.RoPE() if rope else None)
        if scans:
            stacked = nnx.split_rngs(splits=NUM_LAYERS)(nnx.vmap(make, in_axes=0, out_axes=0))
            self.blocks = stacked(rngs)
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, tokens, positions):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(positions)

        def call(x, block):
            return block(x)

        call = nnx.remat(call) if self.remats else call
        if self.scans:
            x = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = call(x, block)
        return self.head(x)


@nnx.jit
def _call(model: nnx.Module, *inputs: Any) -> Any:
    return model(*inputs)


def decode(model: GPT, tokens: list[int]) -> np.ndarray:
    """Logits ``[n, V]`` by Flax's own cache, one token at a time."""
    model = nnx.clone(model)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.MultiHeadAttention):
            node.decode = True
            node.init_cache((1, MAX_LEN, WIDTH))
    ids = (
        (np.full((1, 1), t, np.int32), np.full((1, 1), p, np.int32)) for p, t in enumerate(tokens)
    )
    return np.stack([_call(model, *pair)[0, 0] for pair in ids])


def whole(model: GPT, tokens: list[int]) -> np.ndarray:
    """Logits ``[n, V]`` by one call without any cache."""
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(tokens)] = tokens
    positions = np.arange(MAX_LEN, dtype=np.int32)[None]
    return np.asarray(_call(model, row, positions))[0, : len(tokens)]


class LayerCache(nnx.Module):
    """One layer's keys and values in the style of jax-ml/bonsai: one length for the whole batch."""

    def __init__(self, batch_size: int, capacity: int):
        shape = (batch_size, capacity, NUM_KV_HEADS, HEAD_DIM)
        self.keys, self.values = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))
        self.length = nnx.Variable(jnp.zeros((), jnp.int32))


def rotary(x, positions):
    """Rotate the halves of each head."""
    angles = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2)
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class OwnAttention(nnx.Module):
    """Projections, rotations, mask, softmax and cache, all by hand."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q_proj = linear(WIDTH, NUM_HEADS * HEAD_DIM)
        self.k_proj = linear(WIDTH, NUM_KV_HEADS * HEAD_DIM)
        self.v_proj = linear(WIDTH, NUM_KV_HEADS * HEAD_DIM)
        self.o_proj = linear(NUM_HEADS * HEAD_DIM, WIDTH)

    def __call__(self, x, segment_ids, cache=None):
        num_rows, num_new, _ = x.shape
        start = 0 if cache is None else cache.length[...]
        positions = start + jnp.cumsum(segment_ids, axis=1) - 1
        q = self.q_proj(x).reshape(num_rows, num_new, NUM_HEADS, HEAD_DIM)
        k = self.k_proj(x).reshape(num_rows, num_new, NUM_KV_HEADS, HEAD_DIM)
        v = self.v_proj(x).reshape(num_rows, num_new, NUM_KV_HEADS, HEAD_DIM)
        q, k = rotary(q, positions), rotary(k, positions)
        if cache is not None:
            at = (0, start, 0, 0)
            k = cache.keys[...] = jax.lax.dynamic_update_slice(cache.keys[...], k, at)
            v = cache.values[...] = jax.lax.dynamic_update_slice(cache.values[...], v, at)
            cache.length[...] = start + num_new
        seen = jnp.arange(k.shape[1]) <= start + jnp.arange(num_new)[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
        return self.o_proj(out.reshape(num_rows, num_new, -1))


class OwnLayer(nnx.Module):
    """One decoder layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.self_attn = nnx.RMSNorm(WIDTH, rngs=rngs), OwnAttention(rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, segment_ids, cache=None):
        x = x + self.self_attn(self.norm(x), segment_ids, cache)
        return x + nnx.silu(self.mlp(x))


class OwnLlama(nnx.Module):
    """A decoder in the style of jax-ml/bonsai."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([OwnLayer(rngs) for _ in range(NUM_LAYERS)])
        self.final_norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, segment_ids, caches: Any = None):
        x = self.embedder(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, segment_ids, None if caches is None else caches[index])
        return self.embedder.attend(self.final_norm(x))


def decode_own(model: OwnLlama, tokens: list[int]) -> np.ndarray:
    """Logits ``[n, V]`` by the model's own cache, one token at a time."""
    caches = nnx.List([LayerCache(1, MAX_LEN) for _ in range(NUM_LAYERS)])
    one = np.ones((1, 1), np.int32)
    return np.stack([_call(model, t * one, one, caches)[0, 0] for t in tokens])
