"""Gemma 3 text decoders (arXiv:2503.19786) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.gemma2 import modeling as gemma2


class Block(gemma2.Block):
    """Gemma 2's layer with normalised queries and keys, and rotary bases by the layer's kind."""

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        self.q_norm = self.norm()
        self.k_norm = self.norm()

    def heads(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Queries, keys and values, not yet rotated."""
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v

    def turns(self, table: Float[Array, "B T D"], layer: Int[Array, ""]) -> Float[Array, "B T D/2"]:
        """The layer's columns: the second half belongs to layers with a window."""
        half = table.shape[-1] // 2
        has_window = jnp.asarray([window is not None for window in self.config.windows], jnp.int32)
        return jax.lax.dynamic_slice_in_dim(table, has_window[layer] * half, half, axis=-1)


class Gemma3(gemma2.Gemma2):
    """A Gemma 3 text decoder."""

    block = Block
