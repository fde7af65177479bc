"""Log-probabilities of tokens under the model's own, unmodified logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["logprob", "rank", "top_ids", "top_logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, beside the best N; leading axes as in the logits.

    Attributes:
      logprob: natural log of the token's probability.
      rank: 1 for the best: logits strictly greater than the token's, plus 1.
      top_ids: the N best tokens, best first, equal ones by id.
      top_logprobs: theirs.
    """

    logprob: Float32[Array, "*B"]
    rank: Int32[Array, "*B"]
    top_ids: Int32[Array, "*B N"]
    top_logprobs: Float32[Array, "*B N"]


def token_logprobs(
    logits: Float[Array, "B V"], tokens: Int32[Array, " B"], *, num_logprobs: int
) -> TokenLogprobs:
    """Log-softmax values of each row's token and of its ``num_logprobs`` best, in float32.

    Where the vocabulary is smaller than ``num_logprobs``, N is its size.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.max(logits, axis=1)
    log_sum = best + jnp.log(jnp.sum(jnp.exp(logits - best[:, None]), axis=1))
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    # top_k orders -0.0 below 0.0: made equal here, so that ties go by id. The barrier keeps XLA
    # from merging a caller's slice into top_k, which makes it a full sort.
    zeroed = jnp.where(logits == 0, jnp.float32(0), logits)
    top, top_ids = lax.optimization_barrier(lax.top_k(zeroed, min(num_logprobs, logits.shape[1])))
    return TokenLogprobs(
        logprob=own[:, 0] - log_sum,
        rank=jnp.sum(logits > own, axis=1, dtype=jnp.int32) + 1,
        top_ids=top_ids,
        top_logprobs=top - log_sum[:, None],
    )


def prompt_logprobs(
    logits: Float[Array, "B T V"], next_tokens: Int32[Array, "B T"], *, num_logprobs: int
) -> TokenLogprobs:
    """The same for prompts: position t's logits score ``next_tokens[b, t]``, the token after it.

    At padded positions any token in the vocabulary may stand; its values mean nothing.
    """
    # Flat, since XLA's fast top_k takes two axes only.
    flat = token_logprobs(
        logits.reshape(-1, logits.shape[-1]), next_tokens.reshape(-1), num_logprobs=num_logprobs
    )
    shape = next_tokens.shape
    return jax.tree.map(lambda field: field.reshape(shape + field.shape[1:]), flat)
