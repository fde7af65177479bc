"""What the engine keeps of a request from its arrival to its last output."""

from __future__ import annotations

import dataclasses
import time

from paged_jax.outputs import PositionLogprobs, RequestOutput
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.sequence import Sequence
from paged_jax.text_stream import TextStream


@dataclasses.dataclass(slots=True, eq=False)
class LiveRequest:
    """A request's sequence, text and log-probabilities so far.

    Attributes:
      request_id: the request's id.
      sequence: its token stream.
      params: as given.
      prompt_token_ids: the prompt.
      seed: of its random stream, the user's or drawn by the engine.
      text: its text, or None without a tokenizer.
      arrival_time: ``time.monotonic()``, seconds.
      first_token_time: likewise, None before.
    """

    request_id: str
    sequence: Sequence
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    seed: int
    text: TextStream | None
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    first_token_time: float | None = None
    _num_reported: int = 0
    _delta_text: str = ""
    _logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    _prompt_logprobs: list[PositionLogprobs | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self.prompt_token_ids)

    def take_token(self, token_id: int, entry: PositionLogprobs | None, now: float) -> str | None:
        """Take the sequence's newest token; return the stop string that it completed, if any.

        A stop token that ended the sequence is in ``token_ids`` but adds no text.
        """
        if self.first_token_time is None:
            self.first_token_time = now
        if entry is not None:
            self._logprobs.append(entry)
        if self.text is None or self.sequence.finish_reason == "stop":
            return None
        self._delta_text += self.text.push(token_id)
        return self.text.stopped

    def take_prompt_entry(self, position: int, entry: PositionLogprobs) -> None:
        """Take a prompt position's log-probabilities; a recomputed prompt changes nothing."""
        if self._prompt_logprobs[position] is None:
            self._prompt_logprobs[position] = entry

    def output(self) -> RequestOutput:
        """What to give the user now; deltas count from the last call."""
        sequence, params = self.sequence, self.params
        if sequence.is_finished and self.text is not None:
            self._delta_text += self.text.finish()
        token_ids = tuple(sequence.output_token_ids)
        delta_token_ids = token_ids[self._num_reported :]
        self._num_reported = len(token_ids)
        delta_text, self._delta_text = self._delta_text, ""
        wants_prompt = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=token_ids,
            text=self.text.text if self.text is not None else "",
            delta_token_ids=delta_token_ids,
            delta_text=delta_text,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=tuple(self._logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if wants_prompt else None,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finish_time=time.monotonic() if sequence.is_finished else None,
            num_preemptions=sequence.num_preemptions,
        )
