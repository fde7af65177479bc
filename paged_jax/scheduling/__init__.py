"""Host side: which tokens of which sequences each step computes. Never imports jax."""
