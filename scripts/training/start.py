"""Where a run starts from: new weights of a family, or a model that exists."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from models.common.family import Family
from models.common.streaming import place
from models.loading import open_model
from models.registry import FAMILIES
from models.tokenizer import Tokenizer
from paged_jax.config import require
from paged_jax.model import ApplyFn
from paged_jax.uncached import UncachedAttention
from paged_jax_scripts.training.byte_tokenizer import END_OF_TEXT, byte_tokenizer

# About a million weights with the 257 tokens of bytes.
SMALL_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_position": 512,
    "tie_embeddings": True,
}
# What some families' configurations must say besides, or in place of that.
_FAMILY_SIZES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"num_kv_heads": 4},
    "mixtral": {"num_experts": 4, "num_experts_per_token": 2, "intermediate_size": 128},
    "opt": {"num_kv_heads": 4, "embedding_size": 128},
    "phi3": {"rotary_dim": 32},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A model before its first update.

    Attributes:
      family: of the model.
      config: its geometry.
      params: float32 weights.
      tokenizer: of texts.
      eos_token_ids: tokens that end a text; the first one is put after each document.
      name: where it came from.
    """

    family: Family
    config: Any
    params: Any
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    name: str

    def __post_init__(self) -> None:
        require(bool(self.eos_token_ids), f"{self.name}: must have a token that ends a text")

    @property
    def num_params(self) -> int:
        """Weights in all."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def apply_fn(self, compute_dtype: str) -> ApplyFn:
        """Return the model as a function of its float32 weights that computes in another type."""
        return self.family.as_model(self.config, {}, dtype=compute_dtype).apply


def new_model(
    family_name: str,
    sizes: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Tokenizer | None = None,
    end_token: str = END_OF_TEXT,
) -> Start:
    """Return a model with new weights, initialised as its modules say.

    Args:
      family_name: a key of ``FAMILIES``.
      sizes: of the family's configuration, in place of ``SMALL_SIZES``' and its defaults.
      seed: of the weights.
      tokenizer: None: one token a byte.
      end_token: the tokenizer's token that ends a text.

    Raises:
      ValueError: there is no such family or setting, or the tokenizer has no such token.
    """
    require(
        family_name in FAMILIES,
        f"family={family_name!r} must be one of {', '.join(map(repr, sorted(FAMILIES)))}",
    )
    family = FAMILIES[family_name]
    tokenizer = tokenizer or byte_tokenizer()
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(family.config_class)
        if field.default is not dataclasses.MISSING
    }
    small = {**SMALL_SIZES, **_FAMILY_SIZES.get(family_name, {})}
    small["vocab_size"] = tokenizer.vocab_size
    config = family.config_class.from_json(defaults | small | dict(sizes))
    module = family.module_class(config, jnp.float32)
    one = jnp.zeros((1, 1), jnp.int32)

    def init(key: jax.Array) -> Any:
        return module.init(key, one, one, UncachedAttention(), logits_at=one)["params"]

    end_ids = tokenizer.encode(end_token)
    require(
        len(end_ids) == 1,
        f"end_token={end_token!r} must be one token of the tokenizer, it is {len(end_ids)}",
    )
    return Start(
        family=family,
        config=config,
        params=jax.jit(init)(jax.random.key(seed)),
        tokenizer=tokenizer,
        eos_token_ids=tuple(end_ids),
        name=f"a new {family_name}",
    )


def existing_model(
    name_or_path: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None
) -> Start:
    """Return a model that exists, to be trained on.

    Args:
      name_or_path: see ``load_model``.
      cache_dir: see ``load_model``.

    Raises:
      ValueError: it cannot be loaded, or has no tokenizer.
    """
    stored = open_model(name_or_path, cache_dir=cache_dir)
    tokenizer = stored.read_tokenizer()
    require(tokenizer is not None, f"{stored.path}: must have a tokenizer to be trained on text")
    assert tokenizer is not None
    dtype = jnp.dtype(jnp.float32)
    return Start(
        family=stored.family,
        config=stored.config,
        params=place(stored.read(dtype), stored.shapes, dtype),
        tokenizer=tokenizer,
        eos_token_ids=stored.eos_token_ids,
        name=str(name_or_path),
    )
