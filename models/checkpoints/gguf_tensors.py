"""The tensors of GGUF files by Hugging Face's names, so that one table of weights serves both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from models.checkpoints.gguf_reader import GgufFile, unpermute_rows

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class GgufTensors:
    """A ``TensorSource`` over a GGUF file.

    Args:
      file: the file.
      names: of modules, from Hugging Face's to llama.cpp's, without ``model.layers.N`` and
        ``blk.N``, for example ``{"self_attn.q_proj": "attn_q"}``.
      interleaved: heads of the modules (llama.cpp's names) whose rows ``unpermute_rows`` sorts.
      less_one: modules (llama.cpp's names) whose weights the file holds with one added, as it does
        Gemma's norms.
      ignored: tensors of the file that are no weights.
    """

    __slots__ = ("_file", "_interleaved", "_less_one", "_names", "ignored")

    def __init__(
        self,
        file: GgufFile,
        names: Mapping[str, str],
        *,
        interleaved: Mapping[str, int] | None = None,
        less_one: Sequence[str] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        self._file = file
        self._names = names
        self._interleaved = interleaved or {}
        self._less_one = less_one
        self.ignored = ignored

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of the tensors, as in the file."""
        return self._file.tensor_names

    def stored_name(self, name: str) -> str:
        """Return llama.cpp's name of one of Hugging Face's tensors."""
        module, kind = name.rsplit(".", 1)
        found = _LAYER.fullmatch(module)
        if found:
            return f"blk.{found[1]}.{self._names[found[2]]}.{kind}"
        return f"{self._names[module.removeprefix('model.')]}.{kind}"

    def require_only(self, names: set[str], *, family: str) -> None:
        """Refuse tensors that nothing would read.

        Args:
          names: of the tensors that will be read, Hugging Face's.
          family: for the message.

        Raises:
          ValueError: there are others.
        """
        known = {self.stored_name(name) for name in names} | {*self.ignored}
        left_over = sorted(set(self.tensor_names) - known)
        if left_over:
            raise ValueError(
                f"{self.path}: tensor {left_over[0]!r}: expected no such tensor in a {family} "
                f"model of the file's sizes ({len(left_over)} unknown in all)"
            )

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> np.ndarray:
        """Return some rows of a tensor, in float32.

        Raises:
          ValueError: as ``GgufFile.tensor``.
        """
        stored = self.stored_name(name)
        module = stored.split(".")[-2]
        if module not in self._interleaved:
            values = self._file.tensor(stored, shape, rows)
            return values - 1 if module in self._less_one else values
        # Rows change places within a head only, so whole heads are read.
        size = shape[0] // self._interleaved[module]
        start, stop, _ = rows.indices(shape[0])
        first, last = start // size, -(-stop // size)
        heads = self._file.tensor(stored, shape, slice(first * size, last * size))
        sorted_rows = unpermute_rows(heads, num_heads=last - first)
        return sorted_rows[start - first * size : stop - first * size]
