"""The weights of Qwen3-family models."""

import functools

from models.common.family import Family, GgufFormat
from models.common.weights import LayerWeights, Weight
from models.llama.gguf import config_from_gguf, unpermuted_tensors_from_gguf
from models.llama.params import weights as llama_weights
from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3


def weights(config: Qwen3Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    norms = [
        layers.vector(f"{x}_norm.weight", f"self_attn.{x}_norm.weight", config.head_dim)
        for x in "qk"
    ]
    return [*llama_weights(config), *norms]


QWEN3 = Family(
    name="qwen3",
    config_class=Qwen3Config,
    module_class=Qwen3,
    weights=weights,
    config_from_hf=Qwen3Config.from_hf,
    hf_types=("qwen3",),
    config_to_hf=Qwen3Config.to_hf,
    gguf=GgufFormat(
        ("qwen3",),
        functools.partial(config_from_gguf, config_class=Qwen3Config),
        unpermuted_tensors_from_gguf,
    ),
)
