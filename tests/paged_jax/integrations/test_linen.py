"""Linen models over our cache give what Flax's own decode cache gives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import axes_scan
from suites import stranger_linen as zoo
from suites.stranger_runs import check_engine, paged_logits, prompts_for, step_memory

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.baselines import DenseEngine
from paged_jax.integrations.linen import as_model, multi_head_attention

ids = jnp.zeros((1, 4), jnp.int32)
scanned = {"scans": True, "remats": True}


@functools.cache
def stranger(**kind):
    module = zoo.GPT(**kind)
    params = zoo.weights(module)
    return module, params, as_model(module.apply, params, max_position=zoo.MAX_LEN)


@pytest.mark.parametrize("kind", [{}, scanned], ids=["loop", "remat in scan"])
def test_the_engine_says_what_the_modules_own_decoding_says(kind):
    module, params, model = stranger(**kind)
    check_engine(model, functools.partial(zoo.decode, module, params))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        pytest.param({"remats": True}, marks=pytest.mark.long),
        pytest.param({"scans": True}, marks=pytest.mark.long),
        scanned,
    ],
    ids=["loop", "remat", "scan", "both"],
)
def test_logits_are_those_of_decode_mode(kind):
    module, params, model = stranger(**kind)
    spec = model.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (3, 4, 4)
    assert (spec.head_dim, spec.vocab_size, spec.max_position) == (8, 40, 64)
    tokens = np.random.default_rng(1).integers(0, 40, 20).tolist()
    logits = paged_logits(model, tokens, [7, 7, 3, 1, 1, 1])
    np.testing.assert_allclose(logits, zoo.decode(module, params, tokens), atol=1e-4)


def test_modules_made_in_setup_and_flax_other_names():
    module = zoo.SetupGPT()
    params = zoo.weights(module)
    model = as_model(module.apply, params, max_position=zoo.MAX_LEN, name="setup")
    assert (model.name, model.spec.num_layers) == ("setup", 2)
    tokens = np.random.default_rng(2).integers(0, 40, 13).tolist()
    logits = paged_logits(model, tokens, [8, 4, 1])
    np.testing.assert_allclose(logits, zoo.whole(module, params, tokens), atol=1e-4)


@pytest.mark.parametrize("kind", [{}, scanned], ids=["loop", "remat in scan"])
def test_the_pool_is_updated_in_place(kind):
    pool, alias, temp = step_memory(stranger(**kind)[2])
    assert alias == pool
    assert temp < 0.02 * pool


def test_a_block_that_one_module_is_three_times():
    """Shared weights: layers are told apart by the order in which they run."""

    class Shared(nn.Module):
        @nn.compact
        def __call__(self, tokens, positions):
            x = nn.Embed(40, 24)(tokens) + nn.Embed(64, 24)(positions)
            block = zoo.Block()
            for _ in range(3):
                x, _ = block(x, nn.make_causal_mask(tokens))
            return nn.Dense(40)(x)

    module = Shared()
    params = zoo.weights(module)
    model = as_model(module.apply, params, max_position=zoo.MAX_LEN)
    assert model.spec.num_layers == 3
    tokens = np.random.default_rng(3).integers(0, 40, 9).tolist()
    logits = paged_logits(model, tokens, [5, 2, 1, 1])
    np.testing.assert_allclose(logits, zoo.whole(module, params, tokens), atol=1e-4)


def test_a_window_that_the_model_builds_into_its_mask_is_said():
    module = zoo.GPT(window=5)
    params = zoo.weights(module)

    def windowed(module, attend, *args, **kwargs):
        within = functools.partial(attend, window=5)
        return multi_head_attention(module, within, *args, **kwargs)

    tokens = np.random.default_rng(4).integers(0, 40, 17).tolist()
    wanted = zoo.whole(module, params, tokens)
    make = functools.partial(as_model, module.apply, params, max_position=zoo.MAX_LEN)
    model = make(attention={nn.MultiHeadDotProductAttention: windowed})
    np.testing.assert_allclose(paged_logits(model, tokens, [9, 7, 1]), wanted, atol=1e-4)
    assert np.abs(paged_logits(make(), tokens, [9, 7, 1]) - wanted).max() > 1e-2


def test_an_attention_class_of_their_own():
    """Grouped heads and scores that are not Flax's: five lines say where q, k and v are."""

    class Attention(nn.Module):
        def setup(self):
            self.q, self.kv = nn.DenseGeneral((4, 8)), nn.DenseGeneral((2, 2, 8))
            self.out = nn.DenseGeneral(24, axis=(-2, -1))

        def __call__(self, x, mask):
            k, v = jnp.moveaxis(self.kv(x), 2, 0)
            attended = jax.nn.dot_product_attention(self.q(x), k, v, mask=mask != 0, scale=0.5)
            return self.out(attended)

    class Own(nn.Module):
        @nn.compact
        def __call__(self, tokens, positions):
            x = nn.Embed(40, 24)(tokens) + nn.Embed(64, 24)(positions)
            for _ in range(2):
                x = x + Attention()(x, nn.make_causal_mask(tokens))
            return nn.Dense(40)(x)

    def attention(module, attend, x, mask):
        k, v = jnp.moveaxis(module.kv(x), 2, 0)
        return module.out(attend(module.q(x), k, v, scale=0.5))

    module = Own()
    params = zoo.weights(module)
    model = as_model(module.apply, params, max_position=64, attention={Attention: attention})
    assert (model.spec.num_layers, model.spec.num_kv_heads) == (2, 2)
    tokens = np.random.default_rng(5).integers(0, 40, 10).tolist()
    logits = paged_logits(model, tokens, [6, 3, 1])
    np.testing.assert_allclose(logits, zoo.whole(module, params, tokens), atol=1e-4)


def test_the_same_model_runs_over_a_dense_cache():
    model = stranger(**scanned)[2]
    prompts, params = prompts_for(model), SamplingParams(temperature=0.0, max_tokens=6)
    dense = DenseEngine(model, max_num_seqs=4, max_model_len=32)
    paged = Engine(model, config=EngineConfig(block_size=4, num_blocks=33))
    for a, b in zip(dense.generate(prompts, params), paged.generate(prompts, params), strict=True):
        assert a.token_ids == b.token_ids


def attending(**options):
    """A model of one Flax attention module, called with ``options``."""

    class One(nn.Module):
        @nn.compact
        def __call__(self, tokens, positions):
            x = nn.Embed(40, 24)(tokens) + nn.Embed(64, 24)(positions)
            made = {k: v for k, v in options.items() if k not in ("inputs_k", "sow_weights")}
            given = {k: v for k, v in options.items() if k not in made}
            if "inputs_k" in given:
                given["inputs_k"] = given["inputs_k"](x)
            return nn.MultiHeadDotProductAttention(num_heads=2, name="attn", **made)(x, **given)

    return One()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": True}, "attn: decode=True must be False"),
        ({"attention_fn": lambda q, k, v: q}, "attn: attention_fn=.* must be flax.linen.dot_prod"),
        ({"inputs_k": lambda x: x + 1}, "attn: inputs_k and inputs_v must be inputs_q itself"),
        ({"sow_weights": True}, "attn: sow_weights=True must be False"),
        ({"dropout_rate": 0.1, "deterministic": False}, "attn: deterministic=False must be True"),
    ],
)
def test_what_has_no_paged_cache_is_refused_by_name(options, message):
    module = attending(**options)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(lambda: module.init(keys, ids, ids))

    def forward(params, *ids):
        return module.apply(params, *ids, rngs={"dropout": jax.random.key(2)})

    with pytest.raises(ValueError, match=message):
        as_model(forward, {"params": shapes["params"]}, max_position=64)


def logits_from(x):
    return jnp.zeros((*x.shape[:2], 7)) + x[..., :1]


class Attend(nn.Module):
    num_heads: int = 2

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=self.num_heads, qkv_features=8)(x)


class TwoShapes(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Attend(4)(Attend(2)(x))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x, run: logits_from(x), "forward ran no attention module"),
        (lambda x, run: run(x)[:, 0], r"forward returned .* must be logits \[B, T, V\]"),
        (
            lambda x, run: logits_from(TwoShapes().init_with_output(jax.random.key(0), x)[0]),
            "alike",
        ),
        (
            lambda x, run: jax.lax.cond(x.sum() > 0, run, jnp.zeros_like, x),
            "attention under a cond of its own",
        ),
    ],
)
def test_models_that_cannot_be_plugged_in_are_refused(forward, message):
    params = Attend().init(jax.random.key(0), jnp.zeros((1, 4, 8)))

    def call(params, tokens, positions):
        x = jnp.ones((*tokens.shape, 8)) * positions[..., None]
        return forward(x, functools.partial(Attend().apply, params))

    with pytest.raises(ValueError, match=message):
        as_model(call, params, max_position=64)


def test_keys_of_other_tokens_are_refused():
    params = {}

    class Odd(nn.Module):
        def __call__(self, x):
            return x

    def odd(module, attend, x):
        q = x[..., None, :]
        return attend(q, q[:, 1:], q[:, 1:])[..., 0, :]

    def forward(params, tokens, positions):
        return Odd().apply(params, jnp.ones((*tokens.shape, 8)) * positions[..., None])

    with pytest.raises(ValueError, match=r"must be .* of the same tokens"):
        as_model(forward, params, max_position=64, attention={Odd: odd})


def test_a_model_that_counts_positions_itself_is_refused():
    module, params, _ = stranger()

    def forward(params, tokens, positions):
        return module.apply(
            params, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        )

    with pytest.raises(ValueError, match="forward does not use its positions"):
        as_model(forward, params, max_position=64)


def test_a_model_without_positions_says_so():
    class NoPositions(nn.Module):
        @nn.compact
        def __call__(self, tokens, positions):
            x, _ = zoo.Block()(nn.Embed(40, 24)(tokens), nn.make_causal_mask(tokens))
            return nn.Dense(40)(x)

    module = NoPositions()
    params = zoo.weights(module)
    model = as_model(module.apply, params, max_position=64, has_positions=False)
    tokens = np.random.default_rng(6).integers(0, 40, 8).tolist()
    logits = paged_logits(model, tokens, [5, 3])
    np.testing.assert_allclose(logits, zoo.whole(module, params, tokens), atol=1e-4)


def test_flax_is_as_before_after_a_model_that_raises():
    before = axes_scan.scan

    def forward(params, tokens, positions):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        as_model(forward, {}, max_position=64)
    assert axes_scan.scan is before
