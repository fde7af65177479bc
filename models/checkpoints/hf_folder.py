"""Reads Hugging Face folders: config.json, and the tensors of one or several safetensors files."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoints.hf_config import HfConfig

_INDEX = "model.safetensors.index.json"
# What weights become where nothing else is asked for; JAX has no float64 by default.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class HfFolder:
    """A folder as ``save_pretrained`` writes it.

    Args:
      path: the folder.

    Attributes:
      path: the folder.
      config: its settings.

    Raises:
      ValueError: there is no such folder, no safetensors file, a file of the index is missing or
        damaged, or the weights are pickled.
    """

    __slots__ = ("_files", "_prefix", "config", "path")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = HfConfig.read(self.path)
        self._files: dict[str, Path] = {}
        self._prefix = ""
        for file in self._weight_files():
            try:
                with safe_open(file, framework="numpy") as tensors:
                    names = list(tensors.keys())
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file}: expected a whole safetensors file: {error}") from error
            self._files.update(dict.fromkeys(names, file))

    def _weight_files(self) -> list[Path]:
        index = self.path / _INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index}: expected a weight_map: {error!r}") from error
            for name in names:
                # A name is a file of this folder, not a path out of it.
                if not isinstance(name, str) or Path(name).name != name:
                    raise ValueError(f"{index}: {name!r} must be the name of a file beside it")
                if not (self.path / name).is_file():
                    raise ValueError(f"{self.path / name}: named in {_INDEX}, but there is no file")
            return [self.path / name for name in names]
        files = sorted(self.path.glob("*.safetensors"))
        if files:
            return files
        pickled = sorted(file.name for pattern in _PICKLED for file in self.path.glob(pattern))
        if pickled:
            raise ValueError(
                f"{self.path / pickled[0]}: pickled weights can run code and are refused; convert "
                "them to safetensors (transformers' save_pretrained writes them)"
            )
        raise ValueError(f"{self.path}: expected *.safetensors, there is none")

    def strip(self, prefix: str) -> None:
        """Let names with ``prefix`` find tensors that were stored without it."""
        if not any(name.startswith(prefix) for name in self._files):
            self._prefix = prefix

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of all tensors in the files."""
        return list(self._files)

    def require_only(self, names: set[str], *, ignored: Sequence[str] = ()) -> None:
        """Refuse tensors that nothing would read.

        Args:
          names: of the tensors that will be read.
          ignored: regular expressions of others that may be there.

        Raises:
          ValueError: there are others.
        """
        known = {name.removeprefix(self._prefix) for name in names} | names
        others = sorted(
            name
            for name in self._files
            if name not in known and not any(re.fullmatch(pattern, name) for pattern in ignored)
        )
        if others:
            raise ValueError(
                f"{self._files[others[0]]}: tensor {others[0]!r}: expected no such tensor in a "
                f"model of config.json's sizes ({len(others)} unknown in all)"
            )

    @property
    def dtype(self) -> np.dtype:
        """The narrowest type that holds all tensors exactly (but for float64)."""
        found = set()
        for file in set(self._files.values()):
            with safe_open(file, framework="numpy") as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        known = [jnp.dtype(_DTYPES[name]) for name in sorted(found) if name in _DTYPES]
        return functools.reduce(jnp.promote_types, known) if known else jnp.dtype(jnp.float32)

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some rows of it, in its stored type.

        Args:
          name: the tensor's name, with the family's prefix.
          shape: the expected shape.
          rows: of its first axis.

        Raises:
          ValueError: it is missing, has another shape, or is of a type that is no float.
        """
        stored = name if name in self._files else name.removeprefix(self._prefix)
        file = self._files.get(stored)
        if file is None:
            raise ValueError(
                f"{self.path}: tensor {name!r}: expected shape {shape}, there is no such tensor"
            )
        where = f"{file}: tensor {stored!r}"
        # Opened anew: the library maps the file, and what was touched stays in memory until then.
        with safe_open(file, framework="numpy") as tensors:
            info = tensors.get_slice(stored)
            found = tuple(info.get_shape())
            if found != shape:
                raise ValueError(f"{where}: expected shape {shape}, found {found}")
            if info.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{where}: expected {', '.join(_DTYPES)}, found {info.get_dtype()}"
                )
            return info[rows]

    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by generation_config.json or else config.json."""
        path = self.path / "generation_config.json"
        found = None
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if found is None:
            found = self.config.get("eos_token_id")
        if found is None:
            return ()
        return (found,) if isinstance(found, int) else tuple(found)
