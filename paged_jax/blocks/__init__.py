"""Host side: which blocks of the pool belong to which sequence. Never imports jax."""
