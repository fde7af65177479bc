"""Qwen3-family dense models: Llama's layers with norms of queries and keys."""

from models.qwen3.config import Qwen3Config
from models.qwen3.modeling import Qwen3
from models.qwen3.params import QWEN3

__all__ = ["QWEN3", "Qwen3", "Qwen3Config"]
