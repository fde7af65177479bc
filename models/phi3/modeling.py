"""Phi-3-family decoders (arXiv:2404.14219) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from jaxtyping import Array, Float

from models.common.rope import rotate
from models.common.rotary_decoder import RotaryDecoder
from models.llama import modeling as llama


class Block(llama.Block):
    """Llama's layer; what is rotated is scaled too."""

    def turn(
        self,
        x: Float[Array, "B T H D"],
        cos: Float[Array, "B T R/2"],
        sin: Float[Array, "B T R/2"],
    ) -> Float[Array, "B T H D"]:
        """Rotate the first channels of queries or keys."""
        scale = self.config.rotation_scale
        return rotate(x, cos, sin) if scale == 1 else rotate(x, scale * cos, scale * sin)


class Phi3(RotaryDecoder):
    """A Phi-3-family decoder."""

    block = Block
