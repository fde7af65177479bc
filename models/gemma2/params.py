"""The weights of Gemma 2 models."""

from models.common.family import Family
from models.common.weights import LayerWeights, Weight, table, vector
from models.gemma2.config import Gemma2Config
from models.gemma2.modeling import Gemma2

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def weights(config: Gemma2Config) -> list[Weight]:
    """The table of weights, with Hugging Face's names."""
    width, mlp = config.hidden_size, config.intermediate_size
    qkv = (config.q_width, config.kv_width, config.kv_width)
    layers = LayerWeights(config.num_layers, "model.layers.{layer}.")
    found = [
        table("embedding", "model.embed_tokens.weight", rows=config.vocab_size, width=width),
        *(
            layers.vector(f"{path}.weight", f"{name}.weight", width)
            for path, name in _NORMS.items()
        ),
        layers.linear("qkv", [f"self_attn.{x}_proj" for x in "qkv"], width=width, parts=qkv),
        layers.linear("out", ["self_attn.o_proj"], width=config.q_width, parts=[width]),
        layers.linear("gate_up", ["mlp.gate_proj", "mlp.up_proj"], width=width, parts=[mlp, mlp]),
        layers.linear("down", ["mlp.down_proj"], width=mlp, parts=[width]),
        vector("final_norm.weight", "model.norm.weight", width),
    ]
    if not config.tie_embeddings:
        found.append(table("head", "lm_head.weight", rows=config.vocab_size, width=width))
    return found


GEMMA2 = Family(
    name="gemma2",
    config_class=Gemma2Config,
    module_class=Gemma2,
    weights=weights,
    config_from_hf=Gemma2Config.from_hf,
    hf_types=("gemma2",),
    config_to_hf=Gemma2Config.to_hf,
)
