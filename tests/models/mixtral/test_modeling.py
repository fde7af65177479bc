"""Routing: each token has its experts, whatever else is in the batch, and only those are read."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites.fixed_batch import FixedBatch

from models.checkpoints.hf_config import HfConfig
from models.mixtral import MIXTRAL, MixtralConfig, modeling
from models.mixtral.modeling import Experts
from paged_jax.cache import DenseKVCache
from paged_jax.uncached import UncachedAttention

make_config = functools.partial(
    MixtralConfig,
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    num_experts=4,
    num_experts_per_token=2,
)
CONFIG = make_config()


@pytest.fixture(scope="module")
def params():
    """Random weights, drawn by numpy: a test of compiled code need not compile that, too."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape, scale=shape[-1] ** -0.5), jnp.float32),
        MIXTRAL.param_shapes(CONFIG),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def test_what_padding_holds_changes_no_bit(params):
    model = MIXTRAL.as_model(CONFIG, params)
    batch = FixedBatch(model, "paged", num_rows=2, capacity=8, fill=np.nan)
    found = []
    for padding in (0, 31, 47):
        tokens = np.full((2, 8), padding)
        tokens[0, :3], tokens[1, :6] = [5, 6, 7], [1, 2, 3, 4, 1, 2]
        batch.starts = np.zeros(2, np.int32)
        logits = batch.run(tokens, [3, 6], np.tile(np.arange(8), (2, 1)))
        found.append((logits[0, :3], logits[1, :6]))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def test_an_expert_that_overflows_spares_tokens_that_did_not_choose_it():
    config = make_config(hidden_size=8, intermediate_size=8, num_experts_per_token=1)
    module = Experts(config, jnp.float16)
    x = 4 * jnp.eye(8, dtype=jnp.float16)[None, :2]  # token i chooses expert i
    gate_up = np.ones((4, 8, 16), np.float16)
    gate_up[1, 0] = 200  # expert 1's product overflows for token 0
    params = {
        "router": {"weight": np.eye(8, 4, dtype=np.float16)},
        "gate_up": gate_up,
        "down": np.ones((4, 8, 8), np.float16),
    }
    run = functools.partial(module.apply, {"params": params}, layer=0, stack=None)
    alone, both = run(x[:, :1]), run(x)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(both[:, :1], alone)


def loss(params, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    logits, _ = MIXTRAL.as_model(CONFIG, {}).apply(
        params, tokens, positions, UncachedAttention(), logits_at=positions
    )
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])


def test_the_stack_of_all_layers_gives_the_same_values_and_gradients(params, monkeypatch):
    tokens = jnp.arange(12)[None]
    found = []
    for most in (0, 12):
        monkeypatch.setattr(modeling, "_MAX_STACK_TOKENS", most)
        found.append(jax.jit(jax.value_and_grad(loss))(params, tokens))
    assert float(jnp.abs(found[0][1]["layers"]["experts"]["gate_up"]).max()) > 1e-4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *found)


@pytest.mark.parametrize(("num_tokens", "copies"), [(1, False), (64, False), (65, True)])
def test_few_tokens_do_not_copy_a_layer_of_experts(num_tokens, copies):
    config = make_config(hidden_size=64, intermediate_size=2048, num_experts=8)
    params = jax.eval_shape(lambda: MIXTRAL.random_params(config, 0))
    cache = jax.eval_shape(
        lambda: DenseKVCache.create(config.spec, batch_size=num_tokens, capacity=4)
    )
    ids = jax.ShapeDtypeStruct((num_tokens, 1), jnp.int32)
    apply = MIXTRAL.as_model(config, {}).apply
    compiled = jax.jit(lambda *args: apply(*args, logits_at=args[2])[0]).lower(
        params, ids, ids, cache
    )
    layer = 4 * sum(
        math.prod(weight.leaf_shape) // config.num_layers
        for weight in MIXTRAL.weights(config)
        if weight.num_experts
    )
    temp = compiled.compile().memory_analysis().temp_size_in_bytes
    assert (temp > layer) if copies else (temp < layer / 2)


def test_settings_that_a_config_json_leaves_out_are_those_of_transformers(tmp_path):
    sizes = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "max_position_embeddings": 64,
    }
    config = MixtralConfig.from_hf(HfConfig(tmp_path, sizes))
    assert (config.rope_theta, config.rms_norm_eps, config.num_kv_heads) == (1e6, 1e-5, 8)
    assert (config.num_experts, config.num_experts_per_token) == (8, 2)
    given = HfConfig(tmp_path, sizes | {"rope_parameters": {"rope_theta": 5e5}})
    assert MixtralConfig.from_hf(given).rope_theta == 5e5
