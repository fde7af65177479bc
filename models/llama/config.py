"""The geometry of Llama-family models."""

from __future__ import annotations

import dataclasses
from typing import Any

from paged_jax.config import ModelSpec, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (Hugging Face's ``rope_type: llama3``).

    Attributes:
      factor: low frequencies are divided by this.
      low_freq_factor: frequencies with fewer turns than this over the original context are low.
      high_freq_factor: those with more turns than this stay as they are.
      original_max_position: the context in tokens that the model was first trained with.

    Raises:
      ValueError: ``factor < 1``, or the bounds are not ``0 < low < high``.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"factor={self.factor} must be >= 1")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor={self.low_freq_factor} must lie between 0 and "
            f"high_freq_factor={self.high_freq_factor}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The geometry of one model.

    Attributes:
      vocab_size: tokens (V).
      hidden_size: channels of the residual stream (C).
      intermediate_size: channels of the MLP (F).
      num_layers: L.
      num_heads: query heads (H).
      num_kv_heads: key/value heads (K).
      head_dim: channels a head (D), even.
      max_position: longest context in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3's scaling, or None.
      rms_norm_eps: added to the mean square.
      tie_embeddings: the output head is the embedding.

    Raises:
      ValueError: a size is not positive, D is odd, or K does not divide H.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value!r} must be an integer >= 1")
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even")
        _ = self.spec  # ModelSpec checks the rest

    @property
    def spec(self) -> ModelSpec:
        """What the cache, the pool and the scheduler need to know."""
        names = {field.name for field in dataclasses.fields(ModelSpec)} - {"window"}
        return ModelSpec(**{name: getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON-ready dicts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LlamaConfig:
        """Rebuild the settings from ``to_json``'s dicts.

        Raises:
          ValueError: a name is missing or unknown, or a value is out of range.
        """
        try:
            scaling = values["rope_scaling"]
            scaling = None if scaling is None else RopeScaling(**scaling)
            fields: dict[str, Any] = values | {"rope_scaling": scaling}
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"values={values!r} must be a LlamaConfig's fields: {error}"
            ) from error

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
