"""The Llama module against a plain numpy model, paged against dense, and how it compiles."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites.fixed_batch import FixedBatch

from models.common.rope import rotate
from models.llama import Llama, LlamaConfig, RopeScaling, as_model, param_shapes, random_params

KINDS = ["paged", "dense"]
CONFIGS = {
    "grouped": LlamaConfig.tiny(),
    "multi_head": LlamaConfig.tiny(num_kv_heads=4),
    "multi_query": LlamaConfig.tiny(num_kv_heads=1),
    "untied": LlamaConfig.tiny(tie_embeddings=False),
    "wide_heads": LlamaConfig.tiny(head_dim=16),
    "scaled_rope": LlamaConfig.tiny(
        rope_scaling=RopeScaling(factor=4.0, original_max_position=32), rope_theta=100.0
    ),
}
PROMPTS = [[5, 9, 3, 77, 1, 2, 90], [8], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 17, 30]]


def numpy_logits(params, config, tokens):
    """All logits of one sequence in float64, written from the papers, head by head."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    layers, head_dim = params["layers"], config.head_dim
    angles = np.arange(len(tokens))[:, None] * hand_frequencies(config)
    turn = np.exp(1j * angles)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rope(x):
        turned = (x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = params["embedding"][tokens]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config.num_layers):
        weight = {name: entry["weight"][layer] for name, entry in layers.items()}
        heads = np.split(
            norm(x, weight["attn_norm"]) @ weight["qkv"], len(weight["qkv"].T) // head_dim, -1
        )
        keys_at, values_at = config.num_heads, config.num_heads + config.num_kv_heads
        outs = []
        for head in range(config.num_heads):
            kv_head = head // (config.num_heads // config.num_kv_heads)
            scores = rope(heads[head]) @ rope(heads[keys_at + kv_head]).T / np.sqrt(head_dim)
            shares = np.where(causal, np.exp(scores), 0)
            outs.append(shares / shares.sum(-1, keepdims=True) @ heads[values_at + kv_head])
        x = x + np.concatenate(outs, -1) @ weight["out"]
        gate, up = np.split(norm(x, weight["mlp_norm"]) @ weight["gate_up"], 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight["down"]
    head = params["embedding" if config.tie_embeddings else "head"]
    return norm(x, params["final_norm"]["weight"]) @ head.T


def hand_frequencies(config):
    """The rotary frequencies, one by one."""
    out = []
    for index in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * index / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None:
            wavelength = 2 * np.pi / frequency
            longest = scaling.original_max_position / scaling.low_freq_factor
            shortest = scaling.original_max_position / scaling.high_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength >= shortest:
                turns = scaling.original_max_position / wavelength
                smooth = (turns - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


def batch_of(config, kind, *, dtype=jnp.float32, params=None, **options):
    params = random_params(config, 1, dtype=dtype) if params is None else params
    model = as_model(config, params, dtype=dtype)
    return FixedBatch(model, kind, num_rows=len(PROMPTS), capacity=32, block_size=4, **options)


@pytest.mark.parametrize("config", [CONFIGS["scaled_rope"], LlamaConfig.llama3_1_8b()])
def test_rope_scaling_follows_the_formula(config):
    frequencies = config.frequencies
    np.testing.assert_allclose(frequencies, hand_frequencies(config), rtol=1e-6)
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    divisors = plain / frequencies
    assert divisors.min() == pytest.approx(1)
    assert divisors.max() == pytest.approx(config.rope_scaling.factor, rel=1e-5)


def test_rotation_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    frequencies = LlamaConfig.tiny().frequencies

    def score(q_pos, k_pos):
        angles = [jnp.asarray([[position]]) * frequencies for position in (q_pos, k_pos)]
        turned = [
            rotate(x, jnp.cos(a)[None], jnp.sin(a)[None])
            for x, a in zip((q, k), angles, strict=True)
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(17, 12) == pytest.approx(score(5, 0), abs=1e-5)
    assert score(17, 12) != pytest.approx(score(17, 11), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "paged") for name in CONFIGS), ("grouped", "dense")]
)
def test_logits_equal_the_numpy_model(name, kind):
    config = CONFIGS[name]
    batch = batch_of(config, kind, fill=float("nan"))
    logits = batch.prefill(PROMPTS, chunk=5)
    next_logits = batch.run([[11], [12], [13]], [1, 1, 1])[:, 0]
    for row, prompt in enumerate(PROMPTS):
        expected = numpy_logits(batch.model.params, config, [*prompt, 11 + row])
        np.testing.assert_allclose(logits[row], expected[-2], atol=2e-4)
        np.testing.assert_allclose(next_logits[row], expected[-1], atol=2e-4)


def test_paged_equals_dense_over_a_decode():
    paged, dense = (batch_of(CONFIGS["grouped"], kind) for kind in KINDS)
    logits = [batch.prefill(PROMPTS, chunk=4) for batch in (paged, dense)]
    for _ in range(10):
        np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
        tokens = logits[1].argmax(-1)[:, None]
        logits = [batch.run(tokens, [1, 1, 1])[:, 0] for batch in (paged, dense)]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_several_positions(kind):
    tokens = np.array([prompt[:1] * 8 for prompt in PROMPTS])
    tokens[:, 1:] = np.arange(3 * 7).reshape(3, 7)
    every = batch_of(CONFIGS["grouped"], kind).run(tokens, [8] * 3, np.tile(np.arange(8), (3, 1)))
    at = np.array([[7, 0, 3], [1, 1, 2], [6, 5, 4]])
    some = batch_of(CONFIGS["grouped"], kind).run(tokens, [8] * 3, at)
    assert some.shape == (3, 3, 96)
    np.testing.assert_allclose(some, np.take_along_axis(every, at[..., None], 1), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_hold_any_tokens(kind):
    batches = [batch_of(CONFIGS["grouped"], kind) for _ in range(2)]
    tokens = np.array([[3, 1, 4, 1]] * 3)
    wild = tokens.copy()
    wild[0, 2:], wild[1, 1:], wild[2] = [-7, 10**9], [95, 0, 2**31 - 1], -1
    logits = [batch.run(t, [2, 1, 0]) for batch, t in zip(batches, (tokens, wild), strict=True)]
    np.testing.assert_array_equal(logits[0][:2], logits[1][:2])
    assert np.isfinite(logits[1]).all()


def test_an_untied_head_that_holds_the_embedding_changes_nothing():
    tied = CONFIGS["grouped"]
    params = random_params(tied, 1)
    untied = params | {"head": params["embedding"]}
    logits = [
        batch_of(config, "paged", params=weights).prefill(PROMPTS, chunk=16)
        for config, weights in ((tied, params), (CONFIGS["untied"], untied))
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (jnp.bfloat16, "paged"),
        (jnp.float16, "paged"),
        (jnp.bfloat16, "dense"),
    ],
)
def test_sixteen_bit_types_follow_float32(dtype, kind):
    config = CONFIGS["grouped"]
    exact = batch_of(config, kind).prefill(PROMPTS, chunk=16)
    batch = batch_of(config, kind, dtype=dtype)
    logits = batch.prefill(PROMPTS, chunk=16)
    assert logits.dtype == np.float32
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
    assert batch.run([[1], [2], [3]], [1, 1, 1]).shape == (3, 1, 96)  # fewer rows than the head's


@pytest.mark.parametrize("name", ["grouped", "untied"])
def test_the_module_declares_the_same_weights(name):
    config = CONFIGS[name]
    batch = batch_of(config, "dense")
    ids = jnp.zeros((3, 1), jnp.int32)
    module = Llama(config)
    variables = jax.eval_shape(
        lambda: module.init(jax.random.key(0), ids, ids, batch.store, logits_at=ids)
    )
    assert jax.tree.map(lambda leaf: leaf.shape, variables["params"]) == param_shapes(config)


class TestCompilation:
    """A deep model costs no more to trace and compile than a shallow one."""

    def lowered(self, num_layers, kind):
        config = LlamaConfig.tiny(num_layers=num_layers)
        batch = batch_of(config, kind)
        arguments = batch.arguments(np.ones((3, 1)), np.ones(3), np.zeros((3, 1)))
        return batch, batch.step.lower(*arguments)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_program_does_not_grow_with_the_layers(self, kind):
        texts = [self.lowered(num_layers, kind)[1].as_text() for num_layers in (2, 30)]
        assert len(texts[0].splitlines()) == len(texts[1].splitlines())

    @pytest.mark.parametrize("kind", KINDS)
    def test_thirty_layers_compile_in_seconds_and_reuse_the_cache(self, kind):
        start = time.perf_counter()
        batch, lowered = self.lowered(30, kind)
        memory = lowered.compile().memory_analysis()
        seconds = time.perf_counter() - start
        assert seconds < 20  # 2 s on a quiet machine
        store = batch.store if kind == "dense" else batch.store.blocks
        assert memory.alias_size_in_bytes >= store.nbytes
