"""Converted checkpoints: an orbax checkpoint of the weights, with its settings beside it.

A checkpoint folder holds ``params/`` (orbax, one folder a tensor, uncompressed),
``manifest.json`` (source, format version, shape, type and CRC-32 of every tensor, size of every
file) and ``config.json``; the tokenizer's files stand beside them.

Orbax saves and restores whole trees. Here it lays out the tree, and the values go into and out of
its arrays' files a piece at a time; orbax alone restores the result too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from models.common.streaming import Block, num_rows
from models.common.weights import nested

FORMAT_VERSION = 1
REMEDY = "delete the folder, and it is converted again"

Tree = dict[str, Any]
Shapes = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """What the manifest says of a tensor.

    Attributes:
      shape: its shape.
      crc32: of its bytes in C order.
      dtype: its type's name.
    """

    shape: tuple[int, ...]
    crc32: int
    dtype: str = "float32"  # checkpoints that were written before there were others name none


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    # Orbax logs a warning about merging OCDBT files, although OCDBT is off. One folder a tensor
    # (no OCDBT) is what lets an error name the file.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


def _named(tree: Tree) -> list[tuple[str, Any]]:
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_shape)
    return [(".".join(key.key for key in path), leaf) for path, leaf in leaves]


def write_checkpoint(folder: Path, params: Tree, *, config: dict, source: dict) -> None:
    """Write weights, settings and manifest into an existing folder.

    Args:
      folder: where to.
      params: nested dicts of arrays.
      config: JSON settings, returned by ``read_config``.
      source: where the weights came from (for the manifest), with its sha256.
    """
    leaves = _named(params)
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves}
    blocks = (Block(name, np.asarray(leaf)) for name, leaf in leaves)
    write_blocks(folder, blocks, shapes, config=config, source=source)


def write_blocks(
    folder: Path,
    blocks: Iterable[Block],
    shapes: dict[str, tuple[int, ...]],
    *,
    config: dict,
    source: dict,
) -> None:
    """Write a checkpoint from parts of its weights, which never need to be in memory at once.

    Args:
      folder: an existing folder.
      blocks: of all weights, leaf after leaf.
      shapes: of the leaves, by path.
      config: JSON settings, returned by ``read_config``.
      source: where the weights came from (for the manifest), with its sha256.
    """
    with _checkpointer() as checkpointer:
        layout = nested([(path, np.zeros(1)) for path in shapes])
        checkpointer.save(folder / "params", args=ocp.args.PyTreeSave(layout))
    tensors = {
        path: dataclasses.asdict(_write_leaf(folder / "params" / path, shapes[path], group))
        for path, group in itertools.groupby(blocks, key=attrgetter("path"))
    }
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted((folder / "params").rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "source": source,
        "tensors": tensors,
        "files": files,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _write_leaf(folder: Path, shape: tuple[int, ...], blocks: Iterable[Block]) -> Stored:
    """Put the true array where orbax has a placeholder."""
    first, *others = itertools.islice(blocks, 1)
    dtype = first.values.dtype
    step = min(num_rows(shape, dtype.itemsize), shape[0])
    tensorstore.open(
        _spec(folder),
        create=True,
        delete_existing=True,
        dtype=dtype,
        shape=shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=(step, *shape[1:])),
    ).result()
    crc32 = 0
    for start, rows in _rows(itertools.chain([first], others, blocks), shape, step, dtype):
        content = np.ascontiguousarray(rows).view(np.uint8)
        with open(_chunk_file(folder, start // step, shape), "wb") as file:
            file.write(content)
            file.truncate(content.nbytes // len(rows) * step)  # all chunks have one size
        crc32 = zlib.crc32(content, crc32)
    return Stored(shape, crc32, dtype.name)


def _chunk_file(folder: Path, index: int, shape: tuple[int, ...]) -> Path:
    """The file of some rows. Chunks that are not compressed are the values themselves.

    Tensorstore's own reads and writes leave several chunks' worth of memory with its threads.
    """
    return folder / ".".join([str(index), *("0" for _ in shape[1:])])


def _rows(
    blocks: Iterable[Block], shape: tuple[int, ...], step: int, dtype: np.dtype
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks as rows of the first axis, ``step`` at a time, whatever their own sizes are."""
    pieces = (block.values.reshape(-1) for block in blocks)
    rest = np.empty(0, dtype)
    for start in range(0, shape[0], step):
        found = (min(step, shape[0] - start), *shape[1:])
        rest = rest if rest.size else next(pieces)
        if rest.size == math.prod(found):
            yield start, rest.reshape(found)
            rest = rest[:0]
            continue
        rows = np.empty(found, dtype)
        flat, done = rows.reshape(-1), 0
        while done < flat.size:
            rest = rest if rest.size else next(pieces)
            size = min(rest.size, flat.size - done)
            flat[done : done + size] = rest[:size]
            rest, done = rest[size:], done + size
        yield start, rows


def _spec(folder: Path) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {"compressor": None},
    }


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}; {REMEDY}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {value!r}; {REMEDY}")
    return value


def _read_manifest(folder: Path) -> tuple[dict[str, Stored], dict[str, int]]:
    """Return shape and CRC-32 of every tensor, and the size of every file."""
    path = folder / "manifest.json"
    manifest = _read_json(path)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version={version!r} must be {FORMAT_VERSION}; {REMEDY}")
    try:
        entries = manifest["tensors"].items()
        tensors = {
            name: Stored(**(entry | {"shape": tuple(entry["shape"])})) for name, entry in entries
        }
        return tensors, dict(manifest["files"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the tensors' shapes and CRC-32s, and the files' sizes: {error!r}; "
            f"{REMEDY}"
        ) from error


def _check_files(folder: Path, files: dict[str, int]) -> None:
    # Orbax finds this too, but some of its reads then end after their event loop is closed.
    for name, size in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else "no such file"
        if found != size:
            tensor = Path(name).parts[1]
            raise ValueError(
                f"{path}: tensor {tensor!r}: expected {size} bytes, found {found}; {REMEDY}"
            )


def read_config(folder: Path) -> dict:
    """Return the settings that were stored with the weights.

    Raises:
      ValueError: the file is missing or damaged.
    """
    return _read_json(folder / "config.json")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return what the manifest says of every tensor.

    Raises:
      ValueError: the manifest is missing or damaged.
    """
    return _read_manifest(folder)[0]


def read_params(folder: Path, shapes: Shapes) -> Tree:
    """Return the weights of a checkpoint folder as numpy arrays, checked.

    Args:
      folder: the checkpoint folder.
      shapes: nested dicts of the shapes that the model's settings call for.

    Raises:
      ValueError: as ``read_blocks``.
    """
    expected = dict(_named(shapes))
    leaves = []
    for path, group in itertools.groupby(read_blocks(folder, expected), key=attrgetter("path")):
        pieces = [block.values for block in group]
        leaves.append((path, np.concatenate(pieces).reshape(expected[path])))
    return nested(leaves)


def read_blocks(folder: Path, expected: dict[str, tuple[int, ...]]) -> Iterator[Block]:
    """Yield the weights of a checkpoint folder, some rows at a time, checked.

    What is damaged is known at the end of a leaf at the latest.

    Args:
      folder: the checkpoint folder.
      expected: the shapes that the model's settings call for, by path.

    Raises:
      ValueError: a tensor is missing, has another shape, cannot be read or is damaged; the
        message names the file, the tensor and what was expected.
    """
    stored, files = _read_manifest(folder)
    for name in sorted(expected.keys() | stored.keys()):
        want = expected.get(name, "no such tensor")
        found = stored[name].shape if name in stored else "no such tensor"
        if found != want:
            raise ValueError(f"{folder}: tensor {name!r}: expected {want}, found {found}; {REMEDY}")
    _check_files(folder, files)
    _check_layout(folder, expected)
    for name in expected:
        yield from _read_leaf(folder, name, stored[name])


def _read_leaf(folder: Path, name: str, stored: Stored) -> Iterator[Block]:
    where = f"{folder}/params/{name}: tensor {name!r}"
    crc32 = 0
    try:
        array = tensorstore.open(_spec(folder / "params" / name), open=True).result()
        found = Stored(tuple(array.shape), stored.crc32, array.dtype.name)
        if found == stored:
            for values in _read_rows(folder / "params" / name, array):
                crc32 = zlib.crc32(values.view(np.uint8), crc32)
                yield Block(name, values)
            found = dataclasses.replace(found, crc32=crc32)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: expected a readable array: {error}; {REMEDY}") from error
    if found != stored:
        raise ValueError(f"{where}: expected {stored}, with this CRC-32, found {found}; {REMEDY}")


def _read_rows(folder: Path, array: tensorstore.TensorStore) -> Iterator[np.ndarray]:
    """Some rows after others, from the files of an array that consist of whole rows."""
    shape, dtype = tuple(array.shape), array.dtype.numpy_dtype
    chunk, *others = [size or 0 for size in array.chunk_layout.read_chunk.shape or ()]
    if (*others,) != shape[1:]:
        raise ValueError(f"chunks {(chunk, *others)} must be whole rows of {shape}")
    row = math.prod(others)
    step = num_rows(shape, dtype.itemsize)
    for start in range(0, shape[0], chunk):
        path = _chunk_file(folder, start // chunk, shape)
        size = min(chunk, shape[0] - start)
        for first in range(0, size, step):
            count = min(step, size - first)
            offset = first * row * dtype.itemsize
            values = np.fromfile(path, dtype, count=count * row, offset=offset)
            yield values.reshape(count, *others)


def _check_layout(folder: Path, expected: dict[str, tuple[int, ...]]) -> None:
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.metadata(folder / "params").item_metadata.tree  # pyright: ignore
            found = {name for name, _ in _named(tree)}
        if found != expected.keys():
            raise ValueError(f"it holds {', '.join(sorted(found))}")
    except Exception as error:  # orbax raises many types for a damaged file
        raise ValueError(
            f"{folder}/params: tensor {', '.join(map(repr, expected))}: expected a readable "
            f"orbax checkpoint: {error}; {REMEDY}"
        ) from error
