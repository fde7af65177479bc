"""Gemma 3 text models in GGUF files, whose norms are stored whole: Hugging Face's are less one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.gguf_reader import GgufFile
from models.common.rope import LinearScaling
from models.common.weights import read_params, tensor_names
from models.gemma3.config import Gemma3Config
from models.gemma3.params import weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# The file does not say by what the scores of the 27B model are divided; llama.cpp knows it by this.
_NUM_LAYERS_27B = 62


def config_from_gguf(file: GgufFile) -> Gemma3Config:
    """Return the geometry that a GGUF file of architecture ``gemma3`` states.

    Args:
      file: the file; what it leaves out (each sixth layer without a window, the base 10000 of the
        others) is as llama.cpp takes it.

    Raises:
      ValueError: metadata are missing, or ask for what this family does not have.
    """
    read = lambda key, default=None: file.metadata(f"gemma3.{key}", default)  # noqa: E731
    hidden_size, num_heads = read("embedding_length"), read("attention.head_count")
    head_dim, num_layers = read("attention.key_length"), read("block_count")
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        found = read(key, expected)
        if found != expected:
            raise ValueError(f"{file.path}: gemma3.{key}={found!r} must be {expected!r}")
    scaling = read("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: gemma3.rope.scaling.type={scaling!r} must be 'linear'")
    is_27b = num_layers == _NUM_LAYERS_27B
    window, period = read("attention.sliding_window"), read("attention.sliding_window_pattern", 6)
    try:
        return Gemma3Config(
            vocab_size=len(file.metadata("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            intermediate_size=read("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=read("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position=read("context_length"),
            tie_embeddings="output.weight" not in file.tensor_names,
            query_pre_attn_scalar=hidden_size // num_heads if is_27b else head_dim,
            layer_windows=tuple(
                window if (layer + 1) % period else None for layer in range(num_layers)
            ),
            final_soft_cap=read("final_logit_softcapping", 0.0) or None,
            rope_theta=read("rope.freq_base", 1_000_000.0),
            rope_scaling=(
                LinearScaling(factor=read("rope.scaling.factor")) if scaling == "linear" else None
            ),
            local_rope_theta=read("rope.freq_base_swa", 10_000.0),
            rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        )
    except ValueError as error:
        message = str(error)
        where = str(file.path)
        raise ValueError(message if where in message else f"{where}: {message}") from error


def params_from_gguf(
    file: GgufFile, config: Gemma3Config, *, report: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Return the stacked float32 weights of a GGUF file.

    Args:
      file: a file of architecture ``gemma3``.
      config: the geometry; every tensor must fit it.
      report: called with the share of tensors done, 0 to 1.

    Raises:
      ValueError: a tensor is missing, does not fit, or would be left over.
    """
    table = weights(config)
    names = {_gguf_name(name) for name in tensor_names(table)}
    left_over = sorted(set(file.tensor_names) - names)
    if left_over:
        raise ValueError(
            f"{file.path}: tensor {left_over[0]!r}: expected no such tensor in a Gemma 3 model "
            f"with {config.num_layers} layers ({len(left_over)} unknown in all)"
        )
    return read_params(_HfNamed(file, report), table, np.float32)


def _gguf_name(name: str) -> str:
    """A tensor's name in the file, from Hugging Face's."""
    module = name.removesuffix(".weight")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
    if layer is None:
        return f"{_NAMES[module]}.weight"
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.weight"


class _HfNamed:
    """The tensors of a file as a Hugging Face folder has them: a ``TensorSource``."""

    def __init__(self, file: GgufFile, report: Callable[[float], None]) -> None:
        self._file = file
        self._report = report
        self._num_read = 0

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def tensor_names(self) -> list[str]:
        """Names in the file."""
        return self._file.tensor_names

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor by its Hugging Face name."""
        value = self._file.tensor(_gguf_name(name), shape)
        self._num_read += 1
        self._report(self._num_read / len(self._file.tensor_names))
        return value - 1 if len(shape) == 1 else value
