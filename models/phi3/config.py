"""The geometry of Phi-3-family models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.checkpoints.hf_config import HfConfig
from models.common.rope import LongRope, rope_frequencies, rope_from_hf
from models.mistral.config import MistralConfig
from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(MistralConfig):
    """The geometry of one model (the rest: ``MistralConfig``).

    Attributes:
      rotary_dim: channels of a head that are rotated, the first ones.

    Raises:
      ValueError: ``rotary_dim`` is odd or more than ``head_dim``.
    """

    rotary_dim: int

    def __post_init__(self) -> None:
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}",
        )
        super().__post_init__()

    @property
    def frequencies(self) -> np.ndarray:
        """Rotary frequencies in radians a token, float32 ``[rotary_dim/2]``."""
        return rope_frequencies(self.rotary_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @classmethod
    def from_hf(cls, hf: HfConfig) -> Phi3Config:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        sizes = hf.sizes()
        settings = hf.rope
        original = hf.get("original_max_position_embeddings", 4_096)
        settings.setdefault("original_max_position_embeddings", original)
        theta, scaling = rope_from_hf(settings, theta=10_000.0, max_position=sizes["max_position"])
        share = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        return cls(
            **sizes,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-5),
            tie_embeddings=hf.get("tie_word_embeddings", False),
            sliding_window=hf.get("sliding_window"),
            rotary_dim=int(sizes["head_dim"] * share),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        scaling = self.rope_scaling
        original = scaling.original_max_position if isinstance(scaling, LongRope) else None
        return super().to_hf() | {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "original_max_position_embeddings": original or self.max_position,
        }
