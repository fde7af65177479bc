"""Mixtral-family decoders (arXiv:2401.04088) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.common.layers import Projection, gated
from models.common.rotary_decoder import RotaryDecoder
from models.llama import modeling as llama
from models.mixtral.config import MixtralConfig

_INIT = nn.initializers.lecun_normal(batch_axis=0)


class Experts(nn.Module):
    """Gated MLPs, of which each token passes through the few that a router chooses.

    Every token gets its experts, whatever the others choose: there is no capacity, so the answer
    does not depend on the batch. The experts are computed one after the other for all tokens, and
    skipped where no token chose them. Measured on 2 CPU cores (8 experts of 512 x 1408, 2 a token)
    this took 14, 57 and 377 ms for 4, 64 and 512 tokens; sorted tokens and ``jax.lax.ragged_dot``
    26, 168 and 1058 ms; gathered weights 138 ms for 4.

    Attributes:
      config: the geometry.
      param_dtype: of the weights.
    """

    config: MixtralConfig
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """The chosen experts' outputs, weighted by the router's softmax over them."""
        config, width = self.config, x.shape[-1]
        num, mlp = config.num_experts, config.intermediate_size
        router = Projection(num, self.param_dtype, name="router")(x).astype(jnp.float32)
        best, ids = jax.lax.top_k(router, config.num_experts_per_token)  # [B, T, N]
        chosen = jax.nn.softmax(best, axis=-1)[..., None] * jax.nn.one_hot(ids, num)
        shares = jnp.moveaxis(chosen.sum(axis=-2), -1, 0).astype(x.dtype)  # [E, B, T]
        gate_up = self.param("gate_up", _INIT, (num, width, 2 * mlp), self.param_dtype)
        down = self.param("down", _INIT, (num, mlp, width), self.param_dtype)

        def add(total: Array, expert: tuple[Array, Array, Array]) -> tuple[Array, None]:
            into, out, share = expert

            def compute() -> Array:
                hidden = gated(jnp.einsum("btc,cf->btf", x, into.astype(x.dtype)), nn.silu)
                made = jnp.einsum("btf,fc->btc", hidden, out.astype(x.dtype))
                return total + made * share[..., None]

            return jax.lax.cond((share > 0).any(), compute, lambda: total), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(x), (gate_up, down, shares))
        return total


class Block(llama.Block):
    """Llama's layer with a mixture of experts."""

    def setup_mlp(self) -> None:
        """Declare the weights of the MLP."""
        self.experts = Experts(self.config, self.param_dtype)

    def mlp(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """What the layer adds to the residual stream after attention."""
        return self.experts(x)


class Mixtral(RotaryDecoder):
    """A Mixtral-family decoder."""

    block = Block
