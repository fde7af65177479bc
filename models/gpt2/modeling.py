"""GPT-2 (Radford et al., 2019) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.common.layers import (
    EMBEDDING_INIT,
    LayerNorm,
    embed,
    output_head,
    run_layers,
    take_positions,
)
from models.common.learned_positions import BiasedBlock
from models.gpt2.config import Gpt2Config
from paged_jax.cache import KVCache

gelu_tanh = functools.partial(nn.gelu, approximate=True)


class Gpt2(nn.Module):
    """A GPT-2 decoder.

    Attributes:
      config: the geometry.
      dtype: of activations and products; norms, scores and logits are float32.
      param_dtype: of the weights; None means ``dtype``.
      unroll: see ``run_layers``.
    """

    config: Gpt2Config
    dtype: Any = jnp.float32
    param_dtype: Any = None
    unroll: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        *,
        logits_at: Int[Array, "B N"],
    ) -> tuple[Float[Array, "B N V"], KVCache]:
        """Run all layers, and the output head at the named positions only (``ApplyFn``)."""
        config, param_dtype = self.config, self.param_dtype or self.dtype
        table = (config.vocab_size, config.hidden_size)
        embedding = self.param("embedding", EMBEDDING_INIT, table, param_dtype)
        places = (config.max_position, config.hidden_size)
        places = self.param("positions", EMBEDDING_INIT, places, param_dtype)
        x = embed(embedding, tokens, self.dtype) + embed(places, positions, self.dtype)
        attributes = (config, param_dtype, gelu_tanh)
        num_layers, unroll = config.num_layers, self.unroll
        x, cache = run_layers(
            BiasedBlock, attributes, (x, cache), num_layers=num_layers, unroll=unroll
        )
        x = take_positions(x, logits_at)
        x = LayerNorm(config.layer_norm_eps, param_dtype, name="final_norm")(x)
        if config.tie_embeddings:
            return output_head(x, embedding), cache
        return output_head(x, self.param("head", EMBEDDING_INIT, table, param_dtype)), cache
