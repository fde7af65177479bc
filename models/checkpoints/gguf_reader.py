"""Reads GGUF files: metadata and tensors, with errors that say what is wrong where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np


class GgufFile:
    """One GGUF file, opened and checked.

    Args:
      path: the file.

    Attributes:
      path: the file.
      architecture: the value of ``general.architecture``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no GGUF file, or it is truncated or damaged.
    """

    __slots__ = ("_reader", "_tensors", "architecture", "path")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Imported on use: a converted checkpoint loads where the gguf package is missing.
        from models.checkpoints.gguf_checked import CheckedReader

        self.path = Path(path)
        try:
            self._reader = CheckedReader(self.path)
        except OSError:
            raise
        except Exception as error:  # the library raises whatever a damaged file leads to
            raise ValueError(
                f"{self.path}: expected a whole GGUF file, but reading it failed: {error}"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture: str = self.metadata("general.architecture")

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors, in the file's order."""
        return list(self._tensors)

    def has(self, key: str) -> bool:
        """Say whether the metadata hold ``key``."""
        return key in self._reader.fields

    def metadata(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key.

        Args:
          key: for example ``llama.block_count``.
          default: what a missing key means; None makes it an error.

        Raises:
          ValueError: the key is missing and there is no default, or its value is unreadable.
        """
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ValueError(f"{self.path}: expected the metadata key {key!r}, it is missing")
            return default
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: metadata key {key!r} must be UTF-8: {error}") from error

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some rows of it, dequantised to float32.

        Args:
          name: the tensor's name in the file.
          shape: the expected shape, in numpy's order (the reverse of the file's).
          rows: of its first axis.

        Raises:
          ValueError: it is missing, has another shape, a type that cannot be dequantised, or
            holds NaN or infinity.
        """
        from models.checkpoints.gguf_checked import dequantize

        where = f"{self.path}: tensor {name!r}"
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{where}: expected shape {shape}, the file has no such tensor")
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise ValueError(f"{where}: expected shape {shape}, found {found}")
        # The library maps the whole file, and what was touched stays in memory.
        start, stop, _ = rows.indices(shape[0])
        row_bytes = int(tensor.n_bytes) // shape[0]
        raw = np.fromfile(
            self.path,
            dtype=tensor.data.dtype,
            count=(stop - start) * row_bytes // tensor.data.dtype.itemsize,
            offset=int(tensor.data_offset) + start * row_bytes,
        )
        try:
            data = raw.reshape(stop - start, *tensor.data.shape[1:])
            values = dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{where}: expected a type that the gguf package can dequantise, "
                f"found {tensor.tensor_type.name}"
            ) from error
        values = np.asarray(values, dtype=np.float32).reshape(stop - start, *shape[1:])
        if not np.isfinite(values).all():
            raise ValueError(f"{where}: expected finite numbers, found NaN or infinity (damaged?)")
        return values


def unpermute_rows(weight: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row permutation of a q or k projection.

    llama.cpp rotates neighbouring channels (0, 1), (2, 3), ...; Hugging Face rotates channel i
    with i + D/2. Its converter therefore stores each head's rows interleaved.

    Args:
      weight: ``[num_heads * D, C]`` as in the file.
      num_heads: query heads for q, key/value heads for k.

    Returns:
      The same rows in Hugging Face's order: the first halves of all pairs, then the second.

    >>> unpermute_rows(np.arange(4)[:, None], num_heads=1).ravel()
    array([0, 2, 1, 3])
    """
    rows, *rest = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(weight.shape)
