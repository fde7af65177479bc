"""Llama-family models: SmolLM2, Llama 3 and others of the architecture."""

from models.llama.config import LlamaConfig, RopeScaling
from models.llama.modeling import Llama, as_model
from models.llama.params import config_from_gguf, param_shapes, params_from_gguf, random_params

__all__ = [
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "as_model",
    "config_from_gguf",
    "param_shapes",
    "params_from_gguf",
    "random_params",
]
