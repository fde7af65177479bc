"""The one mutable record of a token stream."""

from __future__ import annotations

import enum
from typing import Literal

from paged_jax.scheduling.request import Request

FinishReason = Literal["stop", "length", "cancelled"]


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """A token stream: its tokens, how many are computed, and where it stands.

    Compared and hashed by identity, so a late token of an ended stream can never reach a new one
    that reuses its request id. Tokens are counted thus::

        num_tokens   = prompt + output + pending
        num_computed = keys and values written by dispatched steps
        prefilling   : num_computed < num_prefill (prompt, and output tokens after a preemption)
        decoding     : num_computed == num_tokens - 1, the last token is the next input

    Attributes:
      seq_id: its key in the block manager; never used twice by one scheduler.
      request: what it answers.
      sample_index: which of the request's samples it is; it keys the random stream.
      max_tokens: the request's limit, capped to the room there is.
      prompt_token_ids: the prompt.
      output_token_ids: emitted tokens whose values are on the host.
      cumulative_logprob: a beam's sum of log-probabilities.
      num_pending: tokens sampled by dispatched steps, value not yet on the host; while drafts are
        verified, as many as there can be.
      num_computed: tokens whose keys and values are written by dispatched steps.
      num_prefill: tokens that prefill must compute before the next one is sampled.
      num_preemptions: how often it lost its blocks.
      state_slot: its entry in the device's row state, -1 while it has none.
      status: where it stands.
      finish_reason: 'stop', 'length', 'cancelled', or None while it lives.
      stop_reason: the token id or stop string that ended it, if one did.
    """

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "max_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prefill",
        "output_token_ids",
        "prompt_token_ids",
        "request",
        "sample_index",
        "seq_id",
        "state_slot",
        "status",
        "stop_reason",
    )

    def __init__(
        self, request: Request, *, seq_id: int, max_tokens: int, sample_index: int = 0
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample_index = sample_index
        self.max_tokens = max_tokens
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.num_pending = 0
        self.num_computed = 0
        self.num_prefill = len(self.prompt_token_ids)
        self.num_preemptions = 0
        self.state_slot = -1
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Emitted tokens whose values are on the host."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt, output and pending tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def max_computed(self) -> int:
        """Most tokens that will ever be computed: the last one emitted never is."""
        return len(self.prompt_token_ids) + max(self.max_tokens, 1) - 1

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Host-known tokens (prompt, then output) at positions ``start .. stop - 1``."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        head = self.prompt_token_ids[start:]
        return head + self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]

    def __repr__(self) -> str:
        return (
            f"Sequence(request_id={self.request.request_id!r}, seq_id={self.seq_id}, "
            f"status={self.status.value}, prompt={self.num_prompt}, output={self.num_output}, "
            f"pending={self.num_pending}, computed={self.num_computed})"
        )
