"""The sizes that every decoder has, and what a configuration must be able to do."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from models.common.rope import rope_from_json
from paged_jax.config import ModelSpec, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The geometry of one model; families add what is theirs.

    Attributes:
      vocab_size: tokens (V).
      hidden_size: channels of the residual stream (C).
      intermediate_size: channels of the MLP (F).
      num_layers: L.
      num_heads: query heads (H).
      num_kv_heads: key/value heads (K).
      head_dim: channels a head (D), even.
      max_position: longest context in tokens.
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
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value!r} must be an integer >= 1")
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even")
        _ = self.spec  # ModelSpec checks the rest

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Keys that a query attends to in each layer, its own included; None: all."""
        return (None,) * self.num_layers

    @property
    def window(self) -> int | None:
        """Most keys that a query attends to in any layer; None: some layer sees everything."""
        sizes = [size for size in self.windows if size is not None]
        return max(sizes) if sizes and len(sizes) == self.num_layers else None

    @property
    def q_width(self) -> int:
        """Channels of all query heads (H * D)."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, or of all value heads (K * D)."""
        return self.num_kv_heads * self.head_dim

    @property
    def spec(self) -> ModelSpec:
        """What the cache, the pool and the scheduler need to know."""
        names = [field.name for field in dataclasses.fields(ModelSpec)]
        return ModelSpec(**{name: getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON-ready dicts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Rebuild the settings from ``to_json``'s dicts.

        Raises:
          ValueError: a name is missing or unknown, or a value is out of range.
        """
        try:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
            if "rope_scaling" in fields:
                fields["rope_scaling"] = rope_from_json(fields["rope_scaling"])
            defaults = [field.name for field in dataclasses.fields(cls) if field.name not in values]
            if defaults:
                raise TypeError(f"missing {', '.join(map(repr, defaults))}")
            return cls(**fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"values={values!r} must be a {cls.__name__}'s fields: {error}"
            ) from error
