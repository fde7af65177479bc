"""Gemma 2 and 3 of google-deepmind's package over our caches, beside their own cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import zoo_runs

from paged_jax import Engine, EngineConfig, SamplingParams, compare
from paged_jax.integrations.gemma import as_model, own_decoding, spec_from_config

pytest.importorskip("gemma", reason="extra zoo")
gm = pytest.importorskip("gemma.gm", reason="gemma 3 and later")

CAPACITY = 64
LOCAL, GLOBAL = gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL
SMALL = {
    "num_embed": zoo_runs.VOCAB_SIZE,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 16,
    "attention_types": (LOCAL, GLOBAL),
    "sliding_window_size": 8,
}
# The siblings in small: what tells them apart stays theirs.
CASES = {
    "gemma3_270m": (gm.nn.Gemma3_270M, {}),
    "gemma3_27b": (gm.nn.Gemma3_27B, {"num_kv_heads": 2, "vision_encoder": None}),
    "gemma2_27b": (gm.nn.Gemma2_27B, {"num_kv_heads": 2, "attn_logits_soft_cap": 2.0}),
    "multi_head": (gm.nn.Gemma2_2B, {"num_kv_heads": 4, "final_logit_softcap": 3.0}),
    "all_local": (gm.nn.Gemma3_270M, {"attention_types": (LOCAL, LOCAL)}),
}


def make_zoo_model(case, dtype=jnp.float32):
    cls, fields = CASES[case]
    return cls(config=dataclasses.replace(cls.config, **SMALL | fields), dtype=dtype)


@functools.cache
def make_params(case):
    tokens = jnp.zeros((1, 2), jnp.int32)
    return zoo_runs.randomised(make_zoo_model(case).init(jax.random.key(0), tokens)["params"])


@functools.cache
def make_model(case):
    return as_model(make_zoo_model(case), make_params(case), max_position=CAPACITY)


@functools.cache
def make_zoo_logits(case):
    """The model's own decode: one row, a cache of all positions, a causal mask over it."""
    zoo_model, params = make_zoo_model(case), make_params(case)
    empty = zoo_model.init_cache(batch_size=1, dtype=jnp.float32, cache_length=CAPACITY)

    @jax.jit
    def run(params, tokens, start, cache):
        positions = start + jnp.arange(tokens.shape[1])[None]
        mask = jnp.arange(CAPACITY) <= positions[..., None]
        out = zoo_model.apply(
            {"params": params}, tokens, positions=positions, cache=cache, attention_mask=mask
        )
        return out.logits[0], out.cache

    @functools.cache
    def zoo_logits(tokens):
        cache, start, parts = empty, 0, []
        for end in range(zoo_runs.ZOO_PREFILL, len(tokens) + 1):
            logits, cache = run(params, jnp.asarray([tokens[start:end]]), start, cache)
            parts.append(logits)
            start = end
        return np.concatenate(parts)

    return zoo_logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_zoos(case):
    zoo_runs.check_logits(make_model(case), make_zoo_logits(case), kind="paged", chunk=5)


@pytest.mark.parametrize("kind", ["paged", "dense"])
@pytest.mark.parametrize("case", ["gemma3_270m", "gemma2_27b"])
def test_logits_of_prompts_in_one_chunk(case, kind):
    zoo_runs.check_logits(make_model(case), make_zoo_logits(case), kind=kind, chunk=31)


@pytest.mark.parametrize("case", ["gemma3_270m", "gemma2_27b", "all_local"])
def test_continuous_batching_chooses_the_zoos_tokens(case):
    zoo_runs.check_engine(make_model(case), make_zoo_logits(case))


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("case", ["gemma3_270m", "gemma2_27b"])
def test_a_step_updates_the_pool_in_place(case, is_decode):
    zoo_runs.check_memory(make_model(case), is_decode=is_decode)


@pytest.mark.parametrize("case", ["gemma3_270m", "gemma2_27b"])
def test_the_head_runs_at_the_named_positions_only(case):
    zoo_runs.check_head(make_model(case))


def test_a_run_of_the_model_before_does_not_change_ours():
    """Its call is jitted in itself: a program of its own must not be taken for ours, or back."""
    case, tokens = "gemma3_270m", [5, 9, 3, 77, 1]
    zoo_model, params = make_zoo_model(case), make_params(case)
    before = zoo_model.apply({"params": params}, jnp.asarray([tokens])).logits
    ours = zoo_runs.cached_logits(make_model(case), [tokens + [2] * 6], kind="paged", chunk=5)[0]
    after = zoo_model.apply({"params": params}, jnp.asarray([tokens])).logits
    np.testing.assert_allclose(ours[:5], before[0], atol=zoo_runs.TOLERANCE)
    np.testing.assert_array_equal(before, after)


def test_bfloat16_the_packages_own_dtype():
    zoo_model = make_zoo_model("gemma3_270m", dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params("gemma3_270m"))
    engine = Engine(
        as_model(zoo_model, params, max_position=CAPACITY),
        config=EngineConfig(block_size=4, num_blocks=16, kv_dtype="bfloat16", max_num_seqs=2),
    )
    (output,) = engine.generate([[5, 9, 3]], SamplingParams(max_tokens=8, temperature=0.0))
    wanted = make_zoo_logits("gemma3_270m")((5, 9, 3, *output.token_ids[:-1]))[2:]
    chosen = wanted[np.arange(8), output.token_ids]
    assert (wanted.max(-1) - chosen).max() < 0.15 * wanted.std()


def test_specs_of_the_siblings():
    spec = spec_from_config(gm.nn.Gemma3_270M.config, max_position=32768)
    assert dataclasses.astuple(spec) == (18, 4, 1, 256, 262144, 32768, None)
    spec = spec_from_config(gm.nn.Gemma2_27B.config, max_position=8192)
    assert dataclasses.astuple(spec) == (46, 32, 16, 128, 256128, 8192, None)
    assert make_model("all_local").spec.window == 8


def test_other_models_are_refused():
    for zoo_model in (gm.nn.Gemma3n_E2B(), gm.nn.Gemma4_E2B(text_only=True)):
        with pytest.raises(ValueError, match=r"model=Gemma(3n|4)_E2B must be a Gemma 2 or 3"):
            as_model(zoo_model, {}, max_position=CAPACITY)


@pytest.mark.parametrize("case", CASES)
def test_compared_with_its_own_decoding(case):
    result = compare(
        make_model(case),
        [[5, 9, 3], [8] * 12, [4]],
        max_tokens=[6, 4, 9],
        config=EngineConfig(num_blocks=33, block_size=4),
        baseline=own_decoding(make_zoo_model(case), make_params(case)),
    )
    assert result.is_equal
    assert result.max_logit_difference < zoo_runs.TOLERANCE
    assert result.dense_bytes > result.paged_bytes > 0
