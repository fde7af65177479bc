"""The integer-hash model with a tune on its mind: at each position one token is favoured.

The tune repeats, so prompt lookup finds drafts; the hash of the whole context, read back through
the cache, still decides against it now and then, and then differently for each context. So drafts
are accepted wholly, in part and not at all, and any slot that is not what it must be shows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from suites import hash_model

from paged_jax.model import Model, Tokenizer

TUNE = (3, 1, 4, 1, 5, 9, 2, 6)


def _apply(
    params: Any, tokens: Any, positions: Any, cache: Any, *, logits_at: Any
) -> tuple[Any, Any]:
    logits, cache = hash_model.apply(params, tokens, positions, cache, logits_at=logits_at)
    at = jnp.take_along_axis(positions, logits_at, axis=1)
    wanted = jnp.asarray(TUNE, jnp.int32)[at % len(TUNE)]
    is_wanted = jnp.arange(logits.shape[-1]) == wanted[..., None]
    return jnp.where(is_wanted, logits + params["favour"], logits), cache


def make_model(
    favour: float, *, eos_token_ids: tuple[int, ...] = (), tokenizer: Tokenizer | None = None
) -> Model:
    """``favour`` is added to the favoured logit; the hash gives each logit 0 .. 16.

    0: the plain hash model, whose text never repeats; 13: greedy text follows the tune four times
    in five; 20: always.
    """
    plain = hash_model.make_model()
    return Model(
        apply=_apply,
        params={**plain.params, "favour": jnp.float32(favour)},
        spec=plain.spec,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        name=f"looping-{favour}",
    )
