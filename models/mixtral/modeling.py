"""Mixtral-family decoders (arXiv:2401.04088) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.common.layers import Projection, gated
from models.common.rotary_decoder import Carry, RotaryDecoder
from models.llama import modeling as llama
from models.mixtral.config import MixtralConfig

_INIT = nn.initializers.lecun_normal(batch_axis=0)

# Most tokens for which the chosen experts are read from the stack of all layers. The scan over
# layers copies all experts of a layer, chosen or not. Measured in one run of bare loops on 2 shared
# CPU cores (4 layers of 8 experts of 512 x 1408, 2 a token, float32), milliseconds at 1, 4, 16, 32,
# 64, 512 tokens: 130, 148, 164, 218, 251, 1331 with that copy, 14, 35, 79, 108, 166, 1260 without.
# But at 64 tokens the gradient took 6.9 s by the stack and 1.5 s by the copies: what trains has
# more tokens.
_MAX_STACK_TOKENS = 64


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
    def __call__(
        self, x: Float[Array, "B T C"], layer: Int[Array, ""], stack: dict[str, Any] | None
    ) -> Float[Array, "B T C"]:
        """The chosen experts' outputs, weighted by the router's softmax over them.

        Args:
          x: the tokens.
          layer: index into the stack.
          stack: the experts' weights of all layers, ``[L, E, in, out]``; None: the
            layer's own are read.
        """
        config, width = self.config, x.shape[-1]
        num, mlp = config.num_experts, config.intermediate_size
        router = Projection(num, self.param_dtype, name="router")(x).astype(jnp.float32)
        best, ids = jax.lax.top_k(router, config.num_experts_per_token)  # [B, T, N]
        chosen = jax.nn.softmax(best, axis=-1)[..., None] * jax.nn.one_hot(ids, num)
        shares = jnp.moveaxis(chosen.sum(axis=-2), -1, 0).astype(x.dtype)  # [E, B, T]
        gate_up = self.param("gate_up", _INIT, (num, width, 2 * mlp), self.param_dtype)
        down = self.param("down", _INIT, (num, mlp, width), self.param_dtype)
        if x.shape[0] * x.shape[1] > _MAX_STACK_TOKENS:
            stack = None

        def add(total: Array, expert: tuple[Array, Array, Any]) -> tuple[Array, None]:
            index, share, weights = expert

            def compute() -> Array:
                into, out = weights if stack is None else _expert_of(stack, layer, index)
                hidden = gated(jnp.einsum("btc,cf->btf", x, into.astype(x.dtype)), nn.silu)
                made = jnp.einsum("btf,fc->btc", hidden, out.astype(x.dtype))
                # What an expert makes of a token that did not choose it may overflow.
                return total + jnp.where(share[..., None] > 0, made * share[..., None], 0)

            return jax.lax.cond((share > 0).any(), compute, lambda: total), None

        experts = (jnp.arange(num), shares, (gate_up, down) if stack is None else None)
        total, _ = jax.lax.scan(add, jnp.zeros_like(x), experts)
        return total


def _expert_of(
    stack: dict[str, Array], layer: Int[Array, ""], expert: Int[Array, ""]
) -> tuple[Float[Array, "C 2F"], Float[Array, "F C"]]:
    """The weights of one expert of one layer."""
    return stack["gate_up"][layer, expert], stack["down"][layer, expert]


class Block(llama.Block):
    """Llama's layer with a mixture of experts."""

    def setup_mlp(self) -> None:
        """Declare the weights of the MLP."""
        self.experts = Experts(self.config, self.param_dtype)

    def __call__(
        self,
        carry: Carry,
        layer: Int[Array, ""],
        window: Int[Array, ""] | None,
        cos: Float[Array, "B T D/2"],
        sin: Float[Array, "B T D/2"],
        stack: dict[str, Any] | None = None,
    ) -> tuple[Carry, None]:
        """Run the layer on the residual stream and the cache; ``stack``: see ``Experts``."""
        x, cache = self.attend(carry, layer, window, cos, sin)
        return (x + self.experts(self.mlp_norm(x), layer, stack), cache), None


class Mixtral(RotaryDecoder):
    """A Mixtral-family decoder."""

    block = Block

    def shared(self) -> tuple[Any, ...]:
        """The experts' weights of all layers, where they are stacked."""
        if self.is_initializing() or self.unroll:
            return (None,)
        return (self.variables["params"]["layers"]["experts"],)
