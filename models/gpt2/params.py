"""The weights of GPT-2 models."""

from __future__ import annotations

from models.common.family import Family
from models.common.weights import LayerWeights, Weight, table, vector
from models.gpt2.config import Gpt2Config
from models.gpt2.modeling import Gpt2


def weights(config: Gpt2Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names; projections are ``[in, out]`` there too."""
    width, mlp = config.hidden_size, config.intermediate_size
    layers = LayerWeights(config.num_layers, "transformer.h.{layer}.")
    found = [
        table("embedding", "transformer.wte.weight", rows=config.vocab_size, width=width),
        table("positions", "transformer.wpe.weight", rows=config.max_position, width=width),
        vector("final_norm.weight", "transformer.ln_f.weight", width),
        vector("final_norm.bias", "transformer.ln_f.bias", width),
    ]
    for path, name in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
        found += [
            layers.vector(f"{path}.{kind}", f"{name}.{kind}", width) for kind in ("weight", "bias")
        ]
    for path, name, size, out in (
        ("qkv", "attn.c_attn", width, 3 * width),
        ("out", "attn.c_proj", width, width),
        ("up", "mlp.c_fc", width, mlp),
        ("down", "mlp.c_proj", mlp, width),
    ):
        found += [
            layers.linear(path, [name], width=size, parts=[out], is_transposed=False),
            layers.bias(path, [name], parts=[out]),
        ]
    if not config.tie_embeddings:
        found.append(table("head", "lm_head.weight", rows=config.vocab_size, width=width))
    return found


GPT2 = Family(
    name="gpt2",
    config_class=Gpt2Config,
    module_class=Gpt2,
    weights=weights,
    config_from_hf=Gpt2Config.from_hf,
    config_to_hf=Gpt2Config.to_hf,
    hf_types=("gpt2",),
    prefix="transformer.",
    # Masks, which old folders hold.
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
