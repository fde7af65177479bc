"""Gemma 3 text models: Gemma 2's layers with QK norm and two rotary bases, and no attention cap."""

from models.gemma3.config import Gemma3Config
from models.gemma3.gguf import config_from_gguf, tensors_from_gguf
from models.gemma3.modeling import Gemma3
from models.gemma3.params import GEMMA3, GEMMA3_IMAGE_TEXT

__all__ = [
    "GEMMA3",
    "GEMMA3_IMAGE_TEXT",
    "Gemma3",
    "Gemma3Config",
    "config_from_gguf",
    "tensors_from_gguf",
]
