"""What a training run is made of, frozen and validated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from paged_jax.config import require

ComputeDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything beside model and text that the weights depend on: a resumed run has the same.

    Attributes:
      num_steps: updates of the weights.
      batch_size: rows of an update.
      num_microbatches: parts in which a batch is computed; their gradients are added.
      seq_len: tokens that a row predicts (T).
      learning_rate: at the end of the warm-up.
      num_warmup_steps: updates over which it rises from zero.
      final_share: of the learning rate that the cosine ends with.
      weight_decay: AdamW's, on matrices only.
      beta1: decay of the gradients' mean.
      beta2: decay of their squares' mean.
      max_grad_norm: gradients with a larger global norm are scaled down to it.
      compute_dtype: of activations and products; weights, their gradients' sums and the optimizer
        are float32.
      recompute_scores: see ``UncachedAttention``.
      seed: of new weights and of the rows' order.

    Raises:
      ValueError: a value is out of range.
    """

    num_steps: int = 300
    batch_size: int = 16
    num_microbatches: int = 1
    seq_len: int = 128
    learning_rate: float = 3e-3
    num_warmup_steps: int = 50
    final_share: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    compute_dtype: ComputeDtype = "float32"
    recompute_scores: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_microbatches", "seq_len"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} must be an integer >= 1")
        require(
            self.batch_size % self.num_microbatches == 0,
            f"num_microbatches={self.num_microbatches} must divide batch_size={self.batch_size}",
        )
        require(
            0 <= self.num_warmup_steps < self.num_steps,
            f"num_warmup_steps={self.num_warmup_steps} must lie in [0, num_steps={self.num_steps})",
        )
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name}={value} must be a positive number")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name}={value} must lie in [0, 1)")
        require(0 <= self.final_share <= 1, f"final_share={self.final_share} must lie in [0, 1]")
        require(0 <= self.weight_decay < math.inf, f"weight_decay={self.weight_decay} must be >= 0")
        require(self.seed >= 0, f"seed={self.seed} must be >= 0")
        require(
            self.compute_dtype in ("float32", "bfloat16"),
            f"compute_dtype={self.compute_dtype!r} must be 'float32' or 'bfloat16'",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON-ready dict."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cadence:
    """What a run does beside training, in updates; the weights do not depend on it.

    Attributes:
      log_every: between two losses that are shown and written.
      eval_every: between two evaluations; the last update is always followed by one.
      save_every: between two checkpoints; the last update is always followed by one.
      max_to_keep: checkpoints, the newest ones.

    Raises:
      ValueError: a value is below 1.
    """

    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    max_to_keep: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(value >= 1, f"{field.name}={value} must be an integer >= 1")
