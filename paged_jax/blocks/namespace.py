"""Whose keys and values a cached block holds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """What, besides the tokens, must be equal for a cached block to be shared.

    Each part is compared with the same part only, so a salt never passes for an adapter; None
    differs from the empty string.

    >>> Namespace(salt="a") == Namespace(adapter="a")
    False
    >>> Namespace(model="w1", salt="tenant 7") == Namespace(model="w1", salt="tenant 7")
    True

    Attributes:
      model: identity of the model's weights; new weights, new identity.
      adapter: identity of an adapter on top of them.
      salt: the user's own: who does not know it shares nothing with who does.

    Raises:
      ValueError: a part is neither a string nor None.
    """

    model: str | None = None
    adapter: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (value is None or isinstance(value, str)):
                raise ValueError(f"{field.name}={value!r} must be a string or None")
