"""Command-line programs, installed as ``paged_jax_scripts``."""
