"""The weights of Llama-family models."""

from __future__ import annotations

from models.common.config import DecoderConfig
from models.common.family import Family, GgufFormat
from models.common.weights import LayerWeights, Weight, table, vector
from models.llama.config import LlamaConfig
from models.llama.gguf import config_from_gguf, tensors_from_gguf
from models.llama.modeling import Llama


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
    config_to_hf=LlamaConfig.to_hf,
    gguf=GgufFormat(("llama",), config_from_gguf, tensors_from_gguf),
)
param_shapes = LLAMA.param_shapes
random_params = LLAMA.random_params
as_model = LLAMA.as_model
