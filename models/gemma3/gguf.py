"""Gemma 3 text models in GGUF files, whose norms are stored whole: Hugging Face's are less one."""

from __future__ import annotations

from models.checkpoints.gguf_reader import GgufFile
from models.checkpoints.gguf_tensors import GgufTensors
from models.common.rope import LinearScaling
from models.gemma3.config import Gemma3Config

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
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NORMS = [name for name in _NAMES.values() if name.endswith("norm")]
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


def tensors_from_gguf(file: GgufFile, config: Gemma3Config) -> GgufTensors:
    """Return the tensors of a GGUF file of architecture ``gemma3``, by Hugging Face's names."""
    del config
    return GgufTensors(file, _NAMES, less_one=_NORMS)
