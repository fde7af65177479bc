"""The geometry of OPT models."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.checkpoints.hf_config import HfConfig
from models.common.config import DecoderConfig
from paged_jax.config import require

# Rows of the position table before that of position 0.
POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptConfig(DecoderConfig):
    """The geometry of one model (sizes: ``DecoderConfig``; K is H).

    Attributes:
      embedding_size: channels of the embedding; where it is not ``hidden_size``, projections stand
        between (OPT-350M).
      normalises_first: norms stand before attention and MLP, and one at the end; False: after the
        sums, none at the end (OPT-350M).
      layer_norm_eps: added to the variance.

    Raises:
      ValueError: the heads' widths do not add up to ``hidden_size``.
    """

    embedding_size: int
    normalises_first: bool = True
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require(
            self.q_width == self.kv_width == self.hidden_size,
            f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} * "
            f"head_dim={self.head_dim}, and num_kv_heads={self.num_kv_heads} be num_heads",
        )
        super().__post_init__()

    @classmethod
    def from_hf(cls, hf: HfConfig) -> OptConfig:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        hf.expect("activation_function", "relu")
        hf.expect("enable_bias", True)
        hf.expect("layer_norm_elementwise_affine", True)
        hf.expect("_remove_final_layer_norm", False)
        width, heads = hf.need("hidden_size"), hf.need("num_attention_heads")
        return cls(
            vocab_size=hf.need("vocab_size"),
            hidden_size=width,
            intermediate_size=hf.need("ffn_dim"),
            num_layers=hf.need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            max_position=hf.need("max_position_embeddings"),
            tie_embeddings=hf.get("tie_word_embeddings", True),
            embedding_size=hf.get("word_embed_proj_dim", width),
            normalises_first=hf.get("do_layer_norm_before", True),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_function": "relu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "word_embed_proj_dim": self.embedding_size,
            "ffn_dim": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_position,
            "do_layer_norm_before": self.normalises_first,
            "tie_word_embeddings": self.tie_embeddings,
        }

    @classmethod
    def opt_13b(cls) -> OptConfig:
        """OPT-13B (arXiv:2205.01068, table 1)."""
        return _large(num_layers=40, num_heads=40, hidden_size=5_120)

    @classmethod
    def opt_66b(cls) -> OptConfig:
        """OPT-66B (arXiv:2205.01068, table 1)."""
        return _large(num_layers=64, num_heads=72, hidden_size=9_216)

    @classmethod
    def opt_175b(cls) -> OptConfig:
        """OPT-175B (arXiv:2205.01068, table 1)."""
        return _large(num_layers=96, num_heads=96, hidden_size=12_288)


def _large(*, num_layers: int, num_heads: int, hidden_size: int) -> OptConfig:
    return OptConfig(
        vocab_size=50_272,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=2_048,
        tie_embeddings=True,
        embedding_size=hidden_size,
    )
