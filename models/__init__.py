"""Flax model families that read their keys and values through a paged_jax cache."""
