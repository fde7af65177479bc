"""The geometry of Mistral-family models."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.checkpoints.hf_config import HfConfig
from models.llama.config import LlamaConfig
from paged_jax.config import require

# What a missing entry means: the geometry of Mistral 7B.
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """The geometry of one model (the rest: ``LlamaConfig``).

    Attributes:
      sliding_window: keys that a query attends to, its own included; None: all.

    Raises:
      ValueError: the window is not positive.
    """

    sliding_window: int | None = None

    def __post_init__(self) -> None:
        window = self.sliding_window
        require(window is None or window >= 1, f"sliding_window={window} must be >= 1")
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Keys that a query attends to in each layer."""
        return (self.sliding_window,) * self.num_layers

    @classmethod
    def from_hf(cls, hf: HfConfig) -> MistralConfig:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        given = HfConfig(hf.path, _DEFAULTS | hf.values)
        window = given.values["sliding_window"]  # null: none
        return cls(**vars(LlamaConfig.from_hf(given)), sliding_window=window)

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return super().to_hf() | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": self.sliding_window,
        }
