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
class Completion:
    """The state of one completion of a prompt after a step.

    Attributes:
      index: which of the request's samples it is, from 0; with the seed, it keys the random stream.
        With beams: its rank.
      token_ids: all generated tokens so far.
      text: all generated text so far ("" without a tokenizer); cut at a stop string.
      delta_token_ids: tokens that are new since the last output of this request.
      delta_text: text that is new; the deltas of a completion add up to ``text``.
      finish_reason: None while it runs, then 'stop', 'length' or 'cancelled'.
      stop_reason: the stop string or the stop token id that ended it, if one did.
      logprobs: one entry a generated token, when asked for.
      cumulative_logprob: sum of the generated tokens' log-probabilities (natural logarithms, of the
        model's own logits), with ``logprobs`` or ``best_of``. With beams: of the biased logits.
      score: with beams, what they are ranked by: ``cumulative_logprob / length ** length_penalty``.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    delta_token_ids: tuple[int, ...]
    delta_text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[PositionLogprobs, ...] | None
    cumulative_logprob: float | None
    score: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The state of one request after a step.

    What belongs to one completion (``token_ids``, ``text``, ...) is that of the first one.

    Attributes:
      request_id: the request's id.
      prompt_token_ids: the prompt.
      outputs: the ``SamplingParams.n`` completions, by index; with ``best_of`` or beams, best
        first. Of a beam search there may be fewer: as many as there are.
      prompt_logprobs: one entry a prompt token (None for the first), when asked for.
      arrival_time: seconds, ``time.monotonic()``, as are the next two.
      first_token_time: when the first token of any completion reached the host.
      finish_time: when the last completion ended; None before.
      num_preemptions: times that the request lost its blocks, was swapped out or recomputed.
      num_cached_tokens: prompt tokens that were not computed: the prefix cache had them when the
        request started.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int
    num_cached_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All generated tokens so far."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """All generated text so far."""
        return self.outputs[0].text

    @property
    def delta_token_ids(self) -> tuple[int, ...]:
        """Tokens that are new since the last output of this request."""
        return self.outputs[0].delta_token_ids

    @property
    def delta_text(self) -> str:
        """Text that is new."""
        return self.outputs[0].delta_text

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended; None while it runs."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the stop token id that ended the first completion, if one did."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """One entry a generated token, when asked for."""
        return self.outputs[0].logprobs

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output: all its completions have ended."""
        return self.finish_time is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixHandle:
    """A registered prefix (``Engine.register_prefix``); compared by identity.

    Attributes:
      prefix_id: its name in the engine that made it.
      token_ids: what is resident.
      cache_salt: the salt of the requests that may share it.
    """

    prefix_id: int
    token_ids: tuple[int, ...]
    cache_salt: str | None
