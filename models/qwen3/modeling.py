"""Qwen3-family decoders (arXiv:2505.09388) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from jaxtyping import Array, Float

from models.common.layers import RMSNorm
from models.common.rotary_decoder import RotaryDecoder
from models.llama import modeling as llama


class Block(llama.Block):
    """Llama's layer with each head's query and key normalised before they are rotated."""

    def setup(self) -> None:
        """Declare the weights."""
        super().setup()
        self.q_norm = RMSNorm(self.config.rms_norm_eps, self.param_dtype)
        self.k_norm = RMSNorm(self.config.rms_norm_eps, self.param_dtype)

    def heads(
        self, x: Float[Array, "B T C"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Queries, keys and values, not yet rotated."""
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3(RotaryDecoder):
    """A Qwen3-family decoder."""

    block = Block
