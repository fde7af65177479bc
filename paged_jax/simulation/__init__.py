"""The real scheduler and block manager on a machine that is only a formula. Never imports jax."""
