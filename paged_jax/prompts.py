"""What users pass as prompts: texts, lists of token ids, arrays; one or many."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paged_jax.config import require
from paged_jax.model import Model

Prompt = str | Sequence[int]


def encode_prompt(prompt: Prompt, model: Model) -> list[int]:
    """The token ids of a prompt.

    Raises:
      ValueError: it is text and the model has no tokenizer, or no valid text; it is no flat list
        of ints; or an id is outside the vocabulary.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("prompt is text, but the model has no tokenizer: give token ids")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            shown = reprlib.repr(prompt)
            raise ValueError(f"prompt={shown} must be valid text: {error}") from None
        return model.tokenizer.encode(prompt)
    token_ids = _as_token_ids(prompt)
    vocab_size = model.spec.vocab_size
    bad = [token for token in token_ids if not 0 <= token < vocab_size]
    require(not bad, f"prompt has token ids {bad[:5]} outside 0..{vocab_size - 1}")
    return token_ids


def as_prompt_list(prompts: Any) -> list[Any]:
    """Several prompts as a list; one alone becomes a list of one.

    Raises:
      ValueError: it is neither a string nor a sequence.
    """
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):
        array = np.asarray(prompts)
        return [array] if array.ndim == 1 else list(array)
    unordered = bytes | bytearray | set | frozenset | dict
    require(
        isinstance(prompts, Iterable) and not isinstance(prompts, unordered),
        f"prompts={reprlib.repr(prompts)} must be a string, token ids, or a list of those",
    )
    items = list(prompts)
    return [items] if items and all(_is_int(item) for item in items) else items


def _as_token_ids(prompt: Any) -> list[int]:
    items = np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else prompt
    is_list = isinstance(items, Sequence) and not isinstance(items, str | bytes | bytearray)
    require(
        is_list and all(_is_int(item) for item in items),
        f"prompt={reprlib.repr(prompt)} must be a string or a flat list of token ids",
    )
    return [int(item) for item in items]


def _is_int(item: Any) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)
