"""Mistakes in a user's own model are told at trace time, by name."""

import jax.numpy as jnp
import pytest

from paged_jax import Engine, EngineConfig, Model, ModelSpec, SamplingParams

SPEC = ModelSpec(
    num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=7, max_position=64
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def attend(cache, layer, tokens):
    x = jnp.ones((*tokens.shape, 2, 4))
    return cache.attend(layer, x, x[:, :, :1], x[:, :, :1])


def layer_out_of_range(params, tokens, positions, cache, *, logits_at):
    _, cache = attend(cache, 2, tokens)
    return jnp.zeros((*logits_at.shape, 7)), cache


def negative_layer(params, tokens, positions, cache, *, logits_at):
    _, cache = attend(cache, -1, tokens)
    return jnp.zeros((*logits_at.shape, 7)), cache


def old_cache(params, tokens, positions, cache, *, logits_at):
    attend(cache, 0, tokens)
    return jnp.zeros((*logits_at.shape, 7)), cache


def all_positions(params, tokens, positions, cache, *, logits_at):
    _, cache = attend(cache, 0, tokens)
    return jnp.zeros((*tokens.shape, 7)), cache


def wrong_vocabulary(params, tokens, positions, cache, *, logits_at):
    _, cache = attend(cache, 0, tokens)
    return jnp.zeros((*logits_at.shape, 8)), cache


def logits_only(params, tokens, positions, cache, *, logits_at):
    return jnp.zeros((*logits_at.shape, 7))


def swapped(params, tokens, positions, cache, *, logits_at):
    _, cache = attend(cache, 0, tokens)
    return cache, jnp.zeros((*logits_at.shape, 7))


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (layer_out_of_range, r"layer=2 must be in 0..1.*ModelSpec.num_layers=2"),
        (negative_layer, r"layer=-1 must be in 0..1"),
        (old_cache, "apply returned the cache that it was given"),
        (all_positions, r"logits of shape .* must be .*\[B, N, V\]"),
        (wrong_vocabulary, r"logits of shape .*ModelSpec.vocab_size"),
        (logits_only, r"must return the pair \(logits, cache\)"),
        (swapped, r"must return the pair \(logits, cache\)"),
    ],
)
def test_mistakes(apply, message):
    model = Model(apply=apply, params={}, spec=SPEC)
    engine = Engine(model, config=EngineConfig(block_size=4, num_blocks=9))
    with pytest.raises(ValueError, match=message):
        engine.generate([1, 2], GREEDY)
