"""The geometry of Gemma 2 models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.checkpoints.hf_config import HfConfig
from models.common.config import DecoderConfig
from models.common.rope import Scaling, rope_frequencies, rope_from_hf
from paged_jax.config import require

_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """The geometry of one model (sizes: ``DecoderConfig``).

    Attributes:
      query_pre_attn_scalar: scores are divided by its square root.
      layer_windows: keys that a query attends to in each layer, its own included; None: all.
      attn_soft_cap: bound of the scores, or None.
      final_soft_cap: bound of the logits, or None.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched, or None.
      rms_norm_eps: added to the mean square.

    Raises:
      ValueError: there is not one window a layer, or the scalar or a cap is not positive.
    """

    query_pre_attn_scalar: float
    layer_windows: tuple[int | None, ...]
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        windows = self.layer_windows
        require(
            len(windows) == self.num_layers and all(w is None or w >= 1 for w in windows),
            f"layer_windows={windows} must be {self.num_layers} sizes >= 1 or None",
        )
        for name in ("query_pre_attn_scalar", "attn_soft_cap", "final_soft_cap"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value} must be > 0")
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Keys that a query attends to in each layer."""
        return self.layer_windows

    @property
    def frequencies(self) -> np.ndarray:
        """Rotary frequencies in radians a token, float32 ``[D/2]``."""
        return rope_frequencies(self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    @classmethod
    def from_hf(cls, hf: HfConfig) -> Gemma2Config:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        fields = gemma_fields(hf, period=2)
        theta, scaling = rope_from_hf(hf.rope, theta=10_000.0, max_position=fields["max_position"])
        return cls(
            **fields,
            attn_soft_cap=_cap(hf, "attn_logit_softcapping", 50.0),
            final_soft_cap=_cap(hf, "final_logit_softcapping", 30.0),
            rope_theta=theta,
            rope_scaling=scaling,
        )


def gemma_fields(hf: HfConfig, *, period: int) -> dict[str, Any]:
    """The fields that all Gemma generations read alike.

    Args:
      hf: the settings.
      period: each layer of this number has no window, where the layers' kinds are not listed.

    Raises:
      ValueError: an entry is missing, or asks for what no Gemma has.
    """
    hf.expect("hidden_activation", "gelu_pytorch_tanh")
    hf.expect("attention_bias", False)
    hf.expect("use_bidirectional_attention", False)
    sizes = hf.sizes() | {"head_dim": hf.get("head_dim", 256)}
    num_layers = sizes["num_layers"]
    kinds = hf.get("layer_types") or [
        _LAYER_KINDS[(layer + 1) % period > 0] for layer in range(num_layers)
    ]
    unknown = sorted(set(kinds) - set(_LAYER_KINDS))
    require(not unknown, f"layer_types has {unknown}, must be of {_LAYER_KINDS}")
    window = hf.get("sliding_window", 4_096)
    return sizes | {
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "tie_embeddings": hf.get("tie_word_embeddings", True),
    }


def _cap(hf: HfConfig, key: str, default: float) -> float | None:
    """A soft cap: null means none, a missing entry the default."""
    return hf.values.get(key, default)
