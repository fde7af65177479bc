"""What a user asked for, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

from paged_jax.blocks.namespace import Namespace

if TYPE_CHECKING:
    from paged_jax.sampling.params import SamplingParams

DEFAULT_NAMESPACE = Namespace()


class Request:
    """One prompt with its parameters; compared by identity.

    Args:
      request_id: the user's handle; may be used again once the request has ended.
      prompt_token_ids: the prompt.
      params: limits and stop conditions. The scheduler reads ``num_samples``, ``max_tokens``,
        ``min_tokens``, ``stop_token_ids``, ``ignore_eos``, ``prompt_logprobs``,
        ``needs_penalties`` and those of beam search only.
      eos_token_ids: the model's end tokens.
      priority: requests of a lower one are served first; the same for all: first come, first
        served.
      namespace: with whom it shares cached blocks.
      is_prefix: its prompt is to stay resident (``params.max_tokens`` is 0, ``num_samples`` 1).
      expected_output: tokens that each sequence will emit, where somebody knows: contiguous
        reservations go by it. None: as many as it may.

    Attributes:
      arrival: its place in the line, -1 until the scheduler has added it.
      num_cached_tokens: prompt tokens that were not computed, since they were cached when it
        started first.
      num_samples: sequences that answer it.
      is_search: whether they are the beams of a beam search.
      pin_id: the block manager's name of the resident prompt, None before it is computed.
      stop_ids: token ids that end it: its stop tokens and, unless ignored, the end tokens.
    """

    __slots__ = (
        "arrival",
        "eos_token_ids",
        "expected_output",
        "is_prefix",
        "is_search",
        "namespace",
        "num_cached_tokens",
        "num_samples",
        "params",
        "pin_id",
        "priority",
        "prompt_token_ids",
        "request_id",
        "stop_ids",
    )

    def __init__(
        self,
        request_id: Hashable,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Collection[int] = (),
        priority: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
        is_prefix: bool = False,
        expected_output: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.eos_token_ids = frozenset(eos_token_ids)
        self.priority = priority
        self.namespace = namespace
        self.is_prefix = is_prefix
        self.expected_output = expected_output
        self.arrival = -1
        self.num_cached_tokens = 0
        self.pin_id: int | None = None
        self.num_samples = params.num_samples
        self.is_search = params.beam_width is not None
        ends = () if params.ignore_eos else self.eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids or ()).union(ends)
