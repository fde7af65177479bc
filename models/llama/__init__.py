"""Llama-family models: SmolLM2, Llama 3 and others of the architecture."""

from models.common.rope import RopeScaling
from models.llama.config import LlamaConfig
from models.llama.gguf import config_from_gguf
from models.llama.modeling import Llama
from models.llama.params import LLAMA, as_model, param_shapes, random_params

__all__ = [
    "LLAMA",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "as_model",
    "config_from_gguf",
    "param_shapes",
    "random_params",
]
