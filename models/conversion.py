"""From any format that is read to a folder of one of the two that are written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.checkpoints.progress import Report, track
from models.checkpoints.safetensors_writer import write_shards
from models.checkpoints.store import write_blocks
from models.common.streaming import Block, split_blocks
from models.stored import StoredModel, hf_config_of, open_stored
from models.tokenizer import TOKENIZER_FILES
from paged_jax.config import require

FORMATS = ("orbax", "hf")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    dtype: str = "auto",
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Write a model in another format, a few tensors at a time.

    Args:
      source: a GGUF file, a Hugging Face folder, or a folder of this library.
      target: the new folder, which appears when it is whole.
      to: 'orbax' (this library's folders) or 'hf' (config.json and safetensors).
      dtype: of the weights: 'float32', 'bfloat16', 'float16', or 'auto': as in the source;
        float32 for GGUF files.
      max_shard_bytes: most bytes of one safetensors file, unless a tensor is larger.
      progress: show progress on standard error.

    Raises:
      FileExistsError: the target exists.
      ValueError: an argument is not one of the above, or a file is damaged or does not fit; the
        message names the file and the tensor.
    """
    require(to in FORMATS, f"to={to!r} must be one of {', '.join(map(repr, FORMATS))}")
    require(dtype in DTYPES, f"dtype={dtype!r} must be one of {', '.join(map(repr, DTYPES))}")
    require(max_shard_bytes >= 1, f"max_shard_bytes={max_shard_bytes} must be >= 1")
    source, target = Path(source), Path(target)
    if target.exists():
        raise FileExistsError(f"{target}: exists already and is not overwritten")
    require(source.exists(), f"{source}: there is no such file or folder")
    stored = open_stored(source)
    chosen = stored.dtype if dtype == "auto" else jnp.dtype(dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        with track(f"Converting {source.name}", stored.num_weights, enabled=progress) as report:
            if to == "orbax":
                write_orbax(stored, temporary, chosen, report=report)
            else:
                write_hf(stored, temporary, chosen, max_shard_bytes=max_shard_bytes, report=report)
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's folders are for their owner alone
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_orbax(
    stored: StoredModel,
    folder: Path,
    dtype: np.dtype,
    *,
    sha256: str | None = None,
    report: Report = lambda done: None,
) -> None:
    """Write a checkpoint of this library into an existing folder.

    Args:
      stored: the model.
      folder: where to.
      dtype: of the weights.
      sha256: of the file that it comes from, for the manifest.
      report: called with the number of weights done.
    """
    _write_tokenizer(stored, folder)
    settings: dict[str, Any] = {
        "family": stored.family.name,
        "config": stored.config.to_json(),
        "eos_token_ids": list(stored.eos_token_ids),
        "licence": stored.licence,
    }
    if stored.hf_config is not None:
        settings["hf_config"] = stored.hf_config
    source = {"file": stored.path.name, "sha256": sha256, "licence": stored.licence}
    blocks = _reported(stored.read(dtype), report)
    write_blocks(folder, blocks, stored.shapes, config=settings, source=source)


def write_hf(
    stored: StoredModel,
    folder: Path,
    dtype: np.dtype,
    *,
    max_shard_bytes: int,
    report: Report = lambda done: None,
) -> None:
    """Write config.json, safetensors and the tokenizer into an existing folder.

    Args:
      stored: the model.
      folder: where to.
      dtype: of the weights.
      max_shard_bytes: most bytes of one file, unless a tensor is larger.
      report: called with the number of weights done.
    """
    config = hf_config_of(stored) | {"torch_dtype": dtype.name}
    config.pop("dtype", None)  # transformers 5's name of the same; 4 and 5 read the other
    eos = [*stored.eos_token_ids]
    if eos:
        config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
        _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(folder / "config.json", config)
    _write_tokenizer(stored, folder)
    shapes = {
        name: shape
        for weight in stored.table
        for index in weight.indices()
        for name, shape, _ in weight.tensors_at(index)
    }
    blocks = _reported(stored.read(dtype), report)
    tensors = split_blocks(blocks, stored.table)
    write_shards(folder, tensors, shapes, dtype, max_shard_bytes=max_shard_bytes)


def _reported(blocks: Iterator[Block], report: Report) -> Iterator[Block]:
    done = 0
    for block in blocks:
        yield block
        done += block.values.size
        report(done)


def _write_tokenizer(stored: StoredModel, folder: Path) -> None:
    """Folders' files as they are; a GGUF file's in Hugging Face's form."""
    if stored.path.is_dir():
        for name in TOKENIZER_FILES:
            if (stored.path / name).is_file():
                shutil.copyfile(stored.path / name, folder / name)
    else:
        tokenizer = stored.read_tokenizer()
        assert tokenizer is not None  # GGUF files without one are refused
        tokenizer.save(folder)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
