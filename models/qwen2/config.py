"""The geometry of Qwen2-family models."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.checkpoints.hf_config import HfConfig
from models.llama.config import LlamaConfig
from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """The geometry of one model (the rest: ``LlamaConfig``).

    Attributes:
      layer_windows: keys that a query attends to in each layer, its own included; None: all; ():
        all in all layers.

    Raises:
      ValueError: there is not one window a layer.
    """

    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        windows = self.layer_windows
        require(
            len(windows) in (0, self.num_layers) and all(w is None or w >= 1 for w in windows),
            f"layer_windows={windows} must be {self.num_layers} sizes >= 1 or None",
        )
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Keys that a query attends to in each layer."""
        return self.layer_windows or (None,) * self.num_layers

    @classmethod
    def from_hf(cls, hf: HfConfig) -> Qwen2Config:
        """Read Hugging Face's settings.

        Raises:
          ValueError: an entry is missing, or asks for what this family does not have.
        """
        plain = LlamaConfig.from_hf(hf)
        return cls(**vars(plain), layer_windows=windows_from_hf(hf, plain.num_layers))

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's settings, which ``from_hf`` reads back.

        Raises:
          ValueError: the layers have windows of several sizes.
        """
        sizes = {size for size in self.windows if size is not None}
        require(len(sizes) <= 1, f"layer_windows={self.layer_windows} must have one size")
        kinds = ["sliding_attention" if size else "full_attention" for size in self.windows]
        return super().to_hf() | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": bool(sizes),
            "sliding_window": max(sizes, default=None),
            "max_window_layers": self.num_layers - sum(map(bool, self.windows)),
            "layer_types": kinds,
        }


def windows_from_hf(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen's layers: the first ``max_window_layers`` have none."""
    size = hf.get("sliding_window")
    if not hf.get("use_sliding_window", False) or size is None:
        return ()
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [
        "full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)
    ]
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)
