"""What the engine gives back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: raw log-softmax, whatever the sampling parameters.

    Attributes:
      token_id: the token that stands there.
      logprob: its natural-log probability.
      rank: 1 for the most likely token.
      top: the most likely tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The state of one request after a step.

    Attributes:
      request_id: the request's id.
      prompt_token_ids: the prompt.
      token_ids: all generated tokens so far.
      text: all generated text so far ("" without a tokenizer); cut at a stop string.
      delta_token_ids: tokens that are new since the last output of this request.
      delta_text: text that is new; the deltas of a request add up to ``text``.
      finish_reason: None while it runs, then 'stop', 'length' or 'cancelled'.
      stop_reason: the stop string or the stop token id that ended it, if one did.
      logprobs: one entry a generated token, when asked for.
      prompt_logprobs: one entry a prompt token (None for the first), when asked for.
      arrival_time: seconds, ``time.monotonic()``, as are the next two.
      first_token_time: when the first token reached the host.
      finish_time: when the request ended.
      num_preemptions: times that it lost its blocks and was recomputed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta_token_ids: tuple[int, ...]
    delta_text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[PositionLogprobs, ...] | None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None
