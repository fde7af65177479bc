"""Llama-family decoders (arXiv:2302.13971, arXiv:2407.21783) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from models.common.layers import Projection, RMSNorm, gated, split_heads
from models.common.rope import rotate
from models.common.rotary_decoder import Carry, RotaryDecoder


class Block(nn.Module):
    """One decoder layer; its signature is that of a scan's body.

    Attributes:
      config: the geometry, a ``LlamaConfig`` or what extends it.
      param_dtype: of the weights.
      window: keys that a query attends to, where all layers have the same.
    """

    use_qkv_bias: ClassVar[bool] = False

    config: Any
    param_dtype: Any
    window: int | None = None

    def setup(self) -> None:
        """Declare the weights."""
        config, dtype = self.config, self.param_dtype
        self.attn_norm = RMSNorm(config.rms_norm_eps, dtype)
        width = config.q_width + 2 * config.kv_width
        self.qkv = Projection(width, dtype, self.use_qkv_bias)
        self.out = Projection(config.hidden_size, dtype)
        self.mlp_norm = RMSNorm(config.rms_norm_eps, dtype)
        self.setup_mlp()

    def setup_mlp(self) -> None:
        """Declare the weights of the MLP."""
        config, dtype = self.config, self.param_dtype
        self.gate_up = Projection(2 * config.intermediate_size, dtype)
        self.down = Projection(config.hidden_size, dtype)

    def heads(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Queries, keys and values, not yet rotated."""
        return split_heads(
            self.qkv(x), num_heads=self.config.num_heads, num_kv_heads=self.config.num_kv_heads
        )

    def turn(
        self,
        x: Float[Array, "B T H D"],
        cos: Float[Array, "B T D/2"],
        sin: Float[Array, "B T D/2"],
    ) -> Float[Array, "B T H D"]:
        """Rotate queries or keys."""
        scale = self.config.rotation_scale
        return rotate(x, cos, sin) if scale == 1 else rotate(x, scale * cos, scale * sin)

    def mlp(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """What the layer adds to the residual stream after attention."""
        return self.down(gated(self.gate_up(x), nn.silu))

    def attend(
        self,
        carry: Carry,
        layer: Int[Array, ""],
        window: Int[Array, ""] | None,
        cos: Float[Array, "B T D/2"],
        sin: Float[Array, "B T D/2"],
    ) -> Carry:
        """Run the layer's first half: attention and its sum."""
        x, cache = carry
        q, k, v = self.heads(self.attn_norm(x))
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        size = self.window if window is None else window
        attended, cache = cache.attend(layer, q, k, v, window=size)
        return x + self.out(attended.reshape(*x.shape[:2], -1)), cache

    def __call__(
        self,
        carry: Carry,
        layer: Int[Array, ""],
        window: Int[Array, ""] | None,
        cos: Float[Array, "B T D/2"],
        sin: Float[Array, "B T D/2"],
    ) -> tuple[Carry, None]:
        """Run the layer on the residual stream and the cache."""
        x, cache = self.attend(carry, layer, window, cos, sin)
        return (x + self.mlp(self.mlp_norm(x)), cache), None


class Llama(RotaryDecoder):
    """A Llama-family decoder."""

    block = Block
