"""Converted checkpoints: an orbax checkpoint of the weights, with its settings beside it.

A checkpoint folder holds ``params/`` (orbax, one folder a tensor, uncompressed),
``manifest.json`` (source, format version, shape and CRC-32 of every tensor, size of every file)
and ``config.json``; the tokenizer's files stand beside them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

FORMAT_VERSION = 1
REMEDY = "delete the folder, and it is converted again"

Tree = dict[str, Any]
Shapes = dict[str, Any]
Stored = tuple[tuple[int, ...], int]  # shape and CRC-32 of a tensor


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
      params: nested dicts of numpy arrays.
      config: JSON settings, returned by ``read_config``.
      source: where the weights came from (for the manifest), with its sha256.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / "params", args=ocp.args.PyTreeSave(params))
    tensors = {
        name: {"shape": list(leaf.shape), "crc32": zlib.crc32(np.ascontiguousarray(leaf))}
        for name, leaf in _named(params)
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
        tensors = {name: (tuple(entry["shape"]), entry["crc32"]) for name, entry in entries}
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


def read_params(folder: Path, shapes: Shapes) -> Tree:
    """Return the weights of a checkpoint folder as numpy arrays, checked.

    Args:
      folder: the checkpoint folder.
      shapes: nested dicts of the shapes that the model's settings call for.

    Raises:
      ValueError: a tensor is missing, has another shape, cannot be read or is damaged; the
        message names the file, the tensor and what was expected.
    """
    stored, files = _read_manifest(folder)
    expected = dict(_named(shapes))
    for name in sorted(expected.keys() | stored.keys()):
        want = expected.get(name, "no such tensor")
        found = stored[name][0] if name in stored else "no such tensor"
        if found != want:
            raise ValueError(f"{folder}: tensor {name!r}: expected {want}, found {found}; {REMEDY}")
    _check_files(folder, files)
    params = _restore(folder, shapes)
    for name, leaf in _named(params):
        want, found = stored[name], (leaf.shape, zlib.crc32(leaf))
        if found != want:
            raise ValueError(
                f"{folder}/params/{name}: tensor {name!r}: expected shape and CRC-32 {want}, found "
                f"{found}; {REMEDY}"
            )
    return params


def _restore(folder: Path, shapes: Shapes) -> Tree:
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    restore_args = jax.tree.map(lambda _: as_numpy, shapes, is_leaf=is_shape)
    item = jax.tree.map(lambda _: 0, shapes, is_leaf=is_shape)
    try:
        with _checkpointer() as checkpointer:
            restore = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            return checkpointer.restore(folder / "params", args=restore)
    except Exception as error:  # orbax and tensorstore raise many types for a damaged file
        names = [name for name, _ in _named(shapes)]
        unreadable = [name for name in names if f"params/{name}/" in str(error)] or names
        raise ValueError(
            f"{folder}/params: tensor {', '.join(map(repr, unreadable))}: expected a readable "
            f"orbax checkpoint: {error}; {REMEDY}"
        ) from error
