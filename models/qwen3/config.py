"""The geometry of Qwen3-family models."""

from __future__ import annotations

from typing import Any

from models.qwen2.config import Qwen2Config


class Qwen3Config(Qwen2Config):
    """The geometry of one model: the sizes are Qwen2's, ``head_dim`` is stated by itself."""

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back."""
        return super().to_hf() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
