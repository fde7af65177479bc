"""What the engine needs to know of a model: one record, whatever made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from paged_jax.config import ModelSpec, require


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back; the bytes of single tokens are what streaming needs."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, which may be a part of a UTF-8 character."""
        ...


class ApplyFn(Protocol):
    """A model as a pure function (docs/design.md, section 4)."""

    def __call__(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: Any,
        /,
        *,
        logits_at: Int[Array, "B N"],
    ) -> tuple[Float[Array, "B N V"], Any]:
        """Run all layers; return the logits at ``logits_at`` and the cache with the new entries.

        Args:
          params: the model's weights, any pytree.
          tokens: token ids; padding may hold any id.
          positions: position of each token in its sequence.
          cache: a ``KVCache``; the model calls ``cache.attend`` once a layer.
          logits_at: for each row, the indices into T at which the output head runs.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model that the engine can serve.

    Attributes:
      apply: ``apply(params, tokens, positions, cache, *, logits_at) -> (logits, cache)``.
      params: the weights, any pytree.
      spec: the geometry that the pool and the scheduler need.
      tokenizer: or None, when requests bring token ids only.
      eos_token_ids: tokens that end a sequence.
      name: for logs and tables.

    Raises:
      ValueError: ``apply`` cannot be called, ``spec`` is no ``ModelSpec``, or an end token is
        outside the vocabulary.
    """

    apply: ApplyFn
    params: Any
    spec: ModelSpec
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = "model"

    def __post_init__(self) -> None:
        require(callable(self.apply), f"apply={self.apply!r} must be callable")
        require(isinstance(self.spec, ModelSpec), f"spec={self.spec!r} must be a ModelSpec")
        for token_id in self.eos_token_ids:
            require(
                0 <= token_id < self.spec.vocab_size,
                f"eos_token_ids={self.eos_token_ids!r} must lie in [0, {self.spec.vocab_size})",
            )
