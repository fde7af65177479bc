"""Mistral-family models: Llama's layers with a sliding window."""

from models.mistral.config import MistralConfig
from models.mistral.modeling import Mistral
from models.mistral.params import MISTRAL

__all__ = ["MISTRAL", "Mistral", "MistralConfig"]
