"""The weights of Phi-3-family models: Llama's, with q, k, v and gate, up stored as one tensor."""

from __future__ import annotations

from models.common.family import Family
from models.common.weights import LayerWeights, Weight
from models.llama.params import weights as llama_weights
from models.phi3.config import Phi3Config
from models.phi3.modeling import Phi3


def weights(config: Phi3Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    width, mlp = config.hidden_size, config.intermediate_size
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    qkv = [config.q_width + 2 * config.kv_width]
    fused = {
        weight.path: weight
        for weight in (
            layers.linear("qkv", ["self_attn.qkv_proj"], width=width, parts=qkv),
            layers.linear("gate_up", ["mlp.gate_up_proj"], width=width, parts=[2 * mlp]),
        )
    }
    return [fused.get(weight.path, weight) for weight in llama_weights(config)]


PHI3 = Family(
    name="phi3",
    config_class=Phi3Config,
    module_class=Phi3,
    weights=weights,
    config_from_hf=Phi3Config.from_hf,
    config_to_hf=Phi3Config.to_hf,
    hf_types=("phi3",),
)
