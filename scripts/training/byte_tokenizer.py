"""A tokenizer that needs no training: a token a byte, and one that ends a text."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from models.tokenizer import Tokenizer, byte_alphabet

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of 257 tokens: byte b is token b, the end of a text token 256."""
    vocabulary = {char: byte for byte, char in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    # Pieces of a word's length: the library takes time quadratic in a piece's.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend, eos_token=END_OF_TEXT)
