"""The weights of Mistral-family models: Llama's names."""

from models.common.family import Family
from models.llama.params import weights
from models.mistral.config import MistralConfig
from models.mistral.modeling import Mistral

MISTRAL = Family(
    name="mistral",
    config_class=MistralConfig,
    module_class=Mistral,
    weights=weights,
    config_from_hf=MistralConfig.from_hf,
    hf_types=("mistral",),
    ignored=(r".*\.rotary_emb\.inv_freq",),
    config_to_hf=MistralConfig.to_hf,
)
