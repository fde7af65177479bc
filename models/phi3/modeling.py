"""Phi-3-family decoders (arXiv:2404.14219) over a ``KVCache``, in Flax linen."""

from __future__ import annotations

from models.llama.modeling import Llama


class Phi3(Llama):
    """A Phi-3-family decoder: Llama's layers, of whose heads the first channels may be rotated."""
