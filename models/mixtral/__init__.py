"""Mixtral: Mistral's layers with a mixture of experts for the MLP."""

from models.mixtral.config import MixtralConfig
from models.mixtral.modeling import Mixtral
from models.mixtral.params import MIXTRAL

__all__ = ["MIXTRAL", "Mixtral", "MixtralConfig"]
