"""Replays a workload's requests on an engine as they come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.simulation.results import RequestRecord, TokenGaps, UseMeter
from paged_jax.simulation.traces import TraceRequest


class PromptMaker:
    """Makes random prompts; equal ids become equal tokens, so that a prefix cache finds them.

    An id is the seed of its tokens: two ids have the same ones only if as many random tokens are
    the same by chance. Prompts without ids share nothing, by the same chance.

    Args:
      vocab_size: tokens are below it.
      tokens_per_id: tokens that an id stands for, where requests have ids.
      seed: of all draws.
    """

    __slots__ = ("_num_alone", "_seed", "_tokens_per_id", "_vocab_size")

    def __init__(self, *, vocab_size: int, tokens_per_id: int | None, seed: int) -> None:
        self._vocab_size = vocab_size
        self._tokens_per_id = tokens_per_id
        self._seed = seed
        self._num_alone = 0

    def make(self, request: TraceRequest) -> list[int]:
        """The next prompt."""
        if self._tokens_per_id and request.prefix_ids:
            drawn = [self._draw(0, one, self._tokens_per_id) for one in request.prefix_ids]
            return np.concatenate(drawn)[: request.num_prompt].tolist()
        self._num_alone += 1
        return self._draw(1, self._num_alone, request.num_prompt).tolist()

    def _draw(self, kind: int, number: int, count: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, kind, number])
        return rng.integers(0, self._vocab_size, count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that the engine did not take, and what it said."""

    request_id: int
    reason: str


class EngineReplay:
    """Gives an engine requests when their time has come, and keeps what is needed for the figures.

    Times are wall time since ``run`` began. A request that is due while a step runs is handed in
    when that step returns; its latency counts from when it was due.

    Args:
      engine: with nothing to do.
      requests: in order of arrival.
      make_prompt: a prompt's tokens, of the request's length.
      max_seconds: stop then, whatever still runs; None: when all have ended.

    Attributes:
      records: of the requests that ended.
      refused: the requests that the engine refused.
      num_added: requests that came and were not refused.
      gaps: between tokens.
      meter: of the pool and of the requests that run.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[TraceRequest],
        *,
        make_prompt: Callable[[TraceRequest], list[int]],
        max_seconds: float | None = None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self.refused: list[Refusal] = []
        self.num_added = 0
        self.gaps, self.meter = TokenGaps(), UseMeter()
        self._engine = engine
        self._requests = requests
        self._make_prompt = make_prompt
        self._max_seconds = max_seconds
        self._next = 0
        self._begin = 0.0
        self._token_times: dict[str, float] = {}

    def run(self, *, on_step: Callable[[], None] = lambda: None) -> None:
        """Replay until all have ended, time is over, or the user interrupts (control-C).

        Args:
          on_step: called after every step.
        """
        self._begin = time.monotonic()
        try:
            while self._next < len(self._requests) or self._engine.has_unfinished:
                if self._max_seconds is not None and self._now() >= self._max_seconds:
                    break
                self._add_due()
                if self._engine.has_unfinished:
                    self._step()
                    on_step()
                elif self._next < len(self._requests):
                    self._sleep_until(self._requests[self._next].arrival)
        except KeyboardInterrupt:
            pass

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _sleep_until(self, due: float) -> None:
        end = due if self._max_seconds is None else min(due, self._max_seconds)
        # In pieces, so that no arrival is too far away for the operating system.
        time.sleep(min(max(end - self._now(), 0.0), 60.0))

    def _add_due(self) -> None:
        while self._next < len(self._requests):
            number, request = self._next, self._requests[self._next]
            if request.arrival > self._now():
                return
            self._next += 1
            params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
            try:
                self._engine.add_request(self._make_prompt(request), params, request_id=str(number))
            except ValueError as error:  # a reservation may find that its pool is too small
                self.refused.append(Refusal(request_id=number, reason=str(error)))
            else:
                self.num_added += 1

    def _step(self) -> None:
        engine, begin = self._engine, time.monotonic()
        outputs = engine.step()
        now = time.monotonic()
        num_ended = sum(output.finished for output in outputs)
        self.meter.add_batch(now - begin, num_requests=engine.scheduler.num_running + num_ended)
        self.meter.add_use(now - begin, engine.block_manager.memory_use())
        for output in outputs:
            self._take(output, now)

    def _take(self, output: RequestOutput, now: float) -> None:
        num_new = len(output.delta_token_ids)
        before = self._token_times.get(output.request_id)
        if before is not None and num_new:
            self.gaps.add(now - before)
        if num_new > 1:
            self.gaps.add(0.0, count=num_new - 1)  # drafts that were right come together
        if num_new:
            self._token_times[output.request_id] = now
        if output.finish_time is None or output.first_token_time is None:
            return
        del self._token_times[output.request_id]
        number = int(output.request_id)
        self.records.append(
            RequestRecord(
                request_id=number,
                arrival=self._requests[number].arrival,
                first_token=output.first_token_time - self._begin,
                end=output.finish_time - self._begin,
                num_prompt=len(output.prompt_token_ids),
                num_output=len(output.token_ids),
                num_cached=output.num_cached_tokens,
                num_preemptions=output.num_preemptions,
            )
        )


def warm_up(engine: Engine, *, seed: int) -> None:
    """Run batches of every padded size, so that a replay waits for no compilation.

    Args:
      engine: one of its own, with the settings of the replay's: compiled steps are shared, and
        neither cache nor record of the other one knows of it.
      seed: of the prompts.
    """
    rng = np.random.default_rng(seed)
    config = engine.config
    vocab_size = engine.model.spec.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    row_len = min(config.prefill_row_len, engine.max_model_len // 2)
    counts = [1 << power for power in range(config.max_num_seqs.bit_length())]
    for count in dict.fromkeys([*counts, config.max_num_seqs]):
        num_tokens = min(engine.block_manager.num_usable * config.block_size // count // 2, row_len)
        if num_tokens < 1:
            break
        engine.generate(rng.integers(0, vocab_size, (count, num_tokens)).tolist(), params)
