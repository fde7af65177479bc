"""Toy GGUF files of architecture gemma3."""

import dataclasses

import jax
import numpy as np
import pytest
from suites.toy_gguf import TOY_CONFIG, TOY_TOKENS, toy_metadata, write_toy_gguf

from models.checkpoints import GgufFile
from models.common.rope import LinearScaling
from models.gemma3 import GEMMA3, Gemma3Config, config_from_gguf
from models.stored import open_stored

CONFIG = Gemma3Config(
    vocab_size=len(TOY_TOKENS),
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    tie_embeddings=True,
    query_pre_attn_scalar=16,
    layer_windows=(8, 8, 8, 8, 8, None, 8),
    rope_theta=1_000_000.0,
    rms_norm_eps=2**-20,  # a float32, as files store it
)
METADATA = {
    "gemma3.block_count": 7,
    "gemma3.context_length": 128,
    "gemma3.embedding_length": 32,
    "gemma3.feed_forward_length": 48,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2,
    "gemma3.attention.key_length": 16,
    "gemma3.attention.value_length": 16,
    "gemma3.attention.sliding_window": 8,
    "gemma3.attention.layer_norm_rms_epsilon": 2**-20,
    "gemma3.rope.freq_base": 1_000_000.0,
}
NORMS = {
    "attn_norm": "attn_norm",
    "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}


def gemma_tensors(params):
    """The weights as llama.cpp stores them: norms whole, queries and keys not permuted."""
    layers = {name: np.asarray(entry["weight"]) for name, entry in params["layers"].items()}
    tensors = {
        "token_embd.weight": np.asarray(params["embedding"]),
        "output_norm.weight": np.asarray(params["final_norm"]["weight"]) + 1,
    }
    for layer in range(CONFIG.num_layers):
        q, k, v = np.split(layers["qkv"][layer].T, [CONFIG.q_width, CONFIG.q_width + 32])
        gate, up = np.split(layers["gate_up"][layer].T, 2)
        named = {name: layers[path][layer] + 1 for path, name in NORMS.items()}
        named |= {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": layers["out"][layer].T}
        named |= {"ffn_gate": gate, "ffn_up": up, "ffn_down": layers["down"][layer].T}
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in named.items()}
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


@pytest.fixture(scope="module")
def params():
    return GEMMA3.random_params(CONFIG, 0)


@pytest.fixture(scope="module")
def llama_tensors(tmp_path_factory):
    """Names of what the suite's toy has, which this one has not."""
    return GgufFile(write_toy_gguf(tmp_path_factory.mktemp("llama") / "toy.gguf")).tensor_names


@pytest.fixture
def open_toy(tmp_path, params, llama_tensors):
    """``open_toy(metadata, tensors)``: the toy with changes."""
    llama_keys = [key for key in toy_metadata(TOY_CONFIG) if key.startswith("llama.")]

    def write(metadata=None, tensors=None):
        return GgufFile(
            write_toy_gguf(
                tmp_path / "toy.gguf",
                architecture="gemma3",
                metadata=dict.fromkeys(llama_keys) | METADATA | (metadata or {}),
                tensors=dict.fromkeys(llama_tensors) | gemma_tensors(params) | (tensors or {}),
            )
        )

    return write


def test_geometry_and_weights(open_toy, params):
    file = open_toy()
    config = config_from_gguf(file)
    assert config == CONFIG
    found = open_stored(file.path).load("float32").params
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), found, params
    )


@pytest.mark.parametrize(
    ("metadata", "change"),
    [
        (
            {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
            {"rope_scaling": LinearScaling(factor=8.0)},
        ),
        ({"gemma3.rope.freq_base_swa": 512.0}, {"local_rope_theta": 512.0}),
        ({"gemma3.final_logit_softcapping": 30.0}, {"final_soft_cap": 30.0}),
        (
            {"gemma3.attention.sliding_window_pattern": 2},
            {"layer_windows": (8, None, 8, None, 8, None, 8)},
        ),
        (  # llama.cpp's rule for the 27B model
            {"gemma3.block_count": 62},
            {
                "num_layers": 62,
                "query_pre_attn_scalar": 8,
                "layer_windows": ((8,) * 5 + (None,)) * 10 + (8, 8),
            },
        ),
    ],
)
def test_what_files_may_state(open_toy, metadata, change):
    assert config_from_gguf(open_toy(metadata)) == dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"gemma3.block_count": None}, r"metadata key 'gemma3\.block_count'"),
        ({"gemma3.attention.value_length": 8}, r"value_length=8 must be 16"),
        ({"gemma3.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn' must be 'linear'"),
        ({"gemma3.attention.head_count_kv": 3}, r"toy\.gguf: num_kv_heads=3 must divide"),
    ],
)
def test_geometry_that_does_not_fit_is_named(open_toy, metadata, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(open_toy(metadata))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.6.ffn_up.weight": None}, r"'blk\.6\.ffn_up\.weight': expected shape \(48, 32\)"),
        ({"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, r"expected shape \(16,\), found"),
        ({"blk.7.attn_norm.weight": np.ones(32, np.float32)}, r"'blk\.7\..*no such tensor in a"),
    ],
)
def test_tensors_that_do_not_fit_are_named(open_toy, tensors, message):
    file = open_toy(tensors=tensors)
    with pytest.raises(ValueError, match=message):
        open_stored(file.path).load("float32")
