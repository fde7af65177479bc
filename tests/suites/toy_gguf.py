"""Toy GGUF files: a tiny Llama with random weights, a byte-level tokenizer, a chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.llama import LlamaConfig, random_params
from models.tokenizer import byte_alphabet

TOY_MERGES = ["h e", "l l", "he ll", "Ġ t", "1 2"]
TOY_SPECIAL = ["<|im_start|>", "<|im_end|>"]
TOY_TOKENS = TOY_SPECIAL + byte_alphabet() + [pair.replace(" ", "") for pair in TOY_MERGES]
TOY_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOY_CONFIG = LlamaConfig.tiny(vocab_size=len(TOY_TOKENS), tie_embeddings=False)


def permute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k projections."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def toy_tensors(config: LlamaConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The weights under their GGUF names, as llama.cpp stores them."""
    layers = {name: np.asarray(entry["weight"]) for name, entry in params["layers"].items()}
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    tensors = {
        "token_embd.weight": params["embedding"],
        "output_norm.weight": params["final_norm"]["weight"],
    }
    if not config.tie_embeddings:
        tensors["output.weight"] = params["head"]
    for layer in range(config.num_layers):
        q, k, v = np.split(layers["qkv"][layer].T, [q_width, q_width + kv_width])
        gate, up = np.split(layers["gate_up"][layer].T, 2)
        named = {
            "attn_norm": layers["attn_norm"][layer],
            "attn_q": permute_rows(q, config.num_heads),
            "attn_k": permute_rows(k, config.num_kv_heads),
            "attn_v": v,
            "attn_output": layers["out"][layer].T,
            "ffn_norm": layers["mlp_norm"][layer],
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layers["down"][layer].T,
        }
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in named.items()}
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def toy_metadata(config: LlamaConfig) -> dict[str, Any]:
    return {
        "general.name": "a toy for tests",
        "general.license": "apache-2.0",
        "llama.vocab_size": config.vocab_size,
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOY_TOKENS,
        "tokenizer.ggml.token_type": [3] * len(TOY_SPECIAL) + [1] * (len(TOY_TOKENS) - 2),
        "tokenizer.ggml.merges": TOY_MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TOY_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    adders[type(value)](key, value)


def write_toy_gguf(
    path: Path,
    *,
    tensors: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    config: LlamaConfig = TOY_CONFIG,
    architecture: str = "llama",
) -> Path:
    """Write a toy file with changes; a value of None removes the tensor or key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (toy_metadata(config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    arrays = toy_tensors(config, random_params(config, 0)) | dict(tensors or {})
    for tensor_name, array in arrays.items():
        if array is not None:
            writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
