"""Models on disk, of any format, opened and not yet read."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.checkpoints.gguf_reader import GgufFile
from models.checkpoints.hf_config import HfConfig
from models.checkpoints.hf_folder import HfFolder
from models.checkpoints.store import read_blocks as read_checkpoint_blocks
from models.checkpoints.store import read_config, stored_tensors
from models.common.family import Family
from models.common.streaming import Block, place, read_blocks
from models.common.weights import Weight, tensor_names, unstack_layers
from models.registry import FAMILIES, family_of, family_of_gguf
from models.tokenizer import TOKENIZER_FILES, Tokenizer
from paged_jax.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in a file or folder.

    Attributes:
      path: the file or folder.
      name: for logs and tables.
      family: what its layers are.
      config: its geometry.
      dtype: of its weights; the widest where they differ.
      eos_token_ids: tokens that end a text.
      hf_config: the config.json that it came with from Hugging Face, or None.
      licence: as stated.
      read: yields its weights in order, in the type that is given.
      read_tokenizer: returns the tokenizer, or None where there is none.
    """

    path: Path
    name: str
    family: Family
    config: Any
    dtype: np.dtype
    eos_token_ids: tuple[int, ...]
    hf_config: dict[str, Any] | None
    licence: str
    read: Callable[[np.dtype], Iterator[Block]]
    read_tokenizer: Callable[[], Tokenizer | None]

    @property
    def table(self) -> Sequence[Weight]:
        """The table of its weights."""
        return self.family.weights(self.config)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights, by path."""
        return {weight.path: weight.leaf_shape for weight in self.table}

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        return sum(map(math.prod, self.shapes.values()))

    def load(self, dtype: str, *, unroll: bool = False) -> Model:
        """Return the model with its weights on the device, read and placed one by one.

        Args:
          dtype: of weights and activations.
          unroll: see ``load_model``.

        Raises:
          ValueError: a file is damaged or does not fit; the message names it and the tensor.
        """
        params = place(self.read(jnp.dtype(dtype)), self.shapes, jnp.dtype(dtype))
        if unroll:
            params = unstack_layers(params, num_layers=self.config.num_layers)
        return self.family.as_model(
            self.config,
            params,
            dtype=dtype,
            name=self.name,
            tokenizer=self.read_tokenizer(),
            eos_token_ids=self.eos_token_ids,
        )


def open_stored(path: Path) -> StoredModel:
    """Open a GGUF file, a checkpoint of this library or a Hugging Face folder.

    Raises:
      ValueError: it is none of these, its family is unknown, a file is damaged, or tensors are
        missing or left over.
    """
    if path.is_dir():
        opened = open_checkpoint if (path / "manifest.json").is_file() else open_hf_folder
        return opened(path)
    if path.suffix == ".gguf" and path.is_file():
        return open_gguf(path)
    raise ValueError(f"{path}: expected a .gguf file, or the folder of a model")


def open_gguf(path: Path) -> StoredModel:
    """Open a GGUF file.

    Raises:
      ValueError: as ``open_stored``.
    """
    file = GgufFile(path)
    family, form = family_of_gguf(file.architecture, where=path)
    config = form.config(file)
    tensors = form.tensors(file, config)
    table = family.weights(config)
    tensors.require_only(tensor_names(table), family=family.module_class.__name__)
    eos_token_id = file.metadata("tokenizer.ggml.eos_token_id")
    return StoredModel(
        path=path,
        name=path.stem,
        family=family,
        config=config,
        dtype=jnp.dtype(jnp.float32),  # what quantised blocks hold is exact in float32 only
        eos_token_ids=(eos_token_id,),
        hf_config=None,
        licence=file.metadata("general.license", "not stated in the file"),
        read=lambda dtype: read_blocks(tensors, table, dtype),
        read_tokenizer=lambda: Tokenizer.from_gguf(file, num_ids=config.vocab_size),
    )


def open_hf_folder(path: Path) -> StoredModel:
    """Open a Hugging Face folder.

    Raises:
      ValueError: as ``open_stored``.
    """
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
    return StoredModel(
        path=path,
        name=path.resolve().name,
        family=family,
        config=config,
        dtype=folder.dtype,
        eos_token_ids=folder.eos_token_ids(),
        hf_config=folder.config.values,
        licence="not stated in the folder",
        read=lambda dtype: read_blocks(folder, table, dtype),
        read_tokenizer=lambda: _tokenizer_of(path, config.vocab_size),
    )


def open_checkpoint(path: Path) -> StoredModel:
    """Open a checkpoint that this library wrote.

    Raises:
      ValueError: as ``open_stored``.
    """
    settings = read_config(path)
    try:
        family = FAMILIES[settings["family"]]
        config = family.config_class.from_json(settings["config"])
        eos_token_ids = tuple(settings["eos_token_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}/config.json: expected a model's settings: {error}") from error
    shapes = {weight.path: weight.leaf_shape for weight in family.weights(config)}
    dtypes = [jnp.dtype(one.dtype) for one in stored_tensors(path).values()]
    return StoredModel(
        path=path,
        name=path.resolve().name,
        family=family,
        config=config,
        dtype=functools.reduce(jnp.promote_types, dtypes),
        eos_token_ids=eos_token_ids,
        hf_config=settings.get("hf_config"),
        licence=settings.get("licence", "not stated in the folder"),
        read=lambda dtype: (
            Block(block.path, block.values.astype(dtype, copy=False))
            for block in read_checkpoint_blocks(path, shapes)
        ),
        read_tokenizer=lambda: _tokenizer_of(path, config.vocab_size),
    )


def _tokenizer_of(folder: Path, num_ids: int) -> Tokenizer | None:
    found = (folder / TOKENIZER_FILES[0]).is_file()
    return Tokenizer.load(folder, num_ids=num_ids) if found else None


def hf_config_of(stored: StoredModel) -> dict[str, Any]:
    """Return the config.json with which transformers loads a model.

    Raises:
      ValueError: its family has none to give, or what it gives is not the same geometry.
    """
    if stored.family.config_to_hf is None:
        raise ValueError(
            f"{stored.path}: a {stored.family.name} model cannot become a Hugging Face folder: "
            "only a part of such a folder is served"
        )
    values = stored.hf_config
    if values is None:
        values = stored.family.config_to_hf(stored.config)
    again = stored.family.config_from_hf(HfConfig(stored.path / "config.json", values))
    if again != stored.config:
        raise ValueError(
            f"{stored.path}: config.json={json.dumps(values)} must mean {stored.config}, "
            f"it means {again}"
        )
    return values
