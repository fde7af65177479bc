"""Mistral-family decoders (arXiv:2310.06825) over a ``KVCache``, in Flax linen.

The layers are Llama's; what differs is ``MistralConfig.windows``, which the decoder gives to them.
"""

from models.common.rotary_decoder import RotaryDecoder
from models.llama.modeling import Block


class Mistral(RotaryDecoder):
    """A Mistral-family decoder."""

    block = Block
