"""Weights on their way between files and devices, a part of a leaf at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from models.common.weights import TensorSource, Tree, Weight, nested

# Rows of a tensor are read in pieces of at most this size.
PIECE_BYTES = 16 * 2**20
# Where XLA on CPU uses host memory as it is: a copy would need the largest leaf twice.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of one leaf; the blocks of a leaf follow one another in C order, without gaps.

    Attributes:
      path: of the leaf.
      values: whole rows of its first axis, or one index of its stacked axes.
    """

    path: str
    values: np.ndarray


def num_rows(shape: Sequence[int], itemsize: int) -> int:
    """Rows of the first axis that fit in ``PIECE_BYTES``, at least one."""
    return max(1, PIECE_BYTES // max(1, math.prod(shape[1:]) * itemsize))


def read_blocks(source: TensorSource, weights: Sequence[Weight], dtype: Any) -> Iterator[Block]:
    """Yield all weights from named tensors, a layer or some rows of a table at a time.

    Args:
      source: what holds the tensors.
      weights: the table.
      dtype: of the blocks.

    Raises:
      ValueError: a tensor is missing or has another shape.
    """
    for weight in weights:
        if weight.is_table:
            (name,) = weight.names
            for rows in _pieces(weight.shape):
                piece = source.tensor(name, weight.shape, rows)
                yield Block(weight.path, piece.astype(dtype, copy=False))
            continue
        for index in weight.indices():
            values = np.empty(weight.shape, dtype)
            for name, shape, where in weight.tensors_at(index):
                part = values[where].T if weight.is_transposed else values[where]
                for rows in _pieces(shape):
                    part[rows] = source.tensor(name, shape, rows)
            yield Block(weight.path, values)


def _pieces(shape: Sequence[int]) -> Iterator[slice]:
    step = num_rows(shape, itemsize=4)
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def blocks_of(params: Tree, weights: Sequence[Weight]) -> Iterator[Block]:
    """Yield parameters that are in memory.

    Args:
      params: nested dicts of arrays.
      weights: the table.
    """
    for weight in weights:
        leaf: Any = params
        for key in weight.path.split("."):
            leaf = leaf[key]
        yield Block(weight.path, np.asarray(leaf))


def split_blocks(
    blocks: Iterable[Block], weights: Sequence[Weight]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that weights are made of: what ``read_blocks`` does, backwards.

    Args:
      blocks: of the weights.
      weights: the table.

    Yields:
      Name and value; tensors of several pieces come piece by piece, in C order.
    """
    by_path = {weight.path: weight for weight in weights}
    for path, group in itertools.groupby(blocks, key=attrgetter("path")):
        weight = by_path[path]
        if weight.is_table:
            yield from ((weight.names[0], block.values) for block in group)
            continue
        parts = itertools.chain.from_iterable(_parts(group, weight))
        for index, values in zip(weight.indices(), parts, strict=True):
            for name, _, where in weight.tensors_at(index):
                tensor = values[where]
                yield name, np.ascontiguousarray(tensor.T if weight.is_transposed else tensor)


def _parts(blocks: Iterable[Block], weight: Weight) -> Iterator[np.ndarray]:
    if not weight.stacked_axes:  # rows alone cannot be transposed
        blocks = [Block(weight.path, np.concatenate([block.values for block in blocks]))]
    return (block.values.reshape(-1, *weight.shape) for block in blocks)


def place(blocks: Iterable[Block], shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> Tree:
    """Return weights on the device, each put there as soon as it is whole.

    Args:
      blocks: of all weights, leaf after leaf.
      shapes: of the leaves, by path.
      dtype: of the leaves.
    """
    leaves = []
    for path, group in itertools.groupby(blocks, key=attrgetter("path")):
        leaf = _aligned(shapes[path], dtype)
        flat, done = leaf.reshape(-1), 0
        for block in group:
            size = block.values.size
            flat[done : done + size] = block.values.reshape(-1)
            done += size
        leaves.append((path, jax.block_until_ready(jax.device_put(leaf))))
    return nested(leaves)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
