"""What decoders with learned positions, layer norms and biases have in common (GPT-2, OPT)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from models.common.config import DecoderConfig
from models.common.layers import LayerNorm, Projection, split_heads
from models.common.rotary_decoder import Carry


class BiasedBlock(nn.Module):
    """One decoder layer with biases everywhere; its signature is that of a scan's body.

    Attributes:
      config: the geometry, with ``layer_norm_eps``.
      param_dtype: of the weights.
      activation: of the MLP.
      normalises_first: norms stand before attention and MLP, not after the sums.
    """

    config: DecoderConfig
    param_dtype: Any
    activation: Callable[[Array], Array]
    normalises_first: bool = True

    def setup(self) -> None:
        """Declare the weights."""
        config, dtype = self.config, self.param_dtype
        epsilon = config.layer_norm_eps  # pyright: ignore[reportAttributeAccessIssue]
        self.attn_norm = LayerNorm(epsilon, dtype)
        self.qkv = Projection(3 * config.q_width, dtype, use_bias=True)
        self.out = Projection(config.hidden_size, dtype, use_bias=True)
        self.mlp_norm = LayerNorm(epsilon, dtype)
        self.up = Projection(config.intermediate_size, dtype, use_bias=True)
        self.down = Projection(config.hidden_size, dtype, use_bias=True)

    def __call__(self, carry: Carry, layer: Int[Array, ""]) -> tuple[Carry, None]:
        """Run the layer on the residual stream and the cache."""
        x, cache = carry
        heads = self.config.num_heads
        normed = self.attn_norm(x) if self.normalises_first else x
        q, k, v = split_heads(self.qkv(normed), num_heads=heads, num_kv_heads=heads)
        attended, cache = cache.attend(layer, q, k, v)
        x = x + self.out(attended.reshape(*x.shape[:2], -1))
        if self.normalises_first:
            return (x + self._mlp(self.mlp_norm(x)), cache), None
        x = self.attn_norm(x)
        return (self.mlp_norm(x + self._mlp(x)), cache), None

    def _mlp(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        return self.down(self.activation(self.up(x)))
