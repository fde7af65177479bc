"""The weights of Mixtral-family models."""

from __future__ import annotations

from models.common.family import Family
from models.common.weights import LayerWeights, Weight
from models.llama.params import weights as llama_weights
from models.mixtral.config import MixtralConfig
from models.mixtral.modeling import Mixtral

_MOE = "block_sparse_moe"


def weights(config: MixtralConfig) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    width, mlp = config.hidden_size, config.intermediate_size
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    found = [
        weight
        for weight in llama_weights(config)
        if weight.path not in ("layers.gate_up.weight", "layers.down.weight")
    ]
    router = layers.linear(
        "experts.router", [f"{_MOE}.gate"], width=width, parts=[config.num_experts]
    )
    return [
        *found,
        router,
        _experts(config, "gate_up", ["w1", "w3"], width=width, parts=(mlp, mlp)),
        _experts(config, "down", ["w2"], width=mlp, parts=(width,)),
    ]


def _experts(
    config: MixtralConfig, path: str, names: list[str], *, width: int, parts: tuple[int, ...]
) -> Weight:
    prefix = f"model.layers.{{layer}}.{_MOE}.experts.{{expert}}."
    return Weight(
        path=f"layers.experts.{path}",
        shape=(width, sum(parts)),
        names=tuple(f"{prefix}{name}.weight" for name in names),
        parts=parts,
        is_transposed=True,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
    )


MIXTRAL = Family(
    name="mixtral",
    config_class=MixtralConfig,
    module_class=Mixtral,
    weights=weights,
    config_from_hf=MixtralConfig.from_hf,
    config_to_hf=MixtralConfig.to_hf,
    hf_types=("mixtral",),
)
