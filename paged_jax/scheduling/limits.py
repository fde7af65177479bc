"""Which requests are refused, and how many tokens the others may emit."""

from __future__ import annotations

from absl import logging

from paged_jax.scheduling.request import Request


def capped_max_tokens(request: Request, *, max_model_len: int, num_slots: int) -> int:
    """Tokens that ``request`` may emit, within the context limit and the whole pool.

    A limit beyond the room is capped with one logged warning; None silently means all of the room.
    ``max_tokens=0`` (scoring) needs room for the prompt only.

    Args:
      request: a request that is about to be added.
      max_model_len: longest context in tokens, prompt and output together.
      num_slots: token positions of the whole pool.

    Raises:
      ValueError: the prompt is empty, or leaves no room for one new token.
    """
    num_prompt = len(request.prompt_token_ids)
    name = f"request {request.request_id!r}"
    if num_prompt == 0:
        raise ValueError(f"{name}: prompt_token_ids=[] must hold at least one token")
    max_tokens = request.params.max_tokens
    room = min(max_model_len, num_slots) - num_prompt
    if room < (0 if max_tokens == 0 else 1):
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens must leave room for "
            f"{'itself' if max_tokens == 0 else 'one new token'} in max_model_len={max_model_len} "
            f"and in the pool's {num_slots} token slots"
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        logging.warning(
            "%s: max_tokens=%d capped to %d: prompt of %d tokens, max_model_len=%d, pool of %d "
            "token slots",
            name,
            max_tokens,
            room,
            num_prompt,
            max_model_len,
            num_slots,
        )
        return room
    return max_tokens
