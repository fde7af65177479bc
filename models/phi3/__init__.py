"""Phi-3 and Phi-4-mini: Llama's layers, stored fused, with partial and long rotations."""

from models.phi3.config import Phi3Config
from models.phi3.modeling import Phi3
from models.phi3.params import PHI3

__all__ = ["PHI3", "Phi3", "Phi3Config"]
