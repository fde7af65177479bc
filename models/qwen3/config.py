"""The geometry of Qwen3-family models."""

from models.qwen2.config import Qwen2Config


class Qwen3Config(Qwen2Config):
    """The geometry of one model: the sizes are Qwen2's, ``head_dim`` is stated by itself."""
