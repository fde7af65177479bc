"""The geometry of Gemma 2 models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.checkpoints.hf_config import HfConfig
from models.common.config import DecoderConfig
from models.common.rope import LongRope, Scaling, rope_frequencies, rope_from_hf
from paged_jax.config import require

_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """The geometry of one model (sizes: ``DecoderConfig``).

    Attributes:
      query_pre_attn_scalar: scores are divided by its square root.
      layer_windows: keys that a query attends to in each layer, its own included; None: all; ():
        all in all layers.
      attn_soft_cap: bound of the scores, or None.
      final_soft_cap: bound of the logits, or None.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched, or None.
      rms_norm_eps: added to the mean square.

    Raises:
      ValueError: there is not one window a layer, the scalar or a cap is not positive, or
        ``rope_scaling`` is a ``LongRope``.
    """

    query_pre_attn_scalar: float = 256.0
    layer_windows: tuple[int | None, ...] = ()
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        windows = self.layer_windows
        require(
            len(windows) in (0, self.num_layers) and all(w is None or w >= 1 for w in windows),
            f"layer_windows={windows} must be {self.num_layers} sizes >= 1 or None",
        )
        for name in ("query_pre_attn_scalar", "attn_soft_cap", "final_soft_cap"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value} must be > 0")
        require(
            not isinstance(self.rope_scaling, LongRope),
            "rope_scaling must not be 'longrope': Gemma models have no attention factor",
        )
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Keys that a query attends to in each layer."""
        return self.layer_windows or (None,) * self.num_layers

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

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back.

        Raises:
          ValueError: the layers have windows of several sizes.
        """
        sizes = {size for size in self.windows if size is not None}
        require(len(sizes) <= 1, f"layer_windows={self.layer_windows} must have one size")
        return {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "query_pre_attn_scalar": self.query_pre_attn_scalar,
            "sliding_window": max(sizes, default=None),
            "layer_types": [_LAYER_KINDS[size is not None] for size in self.windows],
            "attn_logit_softcapping": self.attn_soft_cap,
            "final_logit_softcapping": self.final_soft_cap,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_hf(),
            "tie_word_embeddings": self.tie_embeddings,
        }


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
