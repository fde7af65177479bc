"""Requests made to fit a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paged_jax.simulation.traces import TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class FittedRequests:
    """Requests that a context has room for.

    Attributes:
      requests: in their own order.
      num_left_out: others, which it has no room for.
      num_clipped: of the requests, those that were made shorter.
    """

    requests: list[TraceRequest]
    num_left_out: int
    num_clipped: int


def fit_to_context(
    requests: Sequence[TraceRequest],
    *,
    max_model_len: int,
    clip: bool,
    tokens_per_id: int | None = None,
) -> FittedRequests:
    """Leave out what is longer than a context, or make it shorter.

    Args:
      requests: of any length.
      max_model_len: tokens of prompt and output together.
      clip: cut the ends of prompts for room for the outputs, which get half of the context at most
        where the prompt fills the rest.
      tokens_per_id: what the requests' ids stand for, where they have any.

    Raises:
      ValueError: the context is shorter than 2 tokens, or it has room for none of the requests.
    """
    if max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len} must be at least 2")
    fitted: list[TraceRequest] = []
    num_too_long = 0
    for request in requests:
        if request.num_prompt + request.num_output > max_model_len:
            num_too_long += 1
            if not clip:
                continue
            request = _clip(request, max_model_len, tokens_per_id)
        fitted.append(request)
    if not fitted:
        raise ValueError(
            f"max_model_len={max_model_len} must have room for one of {len(requests)} requests, "
            f"the shortest has {min(one.num_prompt + one.num_output for one in requests)} tokens"
        )
    num_clipped = num_too_long if clip else 0
    return FittedRequests(fitted, num_too_long - num_clipped, num_clipped)


def _clip(request: TraceRequest, max_model_len: int, tokens_per_id: int | None) -> TraceRequest:
    num_prompt = min(
        request.num_prompt, max_model_len - min(request.num_output, max_model_len // 2)
    )
    num_ids = -(-num_prompt // tokens_per_id) if tokens_per_id else 0
    return dataclasses.replace(
        request,
        num_prompt=num_prompt,
        num_output=min(request.num_output, max_model_len - num_prompt),
        prefix_ids=request.prefix_ids[:num_ids],
    )
