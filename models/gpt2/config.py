"""The geometry of GPT-2 models."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.checkpoints.hf_config import HfConfig
from models.common.config import DecoderConfig
from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Config(DecoderConfig):
    """The geometry of one model (sizes: ``DecoderConfig``; K is H).

    Attributes:
      layer_norm_eps: added to the variance.

    Raises:
      ValueError: the heads' widths do not add up to ``hidden_size``.
    """

    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require(
            self.q_width == self.kv_width == self.hidden_size,
            f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} * "
            f"head_dim={self.head_dim}, and num_kv_heads={self.num_kv_heads} be num_heads",
        )
        super().__post_init__()

    @classmethod
    def from_hf(cls, hf: HfConfig) -> Gpt2Config:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        hf.expect("activation_function", "gelu_new")
        for key in (
            "add_cross_attention",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
        ):
            hf.expect(key, False)
        hf.expect("scale_attn_weights", True)
        width, heads = hf.need("n_embd"), hf.need("n_head")
        return cls(
            vocab_size=hf.need("vocab_size"),
            hidden_size=width,
            intermediate_size=hf.get("n_inner", 4 * width),
            num_layers=hf.need("n_layer"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            max_position=hf.need("n_positions"),
            tie_embeddings=hf.get("tie_word_embeddings", True),
            layer_norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "vocab_size": self.vocab_size,
            "n_embd": self.hidden_size,
            "n_inner": self.intermediate_size,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_positions": self.max_position,
            "layer_norm_epsilon": self.layer_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
        }

    @classmethod
    def small(cls, **changes: Any) -> Gpt2Config:
        """GPT-2 with 124 million weights (huggingface.co/openai-community/gpt2, config.json)."""
        config = cls(
            vocab_size=50_257,
            hidden_size=768,
            intermediate_size=3_072,
            num_layers=12,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            max_position=1_024,
            tie_embeddings=True,
        )
        return dataclasses.replace(config, **changes)
