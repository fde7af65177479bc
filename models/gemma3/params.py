"""The weights of Gemma 3 text models, alone or as part of an image-and-text model."""

import dataclasses

from models.common.family import Family, GgufFormat
from models.common.weights import LayerWeights, Weight
from models.gemma2.params import weights as gemma2_weights
from models.gemma3.config import Gemma3Config
from models.gemma3.gguf import config_from_gguf, tensors_from_gguf
from models.gemma3.modeling import Gemma3


def weights(config: Gemma3Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    norms = [
        layers.vector(f"{x}_norm.weight", f"self_attn.{x}_norm.weight", config.head_dim)
        for x in "qk"
    ]
    return [*gemma2_weights(config), *norms]


def image_text_weights(config: Gemma3Config) -> list[Weight]:
    """The same with the names that they have beside an image encoder."""
    return [
        dataclasses.replace(one, names=tuple(f"language_model.{name}" for name in one.names))
        for one in weights(config)
    ]


GEMMA3 = Family(
    name="gemma3",
    config_class=Gemma3Config,
    module_class=Gemma3,
    weights=weights,
    config_from_hf=Gemma3Config.from_hf,
    hf_types=("gemma3_text",),
    config_to_hf=Gemma3Config.to_hf,
    gguf=GgufFormat(("gemma3",), config_from_gguf, tensors_from_gguf),
)
GEMMA3_IMAGE_TEXT = dataclasses.replace(
    GEMMA3,
    name="gemma3_image_text",
    weights=image_text_weights,
    config_from_hf=Gemma3Config.from_image_text_hf,
    hf_types=("gemma3",),
    prefix="language_model.",
    ignored=(r"vision_tower\..*", r"multi_modal_projector\..*", r"language_model\.lm_head\.weight"),
    config_to_hf=None,
    gguf=None,
)
