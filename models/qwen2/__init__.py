"""Qwen2-family models (Qwen2, Qwen2.5): Llama's layers with biases of q, k and v."""

from models.qwen2.config import Qwen2Config
from models.qwen2.modeling import Qwen2
from models.qwen2.params import QWEN2

__all__ = ["QWEN2", "Qwen2", "Qwen2Config"]
