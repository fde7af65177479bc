"""Writes safetensors files tensor by tensor; the library's writer holds a whole file, twice."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    *,
    max_shard_bytes: int,
) -> None:
    """Write ``model.safetensors``, or several files and their index.

    Args:
      folder: where to.
      tensors: names and values, in the order of ``shapes``; a tensor may come in pieces.
      shapes: of all tensors.
      dtype: of all tensors: float32, bfloat16 or float16.
      max_shard_bytes: of one file, unless a single tensor is larger.
    """
    shards: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if not shards or size > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = shape
        room -= size
    pieces = iter(tensors)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        _write_shard(folder / file, pieces, shard, dtype)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(map(math.prod, shapes.values())) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_shard(
    path: Path,
    pieces: Iterator[tuple[str, np.ndarray]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [start, end]
        header[name] = {"dtype": _NAMES[dtype.name], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, shape in shapes.items():
            missing = math.prod(shape)
            while missing > 0:
                name, values = next(pieces)
                assert name == expected, (name, expected)
                file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
                missing -= values.size
