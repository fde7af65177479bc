"""The geometry of Gemma 3 text models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.checkpoints.hf_config import HfConfig
from models.common.rope import rope_frequencies, rope_from_hf
from models.gemma2.config import Gemma2Config, gemma_fields
from paged_jax.config import require

# Published image-and-text folders leave these out of text_config.
_SIZES = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The geometry of one model (the rest: ``Gemma2Config``).

    ``rope_theta`` and ``rope_scaling`` are those of the layers without a window.

    Attributes:
      local_rope_theta: base of the rotary frequencies in layers with a window.
    """

    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0

    @property
    def frequencies(self) -> np.ndarray:
        """Frequencies of layers without a window, then of those with one, float32 ``[D]``."""
        local = rope_frequencies(self.head_dim, theta=self.local_rope_theta)
        return np.concatenate([super().frequencies, local])

    @classmethod
    def from_hf(cls, hf: HfConfig) -> Gemma3Config:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        hf = HfConfig(hf.path, _SIZES | {k: v for k, v in hf.values.items() if v is not None})
        hf.expect("attn_logit_softcapping", None)
        period = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern", 6))
        fields = gemma_fields(hf, period=period)
        max_position = fields["max_position"]
        full, local = _rope_settings(hf)
        theta, scaling = rope_from_hf(full, theta=1_000_000.0, max_position=max_position)
        local_theta, stretched = rope_from_hf(local, theta=10_000.0, max_position=max_position)
        require(
            stretched is None,
            f"rope_parameters: sliding_attention={local!r} must have rope_type='default'",
        )
        return cls(
            **fields,
            final_soft_cap=hf.get("final_logit_softcapping"),
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=local_theta,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back.

        Raises:
          ValueError: as Gemma 2's.
        """
        return super().to_hf() | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "rope_local_base_freq": self.local_rope_theta,
        }

    @classmethod
    def from_image_text_hf(cls, hf: HfConfig) -> Gemma3Config:
        """Read the text part of an image-and-text model's settings.

        Raises:
          ValueError: likewise.
        """
        text = dict(hf.need("text_config"))
        # The outer entry rules; where both are missing, the output head is the embedding.
        text["tie_word_embeddings"] = hf.get(
            "tie_word_embeddings", text.get("tie_word_embeddings", True)
        )
        text_hf = HfConfig(hf.path, text)
        # Beside an image encoder transformers applies no such cap, and no published model has one.
        text_hf.expect("final_logit_softcapping", None)
        return cls.from_hf(text_hf)


def _rope_settings(hf: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary entries of layers without and with a window.

    transformers 5 writes ``rope_parameters`` for each kind of layer, its predecessors
    ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``.
    """
    by_kind = hf.get("rope_parameters", {})
    full = hf.get("rope_scaling", {}) | (by_kind.get("full_attention") or {})
    local = dict(by_kind.get("sliding_attention") or {})
    for settings, key in ((full, "rope_theta"), (local, "rope_local_base_freq")):
        if hf.get(key) is not None:
            settings.setdefault("rope_theta", hf.get(key))
    return full, local
