"""The weights of Llama-family models, and those of GGUF files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from models.checkpoints.gguf_reader import GgufFile, unpermute_rows
from models.common.config import DecoderConfig
from models.common.family import Family
from models.common.rope import RopeScaling, rope_frequencies
from models.common.weights import LayerWeights, Weight, table, vector
from models.llama.config import LlamaConfig
from models.llama.modeling import Llama

_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def weights(config: DecoderConfig) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    width, mlp = config.hidden_size, config.intermediate_size
    qkv = (config.q_width, config.kv_width, config.kv_width)
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    found = [
        table("embedding", "model.embed_tokens.weight", rows=config.vocab_size, width=width),
        layers.vector("attn_norm.weight", "input_layernorm.weight", width),
        layers.linear("qkv", [f"self_attn.{x}_proj" for x in "qkv"], width=width, parts=qkv),
        layers.linear("out", ["self_attn.o_proj"], width=config.q_width, parts=[width]),
        layers.vector("mlp_norm.weight", "post_attention_layernorm.weight", width),
        layers.linear("gate_up", ["mlp.gate_proj", "mlp.up_proj"], width=width, parts=[mlp, mlp]),
        layers.linear("down", ["mlp.down_proj"], width=mlp, parts=[width]),
        vector("final_norm.weight", "model.norm.weight", width),
    ]
    if not config.tie_embeddings:
        found.append(table("head", "lm_head.weight", rows=config.vocab_size, width=width))
    return found


LLAMA = Family(
    name="llama",
    config_class=LlamaConfig,
    module_class=Llama,
    weights=weights,
    config_from_hf=LlamaConfig.from_hf,
    hf_types=("llama",),
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
param_shapes = LLAMA.param_shapes
random_params = LLAMA.random_params
as_model = LLAMA.as_model


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Return the geometry that a GGUF file of architecture ``llama`` states.

    Raises:
      ValueError: metadata are missing, or ask for something else than plain or Llama 3 RoPE.
    """
    read = lambda key, default=None: file.metadata(f"llama.{key}", default)  # noqa: E731
    num_heads, hidden_size = read("attention.head_count"), read("embedding_length")
    head_dim = read("attention.key_length", hidden_size // num_heads)
    for key, expected in (
        ("rope.scaling.type", "none"),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
    ):
        found = read(key, expected)
        if found != expected:
            raise ValueError(f"{file.path}: llama.{key}={found!r} must be {expected!r}")
    num_tokens = len(file.metadata("tokenizer.ggml.tokens"))
    vocab_size = read("vocab_size", num_tokens)
    if vocab_size < num_tokens:
        raise ValueError(f"{file.path}: llama.vocab_size={vocab_size} must be >= {num_tokens}")
    try:
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read("feed_forward_length"),
            num_layers=read("block_count"),
            num_heads=num_heads,
            num_kv_heads=read("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=read("context_length"),
            rope_theta=read("rope.freq_base", 10_000.0),
            rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in file.tensor_names,
        )
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    return _with_rope_scaling(config, file)


def _with_rope_scaling(config: LlamaConfig, file: GgufFile) -> LlamaConfig:
    """Recognise Llama 3's scaling, which GGUF files hold as a divisor for each frequency."""
    if "rope_freqs.weight" not in file.tensor_names:
        return config
    divisors = file.tensor("rope_freqs.weight", (config.head_dim // 2,))
    scaling = RopeScaling(factor=float(divisors.max()))
    plain, stretched = (
        rope_frequencies(config.head_dim, theta=config.rope_theta, scaling=one)
        for one in (None, scaling)
    )
    expected = plain / stretched
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(
            f"{file.path}: tensor 'rope_freqs.weight': expected Llama 3's divisors for factor "
            f"{divisors.max()}, {expected.round(3).tolist()}, found {divisors.round(3).tolist()}"
        )
    return dataclasses.replace(config, rope_scaling=scaling)


def params_from_gguf(
    file: GgufFile, config: LlamaConfig, *, report: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Return the stacked float32 weights of a GGUF file.

    Args:
      file: a file of architecture ``llama``.
      config: the geometry; every tensor must fit it.
      report: called with the share of layers done, 0 to 1.

    Raises:
      ValueError: a tensor is missing, does not fit, or would be left over.
    """
    names = {"token_embd.weight", "output_norm.weight", "rope_freqs.weight"}
    names |= set() if config.tie_embeddings else {"output.weight"}
    names |= {
        f"blk.{layer}.{name}.weight"
        for layer in range(config.num_layers)
        for name in _LAYER_TENSORS
    }
    left_over = sorted(set(file.tensor_names) - names)
    if left_over:
        raise ValueError(
            f"{file.path}: tensor {left_over[0]!r}: expected no such tensor in a Llama model with "
            f"{config.num_layers} layers ({len(left_over)} unknown in all)"
        )
    width = config.hidden_size
    shapes = param_shapes(config)["layers"]
    layers = {name: np.empty(entry["weight"], np.float32) for name, entry in shapes.items()}
    for layer in range(config.num_layers):
        for name, value in _layer_from_gguf(file, config, layer).items():
            layers[name][layer] = value
        report((layer + 1) / config.num_layers)
    params: dict[str, Any] = {
        "embedding": file.tensor("token_embd.weight", (config.vocab_size, width)),
        "layers": {name: {"weight": value} for name, value in layers.items()},
        "final_norm": {"weight": file.tensor("output_norm.weight", (width,))},
    }
    if not config.tie_embeddings:
        params["head"] = file.tensor("output.weight", (config.vocab_size, width))
    return params


def _layer_from_gguf(file: GgufFile, config: LlamaConfig, layer: int) -> dict[str, np.ndarray]:
    width, mlp = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def read(name: str, *shape: int) -> np.ndarray:
        return file.tensor(f"blk.{layer}.{name}.weight", shape)

    q = unpermute_rows(read("attn_q", q_width, width), num_heads=config.num_heads)
    k = unpermute_rows(read("attn_k", kv_width, width), num_heads=config.num_kv_heads)
    v = read("attn_v", kv_width, width)
    # The file holds [out, in].
    return {
        "attn_norm": read("attn_norm", width),
        "qkv": np.concatenate([q, k, v]).T,
        "out": read("attn_output", width, q_width).T,
        "mlp_norm": read("ffn_norm", width),
        "gate_up": np.concatenate([read("ffn_gate", mlp, width), read("ffn_up", mlp, width)]).T,
        "down": read("ffn_down", width, mlp).T,
    }
