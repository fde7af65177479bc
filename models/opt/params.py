"""The weights of OPT models."""

from __future__ import annotations

from models.common.family import Family
from models.common.weights import LayerWeights, Weight, table, vector
from models.opt.config import POSITION_OFFSET, OptConfig
from models.opt.modeling import Opt

_ROOT = "model.decoder."


def weights(config: OptConfig) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    width, mlp, narrow = config.hidden_size, config.intermediate_size, config.embedding_size
    layers = LayerWeights(config.num_layers, f"{_ROOT}layers.{{layer}}.")
    places = config.max_position + POSITION_OFFSET
    found = [
        table("embedding", f"{_ROOT}embed_tokens.weight", rows=config.vocab_size, width=narrow),
        table("positions", f"{_ROOT}embed_positions.weight", rows=places, width=width),
    ]
    for path, name in (("attn_norm", "self_attn_layer_norm"), ("mlp_norm", "final_layer_norm")):
        found += [
            layers.vector(f"{path}.{kind}", f"{name}.{kind}", width) for kind in ("weight", "bias")
        ]
    for path, names, size, out in (
        ("qkv", [f"self_attn.{x}_proj" for x in "qkv"], width, width),
        ("out", ["self_attn.out_proj"], width, width),
        ("up", ["fc1"], width, mlp),
        ("down", ["fc2"], mlp, width),
    ):
        parts = [out] * len(names)
        found += [
            layers.linear(path, names, width=size, parts=parts),
            layers.bias(path, names, parts=parts),
        ]
    if config.normalises_first:
        found += [
            vector(f"final_norm.{kind}", f"{_ROOT}final_layer_norm.{kind}", width)
            for kind in ("weight", "bias")
        ]
    if narrow != width:
        found += [
            _projection("project_in", narrow, width),
            _projection("project_out", width, narrow),
        ]
    if not config.tie_embeddings:
        found.append(table("head", "lm_head.weight", rows=config.vocab_size, width=narrow))
    return found


def _projection(name: str, width: int, out: int) -> Weight:
    return Weight(
        path=f"{name}.weight",
        shape=(width, out),
        names=(f"{_ROOT}{name}.weight",),
        is_transposed=True,
    )


OPT = Family(
    name="opt",
    config_class=OptConfig,
    module_class=Opt,
    weights=weights,
    config_from_hf=OptConfig.from_hf,
    config_to_hf=OptConfig.to_hf,
    hf_types=("opt",),
)
