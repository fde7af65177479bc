"""OPT (arXiv:2205.01068) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.common.layers import (
    EMBEDDING_INIT,
    LayerNorm,
    Projection,
    embed,
    output_head,
    run_layers,
    take_positions,
)
from models.common.learned_positions import BiasedBlock
from models.opt.config import POSITION_OFFSET, OptConfig
from paged_jax.cache import KVCache


class Opt(nn.Module):
    """An OPT decoder.

    Attributes:
      config: the geometry.
      dtype: of activations and products; norms, scores and logits are float32.
      param_dtype: of the weights; None means ``dtype``.
      unroll: see ``run_layers``.
    """

    config: OptConfig
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
        table = (config.vocab_size, config.embedding_size)
        embedding = self.param("embedding", EMBEDDING_INIT, table, param_dtype)
        places = (config.max_position + POSITION_OFFSET, config.hidden_size)
        places = self.param("positions", EMBEDDING_INIT, places, param_dtype)
        is_projected = config.embedding_size != config.hidden_size
        x = embed(embedding, tokens, self.dtype)
        if is_projected:
            x = Projection(config.hidden_size, param_dtype, name="project_in")(x)
        x = x + embed(places, positions + POSITION_OFFSET, self.dtype)
        attributes = (config, param_dtype, nn.relu, config.normalises_first)
        num_layers, unroll = config.num_layers, self.unroll
        x, cache = run_layers(
            BiasedBlock, attributes, (x, cache), num_layers=num_layers, unroll=unroll
        )
        x = take_positions(x, logits_at)
        if config.normalises_first:
            x = LayerNorm(config.layer_norm_eps, param_dtype, name="final_norm")(x)
        if is_projected:
            x = Projection(config.embedding_size, param_dtype, name="project_out")(x)
        if config.tie_embeddings:
            return output_head(x, embedding), cache
        return output_head(x, self.param("head", EMBEDDING_INIT, table, param_dtype)), cache
