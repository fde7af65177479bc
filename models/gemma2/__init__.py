"""Gemma 2 models: alternating windows, soft caps, norms before and after each part of a layer."""

from models.gemma2.config import Gemma2Config
from models.gemma2.modeling import Gemma2
from models.gemma2.params import GEMMA2

__all__ = ["GEMMA2", "Gemma2", "Gemma2Config"]
