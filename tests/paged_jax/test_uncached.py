"""Attention without a cache equals the reference op, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites.attention_cases import alibi

from models.llama import LlamaConfig, as_model, random_params
from paged_jax.cache import DenseKVCache
from paged_jax.uncached import UncachedAttention
from pallas_kernels.paged_attention import paged_attention

B, T, H, K, D, BLOCK_SIZE = 4, 13, 6, 2, 8, 4
Q_LENS = np.array([13, 0, 1, 6], np.int32)

each_option = pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"window": 1},
        {"window": 5},
        {"window": 64},
        {"soft_cap": 1.5},
        {"sinks": np.linspace(-2, 2, H, dtype=np.float32)},
        {"score_fn": alibi},
        {"window": 4, "soft_cap": 1.5, "sinks": np.ones(H, np.float32), "score_fn": alibi},
    ],
    ids=lambda options: "-".join(f"{k}{v if k == 'window' else ''}" for k, v in options.items()),
)


def make_qkv(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(B, T, heads, D) for heads in (H, K, K)]
    return [jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes]


def by_the_op(q, k, v, q_lens, **options):
    """The reference backend over a pool in which each row has blocks of its own."""
    num_blocks = -(-T // BLOCK_SIZE)
    kv = jnp.stack([k, v], axis=2)  # [B, T, 2, K, D]
    kv = jnp.pad(kv, ((0, 0), (0, num_blocks * BLOCK_SIZE - T), (0, 0), (0, 0), (0, 0)))
    kv = kv.reshape(B * num_blocks, BLOCK_SIZE, 2, K, D).transpose(0, 2, 3, 1, 4)
    tables = jnp.arange(B * num_blocks, dtype=jnp.int32).reshape(B, num_blocks)
    return paged_attention(q, kv, tables, q_lens, q_lens, backend="reference", **options)


def is_real(q_lens):
    return (np.arange(T) < q_lens[:, None])[..., None, None]


@each_option
def test_outputs_and_gradients_equal_the_reference(options):
    arrays, q_lens = make_qkv(), jnp.asarray(Q_LENS)
    mix = np.random.default_rng(1).normal(size=(B, T, H, D)).astype(np.float32)
    options = dict(options)
    differentiable = {"sinks": options.pop("sinks")} if "sinks" in options else {}

    def ours(arrays, more):
        cache = UncachedAttention(q_lens=q_lens, recompute_scores="soft_cap" in options)
        out, same = cache.attend(0, *arrays, **options, **more)
        assert same is cache
        return jnp.sum(out * mix), out

    def reference(arrays, more):
        out = by_the_op(*arrays, q_lens, **options, **more)
        return jnp.sum(out * mix), out

    results = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(arrays, differentiable)
        for f in (ours, reference)
    ]
    (_, out), gradients = results[0]
    (_, want), want_gradients = results[1]
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert (np.asarray(out)[~np.broadcast_to(is_real(Q_LENS), out.shape)] == 0).all()
    for found, expected in zip(*map(jax.tree.leaves, (gradients, want_gradients)), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(want_gradients[0][2]).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_operands(dtype):
    arrays = make_qkv(dtype)
    out, _ = UncachedAttention().attend(0, *arrays, window=5)
    assert out.dtype == dtype
    wide = [x.astype(jnp.float32) for x in arrays]
    want = by_the_op(*wide, jnp.full(B, T, jnp.int32), window=5)
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=6e-2)


def test_a_window_may_be_traced():
    arrays = make_qkv()
    attend = jax.jit(lambda window: UncachedAttention().attend(0, *arrays, window=window)[0])
    for window in (1, 5):
        want, _ = UncachedAttention().attend(0, *arrays, window=window)
        np.testing.assert_allclose(attend(jnp.int32(window)), want, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_padding_may_hold_nan(window):
    """Neither outputs nor gradients of real tokens see what padding holds."""
    clean = make_qkv()
    real = is_real(Q_LENS)
    poisoned = [jnp.where(real, x, jnp.nan) for x in clean]

    def total(arrays):
        out, _ = UncachedAttention(q_lens=jnp.asarray(Q_LENS)).attend(0, *arrays, window=window)
        return jnp.sum(jnp.sin(out)), out

    gradient = jax.grad(total, has_aux=True)
    (found, out), (expected, want) = gradient(poisoned), gradient(clean)
    np.testing.assert_array_equal(out, want)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_runs_unchanged():
    """Logits of a whole model equal those over the dense cache."""
    config = LlamaConfig.tiny()
    model = as_model(config, random_params(config, 0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 20)).astype(np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    dense = DenseKVCache.create(model.spec, batch_size=3, capacity=20)
    dense = dense.at(np.zeros(3, np.int32), np.full(3, 20, np.int32))
    logits = [
        model.apply(model.params, tokens, positions, cache, logits_at=positions)[0]
        for cache in (UncachedAttention(), UncachedAttention(recompute_scores=True), dense)
    ]
    np.testing.assert_allclose(logits[0], logits[2], atol=1e-4)
    np.testing.assert_allclose(logits[1], logits[2], atol=1e-4)


def test_recomputing_scores_needs_less_memory():
    config = LlamaConfig.tiny(max_position=512, num_layers=4)
    model = as_model(config, random_params(config, 0))
    tokens = np.zeros((2, 256), np.int32)
    positions = np.broadcast_to(np.arange(256, dtype=np.int32), tokens.shape)

    def temporary_bytes(recompute_scores):
        def loss(params):
            cache = UncachedAttention(recompute_scores=recompute_scores)
            return model.apply(params, tokens, positions, cache, logits_at=positions)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 2 * config.num_heads * 256 * 256 * 4  # of one layer, float32
    assert temporary_bytes(False) - temporary_bytes(True) > (config.num_layers - 2) * scores
