"""The geometry of Llama-family models."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np

from models.checkpoints.hf_config import HfConfig
from models.common.config import DecoderConfig
from models.common.rope import LongRope, RopeScaling, Scaling, rope_frequencies, rope_from_hf
from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The geometry of one model (sizes: ``DecoderConfig``).

    Attributes:
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched, or None.
      rms_norm_eps: added to the mean square.

    Raises:
      ValueError: a ``LongRope`` is of another ``max_position``, or has not one divisor a frequency.
    """

    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        scaling = self.rope_scaling
        require(
            not isinstance(scaling, LongRope) or scaling.max_position == self.max_position,
            f"max_position={self.max_position} must be that of {scaling}; with_max_position "
            "changes both",
        )
        _ = self.frequencies  # a scaling's divisors must fit

    @property
    def frequencies(self) -> np.ndarray:
        """Rotary frequencies in radians a token, float32 ``[D/2]``."""
        return rope_frequencies(self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def rotation_scale(self) -> float:
        """Factor on rotated queries and keys."""
        scaling = self.rope_scaling
        return scaling.attention_factor if isinstance(scaling, LongRope) else 1.0

    def with_max_position(self, max_position: int) -> Self:
        """Return the settings that serve contexts of at most so many tokens with the same weights.

        A ``LongRope`` has its short divisors where its ``original_max_position`` is enough.

        Args:
          max_position: longest context in tokens.
        """
        scaling = self.rope_scaling
        if isinstance(scaling, LongRope):
            scaling = dataclasses.replace(scaling, max_position=max_position)
        return dataclasses.replace(self, max_position=max_position, rope_scaling=scaling)

    @classmethod
    def from_hf(cls, hf: HfConfig) -> LlamaConfig:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        hf.expect("mlp_bias", False)
        sizes = hf.sizes()
        theta, scaling = rope_from_hf(hf.rope, theta=10_000.0, max_position=sizes["max_position"])
        return cls(
            **sizes,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_embeddings=hf.get("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_hf(),
            "tie_word_embeddings": self.tie_embeddings,
        }

    @classmethod
    def smollm2_135m(cls) -> LlamaConfig:
        """SmolLM2-135M (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, config.json)."""
        return cls(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1_536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_position=8_192,
            rope_theta=100_000.0,
            tie_embeddings=True,
        )

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        """Llama 3 8B (arXiv:2407.21783, table 3)."""
        return cls(
            vocab_size=128_256,
            hidden_size=4_096,
            intermediate_size=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position=8_192,
            rope_theta=500_000.0,
        )

    @classmethod
    def llama3_1_8b(cls) -> LlamaConfig:
        """Llama 3.1 8B: Llama 3 8B with scaled rotary frequencies and 131072 positions."""
        scaling = RopeScaling(factor=8.0)
        return dataclasses.replace(cls.llama3_8b(), max_position=131_072, rope_scaling=scaling)

    @classmethod
    def tiny(cls, **changes: Any) -> LlamaConfig:
        """A model for tests: two layers, grouped queries, tied embeddings."""
        config = cls(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position=128,
            tie_embeddings=True,
        )
        return dataclasses.replace(config, **changes)
