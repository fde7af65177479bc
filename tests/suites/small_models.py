"""Tiny models and a tokenizer whose outputs a test can write down beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from paged_jax.config import ModelSpec
from paged_jax.model import Model, Tokenizer

NUM_HEADS, HEAD_DIM = 2, 4


class LettersTokenizer:
    """Token i stands for ``pieces[i]``; text is cut into the longest pieces that fit.

    >>> tokenizer = LettersTokenizer(["ab", "cd", "ef", "a"])
    >>> tokenizer.encode("abaef"), tokenizer.decode([1, 3])
    ([0, 3, 2], 'cda')
    """

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self._bytes = [p.encode() if isinstance(p, str) else p for p in pieces]

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        order = sorted(range(len(self._bytes)), key=lambda i: -len(self._bytes[i]))
        while rest:
            token = next(i for i in order if rest.startswith(self._bytes[i]))
            ids.append(token)
            rest = rest[len(self._bytes[token]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


def letters(vocab_size: int) -> LettersTokenizer:
    """One character a token, all different: 'a', 'b', ... from the end of ASCII on into others."""
    return LettersTokenizer([chr(0x61 + i) for i in range(vocab_size)])


def _apply(
    params: Any, tokens: Any, positions: Any, cache: Any, *, logits_at: Any
) -> tuple[Any, Any]:
    """Logits from the position alone; still writes the pool and attends, as a model must."""
    q = jnp.ones((*tokens.shape, NUM_HEADS, HEAD_DIM), jnp.float32)
    kv = jnp.ones((*tokens.shape, 1, HEAD_DIM), jnp.float32) * params["scale"]
    out, cache = cache.attend(0, q, kv, kv)
    table = params["logits"]
    picked = jnp.take_along_axis(positions, logits_at, axis=1)
    seen = jnp.take_along_axis(out[..., 0, 0], logits_at, axis=1)
    # `seen` is `scale`, whatever the mix: NaN weights reach the logits as they do in real models.
    return table[picked % table.shape[0]] + (seen - seen)[..., None], cache


def _apply_transitions(
    params: Any, tokens: Any, positions: Any, cache: Any, *, logits_at: Any
) -> tuple[Any, Any]:
    _, cache = _apply(params, tokens, positions, cache, logits_at=logits_at)
    table = params["transitions"]
    picked = [jnp.take_along_axis(x, logits_at, axis=1) for x in (positions, tokens)]
    return table[picked[0] % table.shape[0], picked[1]], cache


def transition_model(logits: Any, **model: Any) -> Model:
    """A model whose logits after token t at position p are ``logits[p % N, t]``: [N, V, V]."""
    table = np.asarray(logits, np.float32)
    base = rigged_model(table[:, 0], **model)
    params = {**base.params, "transitions": jnp.asarray(table)}
    return dataclasses.replace(base, apply=_apply_transitions, params=params, name="transitions")


def rigged_model(
    logits: Any,
    *,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
    scale: float = 1.0,
) -> Model:
    """A model whose logits after position p are ``logits[p % len(logits)]``.

    Args:
      logits: ``[N, V]``, or ``[V]`` for the same logits everywhere.
      eos_token_ids: end tokens.
      tokenizer: or None.
      scale: all keys and values; NaN makes a model of NaN weights.
    """
    table = np.atleast_2d(np.asarray(logits, np.float32))
    spec = ModelSpec(
        num_layers=1,
        num_heads=NUM_HEADS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=table.shape[1],
        max_position=1024,
    )
    params = {"logits": jnp.asarray(table), "scale": jnp.asarray(scale, jnp.float32)}
    return Model(
        apply=_apply,
        params=params,
        spec=spec,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name="rigged",
    )


def scripted_model(script: Sequence[int], *, vocab_size: int, **model: Any) -> Model:
    """A rigged model that says ``script`` over and over: token ``script[p % N]`` after position p.

    With a prompt of one token the output begins with ``script[0]``.
    """
    logits = np.zeros((len(script), vocab_size), np.float32)
    logits[np.arange(len(script)), script] = 10.0
    return rigged_model(logits, **model)


def nan_model(vocab_size: int = 8) -> Model:
    """A model with NaN in every weight that matters."""
    return rigged_model(np.zeros(vocab_size), scale=float("nan"))
