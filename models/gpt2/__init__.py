"""GPT-2: learned positions, layer norms, biases, one width for all heads."""

from models.gpt2.config import Gpt2Config
from models.gpt2.modeling import Gpt2
from models.gpt2.params import GPT2

__all__ = ["GPT2", "Gpt2", "Gpt2Config"]
