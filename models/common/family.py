"""One record a family: what turns a configuration and weights into a model, whatever they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from models.checkpoints.gguf_reader import GgufFile
from models.checkpoints.gguf_tensors import GgufTensors
from models.checkpoints.hf_config import HfConfig
from models.common import weights as tables
from models.common.weights import Weight
from paged_jax.model import Model, Tokenizer


@dataclasses.dataclass(frozen=True)
class GgufFormat:
    """How GGUF files hold a family.

    Attributes:
      architectures: values of ``general.architecture``.
      config: from a file.
      tensors: of a file, by Hugging Face's names.
    """

    architectures: tuple[str, ...]
    config: Callable[[GgufFile], Any]
    tensors: Callable[[GgufFile, Any], GgufTensors]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
      name: as in checkpoints, for example ``llama``.
      config_class: its configuration, a ``DecoderConfig``.
      module_class: ``module_class(config, dtype, param_dtype)``, a linen module with ``ApplyFn``'s
        arguments.
      weights: the table of its weights.
      config_from_hf: from a Hugging Face config.json.
      hf_types: values of ``model_type`` that it serves.
      prefix: of the tensors' names in a Hugging Face folder, which some folders leave out.
      ignored: regular expressions of tensors in such folders that are no weights.
      config_to_hf: the entries of a config.json that transformers loads; None: no folder can be
        written, since the family is only a part of what such folders hold.
      gguf: its form in GGUF files; None: not served.
    """

    name: str
    config_class: type[Any]
    module_class: Callable[..., nn.Module]
    weights: Callable[[Any], Sequence[Weight]]
    config_from_hf: Callable[[HfConfig], Any]
    hf_types: tuple[str, ...]
    prefix: str = "model."
    ignored: tuple[str, ...] = ()
    config_to_hf: Callable[[Any], dict[str, Any]] | None = None
    gguf: GgufFormat | None = None

    def param_shapes(self, config: Any) -> dict[str, Any]:
        """Return the weights' shapes, as nested dicts like the weights themselves.

        Layers are stacked on the first axis; projections are ``[L, in, out]``.
        """
        return tables.param_shapes(self.weights(config))

    def random_params(self, config: Any, seed: int, *, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Return random weights for tests and benchmarks (``weights.random_params``).

        Args:
          config: the geometry.
          seed: of the random stream.
          dtype: of the weights.
        """
        return tables.random_params(self.weights(config), seed, dtype=dtype)

    def as_model(
        self,
        config: Any,
        params: Any,
        *,
        dtype: Any = jnp.float32,
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> Model:
        """Return the record that the engine takes.

        Args:
          config: the geometry.
          params: the weights (``param_shapes`` says of which shapes), or what
            ``weights.unstack_layers`` makes of them.
          dtype: of activations and products; the weights keep theirs.
          name: see ``Model``, as for the rest; None means the family's.
          tokenizer: likewise.
          eos_token_ids: likewise.
        """
        stacked = self.module_class(config, jnp.dtype(dtype))
        unrolled = self.module_class(config, jnp.dtype(dtype), unroll=True)

        def apply(
            params: Any, tokens: Array, positions: Array, cache: Any, /, *, logits_at: Array
        ) -> tuple[Array, Any]:
            module, layers = stacked, params["layers"]
            if isinstance(layers, list | tuple):
                rest = {name: leaf for name, leaf in params.items() if name != "layers"}
                params = rest | {f"layers_{i}": layer for i, layer in enumerate(layers)}
                module = unrolled
            return module.apply({"params": params}, tokens, positions, cache, logits_at=logits_at)  # pyright: ignore[reportReturnType]

        return Model(
            apply=apply,
            params=params,
            spec=config.spec,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            name=name or self.name,
        )
