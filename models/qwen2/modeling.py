"""Qwen2-family decoders (arXiv:2407.10671) over a ``KVCache``, in Flax linen."""

from models.common.rotary_decoder import RotaryDecoder
from models.llama import modeling as llama


class Block(llama.Block):
    """Llama's layer with biases of queries, keys and values."""

    use_qkv_bias = True


class Qwen2(RotaryDecoder):
    """A Qwen2-family decoder."""

    block = Block
