"""The Flax models of transformers over our caches, beside their own ``past_key_values``."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import zoo_runs

from paged_jax import EngineConfig, compare
from paged_jax.integrations.transformers_flax import as_model, own_decoding, spec_from_config

transformers = pytest.importorskip("transformers", minversion="4.57", reason="extra zoo")
pytest.importorskip("transformers.models.llama.modeling_flax_llama", reason="transformers 4.x")

SMALL = {
    "vocab_size": zoo_runs.VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
CASES = {
    "llama": ("Llama", "ForCausalLM", GATED | {"attention_bias": True}),
    "llama_multi_head": ("Llama", "ForCausalLM", GATED | {"num_key_value_heads": 4}),
    "mistral": ("Mistral", "ForCausalLM", GATED | {"sliding_window": 8}),
    "gemma": ("Gemma", "ForCausalLM", GATED | {"head_dim": 16, "num_key_value_heads": 1}),
    "gpt2": ("GPT2", "LMHeadModel", SMALL),
    "gpt2_untied": ("GPT2", "LMHeadModel", SMALL | {"tie_word_embeddings": False}),
    "opt": ("OPT", "ForCausalLM", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt_350m": (
        "OPT",
        "ForCausalLM",
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
}
FAMILIES = ["llama", "mistral", "gemma", "gpt2", "opt"]


@functools.cache
def make_zoo_model(case):
    family, suffix, fields = CASES[case]
    config = getattr(transformers, f"{family}Config")(**fields)
    zoo_model = getattr(transformers, f"Flax{family}{suffix}")(config)
    zoo_model.params = zoo_runs.randomised(zoo_model.params)
    return zoo_model


@functools.cache
def make_model(case):
    return as_model(make_zoo_model(case))


@functools.cache
def make_zoo_logits(case):
    """The model's own decode: one row, a cache of all positions, a mask of ones."""
    zoo_model = make_zoo_model(case)
    capacity = zoo_model.config.max_position_embeddings
    mask = jnp.ones((1, capacity), jnp.int32)

    empty = zoo_model.init_cache(1, capacity)

    @jax.jit
    def run(params, tokens, start, cache):
        positions = start + jnp.arange(tokens.shape[1])[None]
        out = zoo_model(tokens, mask, positions, params=params, past_key_values=cache)
        return out.logits[0], out.past_key_values

    @functools.cache
    def zoo_logits(tokens):
        cache, start, parts = empty, 0, []
        for end in range(zoo_runs.ZOO_PREFILL, len(tokens) + 1):
            new = jnp.asarray([tokens[start:end]])
            logits, cache = run(zoo_model.params, new, start, cache)
            parts.append(logits)
            start = end
        return np.concatenate(parts)

    return zoo_logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_zoos(case):
    zoo_runs.check_logits(make_model(case), make_zoo_logits(case), kind="paged", chunk=5)


@pytest.mark.parametrize("kind", ["paged", "dense"])
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_of_prompts_in_one_chunk(case, kind):
    zoo_runs.check_logits(make_model(case), make_zoo_logits(case), kind=kind, chunk=31)


@pytest.mark.parametrize("case", FAMILIES)
def test_continuous_batching_chooses_the_zoos_tokens(case):
    zoo_runs.check_engine(make_model(case), make_zoo_logits(case))


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_step_updates_the_pool_in_place(case, is_decode):
    zoo_runs.check_memory(make_model(case), is_decode=is_decode)


@pytest.mark.parametrize("case", CASES)
def test_the_head_runs_at_the_named_positions_only(case):
    zoo_runs.check_head(make_model(case))


def make_llama(*, cls="FlaxLlamaForCausalLM", **fields):
    config = transformers.LlamaConfig(**GATED, **fields)
    return getattr(transformers, cls)(config, _do_init=cls != "FlaxLlamaForCausalLM")


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), ([7, 128001], (7,))]
)
def test_end_tokens_are_those_of_the_vocabulary(given, expected):
    zoo_model = make_llama(eos_token_id=given)
    assert as_model(zoo_model, {"model": {}}).eos_token_ids == expected


def test_params_of_a_model_without_its_own():
    params = make_zoo_model("llama").params
    config = make_zoo_model("llama").config
    model = as_model(transformers.FlaxLlamaForCausalLM(config, _do_init=False), params)
    zoo_runs.check_logits(model, make_zoo_logits("llama"), kind="paged", chunk=31)


def test_other_models_are_refused():
    config = transformers.GPTNeoConfig()
    with pytest.raises(ValueError, match=r"model_type='gpt_neo' must be one of 'gemma', 'gpt2'"):
        spec_from_config(config)
    with pytest.raises(ValueError, match=r"FlaxLlamaModel must have a language-modelling head"):
        as_model(make_llama(cls="FlaxLlamaModel"))


def test_a_mistral_without_a_window_is_refused():
    """Its own mask shows each token only itself, which is not what its weights were made for."""
    fields = GATED | {"sliding_window": None}
    zoo_model = transformers.FlaxMistralForCausalLM(transformers.MistralConfig(**fields))
    tokens = jnp.asarray([[1, 2, 3, 4]])
    logits = zoo_model(tokens).logits
    np.testing.assert_allclose(logits[0, 3], zoo_model(tokens.at[0, :3].set(9)).logits[0, 3])
    with pytest.raises(ValueError, match=r"sliding_window=None must be a number of tokens"):
        as_model(zoo_model)


def test_window_of_the_spec():
    config = transformers.MistralConfig(**GATED | {"sliding_window": 8})
    assert spec_from_config(config).window == 9  # eight before the query, and its own


def test_transformers_is_not_imported_by_the_library():
    names = "paged_jax.integrations.transformers_flax, paged_jax.integrations.gemma"
    code = f"import sys, {names}; assert not {{'transformers', 'gemma'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("case", FAMILIES)
def test_compared_with_its_own_decoding(case):
    result = compare(
        make_model(case),
        [[5, 9, 3], [8] * 12, [4]],
        max_tokens=[6, 4, 9],
        config=EngineConfig(num_blocks=33, block_size=4),
        baseline=own_decoding(make_zoo_model(case)),
    )
    assert result.is_equal
    assert result.max_logit_difference < zoo_runs.TOLERANCE
    assert result.dense_bytes > result.paged_bytes > 0
