"""Flax model families that read their keys and values through a paged_jax cache."""

from models.loading import KNOWN_MODELS, load_model

__all__ = ["KNOWN_MODELS", "load_model"]
