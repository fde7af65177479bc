"""Llama-family models of GGUF files, and those of families with the same names there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.checkpoints.gguf_reader import GgufFile
from models.checkpoints.gguf_tensors import GgufTensors
from models.common.rope import RopeScaling, rope_frequencies
from models.llama.config import LlamaConfig

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_from_gguf(file: GgufFile, config_class: type[Any] = LlamaConfig) -> Any:
    """Return the geometry that a GGUF file states.

    Args:
      file: of an architecture with Llama's metadata.
      config_class: of the configuration, a ``LlamaConfig``.

    Raises:
      ValueError: metadata are missing, or ask for something else than plain or Llama 3 RoPE.
    """
    arch = file.architecture
    read = lambda key, default=None: file.metadata(f"{arch}.{key}", default)  # noqa: E731
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
            raise ValueError(f"{file.path}: {arch}.{key}={found!r} must be {expected!r}")
    num_tokens = len(file.metadata("tokenizer.ggml.tokens"))
    vocab_size = read("vocab_size", num_tokens)
    if vocab_size < num_tokens:
        raise ValueError(f"{file.path}: {arch}.vocab_size={vocab_size} must be >= {num_tokens}")
    try:
        config = config_class(
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


def tensors_from_gguf(file: GgufFile, config: LlamaConfig) -> GgufTensors:
    """Return the tensors of a GGUF file of architecture ``llama``, by Hugging Face's names.

    llama.cpp rotates neighbouring channels in this architecture, and in no other that is served:
    its files hold the rows of q and k in that order.
    """
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    return GgufTensors(file, _NAMES, interleaved=heads, ignored=("rope_freqs.weight",))


def unpermuted_tensors_from_gguf(file: GgufFile, config: LlamaConfig) -> GgufTensors:
    """The same for architectures whose files hold q and k as Hugging Face does (Qwen's)."""
    del config
    return GgufTensors(file, _NAMES, ignored=("rope_freqs.weight",))
