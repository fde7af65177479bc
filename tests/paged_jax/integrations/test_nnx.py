"""nnx models over our cache give what their own decode caches give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from suites import stranger_nnx as zoo
from suites.stranger_runs import check_engine, paged_logits, step_memory

from paged_jax import Engine, EngineConfig
from paged_jax.integrations.nnx import as_model


def forward(module, tokens, positions):
    return module(tokens, positions)


@functools.cache
def stranger(**kind):
    module = zoo.GPT(**kind)
    return module, as_model(module, forward, max_position=zoo.MAX_LEN)


KINDS = {
    "list": {},
    "remat": {"remats": True},
    "scan": {"scans": True},
    "remat in scan": {"scans": True, "remats": True},
}


@pytest.mark.parametrize("kind", ["list", "remat in scan"])
def test_the_engine_says_what_the_modules_own_decoding_says(kind):
    """Flax's decode mode works in plain lists of modules; for the others, a whole call."""
    module, model = stranger(**KINDS[kind])
    check_engine(model, functools.partial(zoo.decode if kind == "list" else zoo.whole, module))


@pytest.mark.parametrize(
    "kind", ["list", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS if k != "list")]
)
def test_logits_are_those_of_decode_mode(kind):
    module, model = stranger(**KINDS[kind])
    spec = model.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (3, 4, 2)
    assert (spec.head_dim, spec.vocab_size, spec.max_position) == (8, 40, 64)
    tokens = np.random.default_rng(1).integers(0, 40, 20).tolist()
    logits = paged_logits(model, tokens, [7, 7, 3, 1, 1, 1])
    reference = zoo.decode if kind == "list" else zoo.whole
    np.testing.assert_allclose(logits, reference(module, tokens), atol=1e-4)


def test_flax_rotary_embeddings_turn_by_each_rows_positions():
    module, model = stranger(rope=True)
    check_engine(model, functools.partial(zoo.whole, module))


@pytest.mark.parametrize("kind", ["list", "remat in scan"])
def test_the_pool_is_updated_in_place(kind):
    pool, alias, temp = step_memory(stranger(**KINDS[kind])[1])
    assert alias == pool
    assert temp < 0.02 * pool


def own_attention(module, attend, x, segment_ids, cache):
    q, k, v = (
        project(x).reshape(*x.shape[:2], -1, zoo.HEAD_DIM)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = attend(zoo.rotary(q, attend.positions), zoo.rotary(k, attend.positions), v)
    return module.o_proj(out.reshape(*x.shape[:2], -1))


def test_a_model_with_attention_and_cache_of_its_own():
    module = zoo.OwnLlama()
    model = as_model(
        module,
        lambda module, tokens, positions: module(tokens, jnp.ones_like(tokens)),
        max_position=zoo.MAX_LEN,
        attention={zoo.OwnAttention: own_attention},
    )
    assert model.spec.num_kv_heads == 2
    check_engine(model, functools.partial(zoo.decode_own, module))
    tokens = np.random.default_rng(2).integers(0, 40, 12).tolist()
    logits = paged_logits(model, tokens, [7, 4, 1])
    np.testing.assert_allclose(logits, zoo.decode_own(module, tokens), atol=1e-4)


def test_the_users_module_is_left_as_it_is():
    module, model = stranger()
    before = nnx.graphdef(module)
    Engine(model, config=EngineConfig(block_size=4, num_blocks=9)).generate([[1, 2]])
    assert nnx.graphdef(module) == before
    assert module.blocks[0].attn.attention_fn is nnx.dot_product_attention


def other_attention(*qkv, **options):
    return nnx.dot_product_attention(*qkv, **options)


@pytest.mark.parametrize(
    ("made", "called", "message"),
    [
        ({"decode": True}, {}, "attn: decode=True must be False"),
        ({"attention_fn": other_attention}, {}, "attn: attention_fn=.* must be nnx.dot_product"),
        ({"dropout_rate": 0.1}, {"deterministic": False}, "attn: deterministic=False must be True"),
        ({}, {"sow_weights": True}, "attn: sow_weights=True must be False"),
        ({}, {"inputs_k": jnp.ones((2, 5, 8))}, "attn: q .* must be .* of the same tokens"),
    ],
)
def test_what_has_no_paged_cache_is_refused_by_name(made, called, message):
    class One(nnx.Module):
        def __init__(self):
            options = {"decode": False, **made}
            self.attn = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **options)

        def __call__(self, tokens, positions):
            x = jnp.ones((*tokens.shape, 8)) * positions[..., None]
            if self.attn.decode:
                self.attn.init_cache((2, 1, 8))
                x = x[:, :1]
            return self.attn(x, **called)

    with pytest.raises(ValueError, match=message):
        as_model(One(), forward, max_position=64)


def test_a_model_without_attention_is_refused():
    class Bag(nnx.Module):
        def __call__(self, tokens, positions):
            return jax.nn.one_hot(tokens + positions, 40)

    with pytest.raises(ValueError, match="forward ran no attention module"):
        as_model(Bag(), forward, max_position=64)
