"""Gemma 2 decoders (arXiv:2408.00118) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.common.layers import Projection, RMSNorm, gated, split_heads
from models.common.rope import rotate
from models.common.rotary_decoder import Carry, RotaryDecoder
from models.gemma2.config import Gemma2Config

_gelu_tanh = functools.partial(nn.gelu, approximate=True)


class Block(nn.Module):
    """One decoder layer; its signature is that of a scan's body."""

    config: Gemma2Config
    param_dtype: Any
    window: int | None = None

    def setup(self) -> None:
        """Declare the weights."""
        config, dtype = self.config, self.param_dtype
        self.attn_norm = self.norm()
        self.qkv = Projection(config.q_width + 2 * config.kv_width, dtype)
        self.out = Projection(config.hidden_size, dtype)
        self.post_attn_norm = self.norm()
        self.mlp_norm = self.norm()
        self.gate_up = Projection(2 * config.intermediate_size, dtype)
        self.down = Projection(config.hidden_size, dtype)
        self.post_mlp_norm = self.norm()

    def norm(self) -> RMSNorm:
        """A norm whose weight is stored less one."""
        return RMSNorm(self.config.rms_norm_eps, self.param_dtype, offset=1.0)

    def heads(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Queries, keys and values, not yet rotated."""
        return split_heads(
            self.qkv(x), num_heads=self.config.num_heads, num_kv_heads=self.config.num_kv_heads
        )

    def turns(self, table: Float[Array, "B T R"], layer: Int[Array, ""]) -> Float[Array, "B T D/2"]:
        """The layer's columns of a table of cosines or sines; here all layers have the same."""
        del layer
        return table

    def __call__(
        self,
        carry: Carry,
        layer: Int[Array, ""],
        window: Int[Array, ""] | None,
        cos: Float[Array, "B T R"],
        sin: Float[Array, "B T R"],
    ) -> tuple[Carry, None]:
        """Run the layer on the residual stream and the cache."""
        config = self.config
        x, cache = carry
        q, k, v = self.heads(self.attn_norm(x))
        cos, sin = self.turns(cos, layer), self.turns(sin, layer)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended, cache = cache.attend(
            layer,
            q,
            k,
            v,
            scale=config.query_pre_attn_scalar**-0.5,
            window=self.window if window is None else window,
            soft_cap=config.attn_soft_cap,
        )
        x = x + self.post_attn_norm(self.out(attended.reshape(*x.shape[:2], -1)))
        mlp = self.down(gated(self.gate_up(self.mlp_norm(x)), _gelu_tanh))
        return (x + self.post_mlp_norm(mlp), cache), None


class Gemma2(RotaryDecoder):
    """A Gemma 2 decoder."""

    block = Block
    norm_offset = 1.0

    def scaled(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Embeddings times the root of the width, itself rounded to their type."""
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def capped(self, logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        """Logits within the soft cap."""
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
