"""The weights of Qwen2-family models."""

import functools

from models.common.family import Family, GgufFormat
from models.common.weights import LayerWeights, Weight
from models.llama.gguf import config_from_gguf, unpermuted_tensors_from_gguf
from models.llama.params import weights as llama_weights
from models.qwen2.config import Qwen2Config
from models.qwen2.modeling import Qwen2


def weights(config: Qwen2Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    parts = (config.q_width, config.kv_width, config.kv_width)
    biases = layers.bias("qkv", [f"self_attn.{x}_proj" for x in "qkv"], parts=parts)
    return [*llama_weights(config), biases]


QWEN2 = Family(
    name="qwen2",
    config_class=Qwen2Config,
    module_class=Qwen2,
    weights=weights,
    config_from_hf=Qwen2Config.from_hf,
    hf_types=("qwen2",),
    ignored=(r".*\.rotary_emb\.inv_freq",),
    config_to_hf=Qwen2Config.to_hf,
    gguf=GgufFormat(
        ("qwen2",),
        functools.partial(config_from_gguf, config_class=Qwen2Config),
        unpermuted_tensors_from_gguf,
    ),
)
