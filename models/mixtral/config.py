"""The geometry of Mixtral-family models."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.checkpoints.hf_config import HfConfig
from models.mistral.config import MistralConfig
from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """The geometry of one model (the rest: ``MistralConfig``).

    Attributes:
      num_experts: MLPs of a layer (E).
      num_experts_per_token: of them for each token.

    Raises:
      ValueError: a token has more experts than there are, or none.
    """

    num_experts: int
    num_experts_per_token: int

    def __post_init__(self) -> None:
        require(
            1 <= self.num_experts_per_token <= self.num_experts,
            f"num_experts_per_token={self.num_experts_per_token} must lie in 1 to "
            f"num_experts={self.num_experts}",
        )
        super().__post_init__()

    @classmethod
    def from_hf(cls, hf: HfConfig) -> MixtralConfig:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        defaults = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
        return cls(
            **vars(MistralConfig.from_hf(HfConfig(hf.path, defaults | hf.values))),
            num_experts=hf.get("num_local_experts", 8),
            num_experts_per_token=hf.get("num_experts_per_tok", 2),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return super().to_hf() | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_token,
        }
