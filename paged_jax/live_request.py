"""What the engine keeps of a request from its arrival to its last output."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as SequenceOf

from paged_jax.outputs import Completion, PositionLogprobs, RequestOutput
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.beam import BeamSearch
from paged_jax.scheduling.sequence import Sequence
from paged_jax.text_stream import TextStream


@dataclasses.dataclass(slots=True, eq=False)
class LiveCompletion:
    """One sequence's text and log-probabilities so far.

    Attributes:
      sequence: its token stream.
      params: of the request.
      text: its text, or None without a tokenizer.
      cumulative_logprob: sum of its tokens' log-probabilities, as far as they were asked for.
    """

    sequence: Sequence
    params: SamplingParams
    text: TextStream | None
    cumulative_logprob: float = 0.0
    _num_reported: int = 0
    _delta_text: str = ""
    _logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token; -inf without a token."""
        count = len(self.sequence.output_token_ids)
        return self.cumulative_logprob / count if count else -float("inf")

    def take_token(self, token_id: int, entry: PositionLogprobs | None) -> str | None:
        """Take the sequence's newest token; return the stop string that it completed, if any.

        A stop token that ended the sequence is in ``token_ids`` but adds no text.
        """
        if entry is not None:
            self.cumulative_logprob += entry.logprob
            if self.params.logprobs is not None:
                self._logprobs.append(entry)
        if self.text is None or self.sequence.finish_reason == "stop":
            return None
        self._delta_text += self.text.push(token_id)
        return self.text.stopped

    def whole_text(self, token_ids: SequenceOf[int]) -> str:
        """The text of a whole output; "" without a tokenizer."""
        if self.text is None:
            return ""
        for token_id in token_ids:
            self.text.push(token_id)
        self.text.finish()
        return self.text.text

    def output(self) -> Completion:
        """What to give the user now; deltas count from the last call."""
        sequence, params = self.sequence, self.params
        if sequence.is_finished and self.text is not None:
            self._delta_text += self.text.finish()
        token_ids = tuple(sequence.output_token_ids)
        delta_token_ids = token_ids[self._num_reported :]
        self._num_reported = len(token_ids)
        delta_text, self._delta_text = self._delta_text, ""
        return Completion(
            index=sequence.sample_index,
            token_ids=token_ids,
            text=self.text.text if self.text is not None else "",
            delta_token_ids=delta_token_ids,
            delta_text=delta_text,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=tuple(self._logprobs) if params.logprobs is not None else None,
            cumulative_logprob=None if params.num_logprobs is None else self.cumulative_logprob,
        )


@dataclasses.dataclass(slots=True, eq=False)
class LiveRequest:
    """A request's completions so far.

    Attributes:
      request_id: the request's id.
      completions: one a sequence, in order of ``sample_index``.
      params: as given.
      prompt_token_ids: the prompt.
      seed: of its random streams, the user's or drawn by the engine.
      beam: the search that its sequences are used for, if one is.
      arrival_time: ``time.monotonic()``, seconds.
      first_token_time: likewise, None before.
    """

    request_id: str
    completions: tuple[LiveCompletion, ...]
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    seed: int
    beam: BeamSearch | None = None
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    first_token_time: float | None = None
    _prompt_logprobs: list[PositionLogprobs | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def sequence(self) -> Sequence:
        """The first completion's token stream."""
        return self.completions[0].sequence

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.sequence.is_finished for completion in self.completions)

    @property
    def has_output(self) -> bool:
        """Whether there is something to tell now: the best ones are known only at the end."""
        return self.is_finished or not (self.params.is_ranked or self.beam)

    def take_token(
        self, sequence: Sequence, token_id: int, entry: PositionLogprobs | None, now: float
    ) -> str | None:
        """Take a sequence's newest token; return the stop string that it completed, if any."""
        self.note_token(now)
        mine = next(
            completion for completion in self.completions if completion.sequence is sequence
        )
        return mine.take_token(token_id, entry)

    def note_token(self, now: float) -> None:
        """Remember when the first token came."""
        if self.first_token_time is None:
            self.first_token_time = now

    def take_prompt_entry(self, position: int, entry: PositionLogprobs) -> None:
        """Take a prompt position's log-probabilities; a recomputed prompt changes nothing."""
        if self._prompt_logprobs[position] is None:
            self._prompt_logprobs[position] = entry

    def output(self) -> RequestOutput:
        """What to give the user now; deltas count from the last call."""
        wants_prompt = self.params.prompt_logprobs is not None
        sequences = [completion.sequence for completion in self.completions]
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._beam_outputs(self.beam) if self.beam else self._sampled_outputs(),
            prompt_logprobs=tuple(self._prompt_logprobs) if wants_prompt else None,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finish_time=time.monotonic() if self.is_finished else None,
            num_preemptions=max(sequence.num_preemptions for sequence in sequences),
            num_cached_tokens=self.sequence.request.num_cached_tokens,
        )

    def _sampled_outputs(self) -> tuple[Completion, ...]:
        completions = list(self.completions)
        if self.params.is_ranked:
            completions.sort(key=lambda completion: -completion.mean_logprob)
        return tuple(completion.output() for completion in completions[: self.params.n])

    def _beam_outputs(self, beam: BeamSearch) -> tuple[Completion, ...]:
        """The best hypotheses of a search that has ended; their text is made only now."""
        outputs = []
        best = beam.hypotheses[: self.params.n]
        for index, (hypothesis, completion) in enumerate(zip(best, self.completions, strict=False)):
            is_stopped = hypothesis.stop_reason is not None
            text = completion.whole_text(hypothesis.token_ids[: -1 if is_stopped else None])
            outputs.append(
                Completion(
                    index=index,
                    token_ids=hypothesis.token_ids,
                    text=text,
                    delta_token_ids=hypothesis.token_ids,
                    delta_text=text,
                    finish_reason=hypothesis.finish_reason,
                    stop_reason=hypothesis.stop_reason,
                    logprobs=None,
                    cumulative_logprob=hypothesis.logprob,
                    score=hypothesis.score,
                )
            )
        return tuple(outputs)
