"""A Hugging Face config.json, with errors that name the file and the entry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class HfConfig:
    """The settings of a model in Hugging Face's names.

    Args:
      path: the file, for messages.
      values: its content.
    """

    __slots__ = ("path", "values")

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> HfConfig:
        """Read a folder's ``config.json``.

        Raises:
          ValueError: it is missing, or no JSON object.
        """
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: expected a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(path, values)

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the architecture, '' where there is none."""
        return str(self.values.get("model_type", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry; null counts as missing."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return an entry that must be there.

        Raises:
          ValueError: it is missing.
        """
        value = self.values.get(key)
        if value is None:
            raise ValueError(f"{self.path}: expected the entry {key!r}, it is missing")
        return value

    def need_size(self, key: str, default: int | None = None) -> int:
        """Return an entry that is a whole number.

        Args:
          key: the entry.
          default: what a missing entry means; None: it must be there.

        Raises:
          ValueError: it is missing, or something else.
        """
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.path}: {key}={value!r} must be an integer")
        return value

    def expect(self, key: str, expected: Any, *, default: Any = None) -> None:
        """Refuse what the family does not have.

        Args:
          key: the entry.
          expected: the only value that is served.
          default: what a missing entry means; None: the expected value.

        Raises:
          ValueError: another value.
        """
        found = self.get(key, expected if default is None else default)
        if found != expected:
            raise ValueError(f"{self.path}: {key}={found!r} must be {expected!r}")

    @property
    def rope(self) -> dict[str, Any]:
        """Entries of the rotary embedding: ``rope_parameters``, or ``rope_scaling``."""
        merged = dict(self.get("rope_scaling", {}))
        merged.update(self.get("rope_parameters", {}))
        if "rope_theta" in self.values:
            merged.setdefault("rope_theta", self.values["rope_theta"])
        return merged

    def sizes(self) -> dict[str, Any]:
        """The fields of ``DecoderConfig``, where they have the names that most families use.

        Raises:
          ValueError: one is missing, or no integer.
        """
        hidden_size = self.need_size("hidden_size")
        num_heads = self.need_size("num_attention_heads")
        return {
            "vocab_size": self.need_size("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.need_size("intermediate_size"),
            "num_layers": self.need_size("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": self.need_size("num_key_value_heads", num_heads),
            "head_dim": self.need_size("head_dim", hidden_size // max(num_heads, 1)),
            "max_position": self.need_size("max_position_embeddings"),
        }
