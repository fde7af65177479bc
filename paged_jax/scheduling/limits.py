"""Which requests are refused, and how many tokens the others may emit."""

from __future__ import annotations

from absl import logging

from paged_jax.scheduling.request import Request
from paged_jax.scheduling.window import most_blocks


def capped_max_tokens(
    request: Request,
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_usable: int,
    block_size: int,
    window: int | None = None,
) -> int:
    """Tokens that ``request`` may emit, within the context limit and the whole pool.

    A limit beyond the room is capped with one logged warning; None silently means all of the room.
    ``max_tokens=0`` (scoring) needs room for the prompt only.

    Args:
      request: a request that is about to be added.
      max_num_seqs: most running sequences.
      max_model_len: longest context in tokens, prompt and output together.
      num_usable: blocks of the whole pool.
      block_size: token positions a block.
      window: keys that a query sees at most in any layer; None: everything before it.

    Raises:
      ValueError: the prompt is empty, or leaves no room for one new token of each
        sequence, or there are more sequences than ``max_num_seqs``.
    """
    num_prompt = len(request.prompt_token_ids)
    name = f"request {request.request_id!r}"
    if num_prompt == 0:
        raise ValueError(f"{name}: prompt_token_ids=[] must hold at least one token")
    if request.num_samples > max_num_seqs:
        raise ValueError(
            f"{name}: n={request.num_samples} sequences (n or best_of) must be at most "
            f"max_num_seqs={max_num_seqs}"
            if not request.is_search
            else f"{name}: beam_width={request.num_samples} must be at most "
            f"max_num_seqs={max_num_seqs}"
        )
    num_slots = _num_slots(request, num_usable, block_size)
    most_each = most_blocks(max_model_len, window, block_size)
    if window is not None and request.num_samples * most_each <= num_usable:
        num_slots = max_model_len  # what leaves the window makes room for what comes
    max_tokens = request.params.max_tokens
    room = min(max_model_len, num_slots) - num_prompt
    if room < (0 if max_tokens == 0 else 1):
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens must leave room for "
            f"{'itself' if max_tokens == 0 else 'one new token'} in max_model_len={max_model_len} "
            f"and in the pool's {num_slots} token slots{_each(request)}"
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        logging.warning(
            "%s: max_tokens=%d capped to %d: prompt of %d tokens, max_model_len=%d, pool of %d "
            "token slots%s",
            name,
            max_tokens,
            room,
            num_prompt,
            max_model_len,
            num_slots,
            _each(request),
        )
        return room
    return max_tokens


def _num_slots(request: Request, num_usable: int, block_size: int) -> int:
    """Longest context of each sequence of a request that has the whole pool, in tokens.

    Full prompt blocks are shared; all others are each sequence's own.
    """
    shared = min(len(request.prompt_token_ids) // block_size, num_usable)
    return (shared + (num_usable - shared) // request.num_samples) * block_size


def _each(request: Request) -> str:
    return f" for each of its {request.num_samples} sequences" if request.num_samples > 1 else ""
