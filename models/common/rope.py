"""Rotary position embeddings (arXiv:2104.09864) and the ways to stretch them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paged_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (Hugging Face's ``rope_type: llama3``).

    A frequency that turns n times over the original context is kept for n >= high_freq_factor,
    divided by factor for n <= low_freq_factor, and interpolated between.

    Attributes:
      factor: low frequencies are divided by this.
      low_freq_factor: frequencies with fewer turns than this over the original context are low.
      high_freq_factor: those with more turns than this stay as they are.
      original_max_position: the context in tokens that the model was first trained with.
      kind: its name in JSON.

    Raises:
      ValueError: ``factor < 1``, or the bounds are not ``0 < low < high``.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    kind: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"factor={self.factor} must be >= 1")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor={self.low_freq_factor} must lie between 0 and "
            f"high_freq_factor={self.high_freq_factor}",
        )

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Stretch frequencies in radians a token."""
        turns = self.original_max_position * frequencies / (2 * np.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's entries."""
        return {
            "rope_type": self.kind,
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.original_max_position,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies divided alike (``rope_type: linear``).

    Attributes:
      factor: the divisor.
      kind: its name in JSON.

    Raises:
      ValueError: ``factor < 1``.
    """

    factor: float
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"factor={self.factor} must be >= 1")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Stretch frequencies in radians a token."""
        return frequencies / self.factor

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's entries."""
        return {"rope_type": self.kind, "factor": self.factor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """A divisor for each frequency: a list for long contexts, one for short (arXiv:2402.13753).

    Keys in the cache were rotated once and for all, so one list must serve a whole sequence: the
    long one where ``max_position`` is more than ``original_max_position``.

    Attributes:
      short_factors: divisors for contexts of up to ``original_max_position``.
      long_factors: divisors for longer ones.
      original_max_position: the context in tokens that the model was first trained with.
      max_position: the context in tokens that is served.
      attention_factor: on rotated queries and keys.
      kind: its name in JSON.

    Raises:
      ValueError: the lists are not equally long, or a divisor is not positive.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    max_position: int
    attention_factor: float
    kind: Literal["longrope"] = "longrope"

    def __post_init__(self) -> None:
        # JSON has lists.
        for name in ("short_factors", "long_factors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = len(self.short_factors), len(self.long_factors)
        require(
            sizes[0] == sizes[1] and min(*self.short_factors, *self.long_factors) > 0,
            f"short_factors and long_factors have {sizes} entries, must be as many, all > 0",
        )

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Stretch frequencies in radians a token.

        Raises:
          ValueError: there is not one divisor a frequency.
        """
        is_long = self.max_position > self.original_max_position
        factors = np.array(self.long_factors if is_long else self.short_factors)
        require(
            len(factors) == len(frequencies),
            f"long_factors and short_factors have {len(factors)} entries, must have "
            f"{len(frequencies)}, one a rotated pair of channels",
        )
        return frequencies / factors

    def to_hf(self) -> dict[str, Any]:
        """Return Hugging Face's entries."""
        return {
            "rope_type": self.kind,
            "short_factor": list(self.short_factors),
            "long_factor": list(self.long_factors),
            "attention_factor": self.attention_factor,
            "original_max_position_embeddings": self.original_max_position,
        }


Scaling = RopeScaling | LinearScaling | LongRope
_SCALINGS: dict[str, type[Scaling]] = {
    "llama3": RopeScaling,
    "linear": LinearScaling,
    "longrope": LongRope,
}


def rope_from_json(values: dict[str, Any] | None) -> Scaling | None:
    """Rebuild a scaling from its fields.

    Raises:
      KeyError: its kind is unknown.
      TypeError: a field is missing or unknown.
    """
    # Checkpoints that were written before there were several kinds name none.
    return None if values is None else _SCALINGS[values.get("kind", "llama3")](**values)


def rope_frequencies(head_dim: int, *, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Return the rotary frequencies in radians a token, float32 ``[D/2]``.

    Args:
      head_dim: channels that are rotated (D), even.
      theta: base: channel pair i turns by ``theta ** (-2 i / D)`` a token.
      scaling: how they are stretched.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = theta**-exponents
    return (frequencies if scaling is None else scaling.apply(frequencies)).astype(np.float32)


def angles_of(positions: Int[Array, "B T"], frequencies: np.ndarray) -> Float[Array, "B T D/2"]:
    """The angle of each channel pair at each position, in radians."""
    return positions[..., None].astype(jnp.float32) * frequencies


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T D/2"], sin: Float[Array, "B T D/2"]
) -> Float[Array, "B T H D"]:
    """Rotate channels (i, i + D/2) of every head by the angle of i, in float32.

    Where ``cos`` has fewer channels than D/2, only the first twice as many are rotated.
    """
    num_rotated = 2 * cos.shape[-1]
    turning, rest = x[..., :num_rotated].astype(jnp.float32), x[..., num_rotated:]
    first, second = jnp.split(turning, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rope_from_hf(
    settings: dict[str, Any], *, theta: float, max_position: int
) -> tuple[float, Scaling | None]:
    """Read the base and the scaling from Hugging Face's ``rope_parameters`` or ``rope_scaling``.

    Args:
      settings: its entries; {} where there are none.
      theta: the base where the settings have none.
      max_position: of the model in tokens.

    Raises:
      ValueError: a scaling that this library does not have.
    """
    theta = settings.get("rope_theta") or theta
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, LinearScaling(factor=settings["factor"])
        if kind in ("longrope", "su"):
            return theta, _long_rope(settings, max_position)
        if kind == "llama3":
            original = settings.get("original_max_position_embeddings", max_position)
            return theta, RopeScaling(
                factor=settings["factor"],
                low_freq_factor=settings["low_freq_factor"],
                high_freq_factor=settings["high_freq_factor"],
                original_max_position=original,
            )
    except KeyError as error:
        raise ValueError(f"rope_scaling={settings!r} must have the entry {error}") from error
    raise ValueError(f"rope_scaling={settings!r}: rope_type must be one of 'default', "
                     f"{', '.join(map(repr, _SCALINGS))}")  # fmt: skip


def _long_rope(settings: dict[str, Any], max_position: int) -> LongRope:
    original = settings["original_max_position_embeddings"]
    factor = settings.get("factor") or max_position / original
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1
    return LongRope(
        short_factors=tuple(settings["short_factor"]),
        long_factors=tuple(settings["long_factor"]),
        original_max_position=original,
        max_position=max_position,
        attention_factor=attention_factor,
    )
