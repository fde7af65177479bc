"""The engine's loop: schedule, execute, update, one step in flight.

While the device computes step k+1, the host reads the tokens of step k. The device feeds its own
samples to itself, so the host never holds it up (docs/design.md, "One step in flight").
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from paged_jax.blocks.namespace import Namespace
from paged_jax.config import EngineConfig, require
from paged_jax.engine_counters import StepCounters
from paged_jax.engine_parts import (
    check_priority,
    make_block_manager,
    make_scheduler,
    resolve_max_model_len,
)
from paged_jax.engine_record import EngineRecord, open_event_log
from paged_jax.executor import JaxExecutor
from paged_jax.live_request import LiveCompletion, LiveRequest
from paged_jax.metrics import EngineStats
from paged_jax.model import Model
from paged_jax.outputs import PrefixHandle, RequestOutput
from paged_jax.pool import resolve_num_blocks
from paged_jax.prompts import Prompt, encode_prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.plan import NeedsValues, Plan
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sequence import Sequence
from paged_jax.step_result import StepHandle
from paged_jax.text_stream import TextStream


class EngineCore:
    """Requests in, steps, outputs out; ``Engine`` adds the ways to use it."""

    _executor_type: ClassVar[type[JaxExecutor]] = JaxExecutor

    def __init__(self, model: Model, *, config: EngineConfig | None = None) -> None:
        config = EngineConfig() if config is None else config
        require(isinstance(model, Model), f"model={model!r} must be a paged_jax.Model")
        require(isinstance(config, EngineConfig), f"config={config!r} must be an EngineConfig")
        self.config = config
        self.model = model
        self.num_blocks = resolve_num_blocks(config, model.spec)
        self.max_model_len = resolve_max_model_len(config, model, self.num_blocks)
        log = self.event_log = open_event_log(config, num_blocks=self.num_blocks)
        self.block_manager = make_block_manager(
            config,
            model,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            observer=None if log is None else log.take,
        )
        self.scheduler = make_scheduler(
            config, model, self.block_manager, max_model_len=self.max_model_len
        )
        self._record = log and EngineRecord(
            log, scheduler=self.scheduler, block_manager=self.block_manager
        )
        self.executor = self._executor_type(
            model,
            config,
            num_blocks=self.num_blocks,
            num_host_blocks=self.block_manager.num_host_blocks,
            max_model_len=self.max_model_len,
            table_of=self.block_manager.table_array,
            seed_of=lambda sequence: self._by_sequence[sequence].seed,
        )
        self.stats = EngineStats()
        self._by_id: dict[str, LiveRequest] = {}
        self._by_sequence: dict[Sequence, LiveRequest] = {}
        self._in_flight: tuple[Plan, StepHandle] | None = None
        self._ready: list[RequestOutput] = []
        self._dead: BaseException | None = None
        self._stepping = threading.Lock()
        self._counters = StepCounters(
            self.stats,
            self.scheduler,
            self.block_manager,
            block_nbytes=self.executor.pool.block_nbytes,
        )
        self._prefixes: set[PrefixHandle] = set()
        self._num_cache_resets = 0
        self._counter = itertools.count()
        self._seeds = np.random.Generator(np.random.PCG64(config.seed))

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` still has work to do or outputs to give."""
        return bool(self._by_id or self._ready or self._in_flight)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold now."""
        return self.block_manager.num_usable - self.block_manager.num_free

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt.

        Args:
          prompt: text (needs a tokenizer) or token ids.
          params: how to sample and when to stop.
          request_id: a name not in use; None makes one.
          priority: with ``EngineConfig.scheduling='priority'``: requests of a lower one start
            first and are preempted last.
          cache_salt: only requests with the same one share cached prefixes, so that a tenant cannot
            learn from a fast first token what another one sent. None is shared by all without.

        Returns:
          The request's id.

        Raises:
          ValueError: the prompt is empty, holds a token outside the vocabulary, or leaves no room
            for one new token of each completion in ``max_model_len`` or the pool; more completions
            than ``max_num_seqs`` are asked for; the parameters do not fit the model; the id is in
            use; the salt is empty or no string; the priority is no integer, or not 0 without
            ``scheduling='priority'``.
        """
        params = SamplingParams() if params is None else params
        check_priority(priority, self.config)
        live = self._add(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return live.request_id

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        is_prefix: bool = False,
    ) -> LiveRequest:
        self._check_alive()
        require(
            isinstance(params, SamplingParams),
            f"params={params!r} must be SamplingParams or None",
        )
        params.validate_for(self.model.spec.vocab_size)
        require(
            not (params.stop and self.model.tokenizer is None),
            f"stop={params.stop!r} needs a model with a tokenizer",
        )
        token_ids = encode_prompt(prompt, self.model)
        require(
            request_id is None or isinstance(request_id, str),
            f"request_id={request_id!r} must be a string or None",
        )
        if request_id is None:
            used = self._by_id.keys() | {output.request_id for output in self._ready}
            names = (f"request-{number}" for number in self._counter)
            request_id = next(name for name in names if name not in used)
        request = Request(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.model.eos_token_ids,
            priority=priority,
            namespace=self._namespace(cache_salt),
            is_prefix=is_prefix,
        )
        group = self.scheduler.add(request)
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(0, 2**64, dtype=np.uint64))
        completions = tuple(
            LiveCompletion(one, params, self._text_stream(params)) for one in group.sequences
        )
        live = LiveRequest(request_id, completions, params, tuple(token_ids), seed, group.beam)
        self._by_id[request_id] = live
        self._by_sequence.update(dict.fromkeys(group.sequences, live))
        if self._record is not None:
            self._record.arrive(group.sequences)
        return live

    def cancel(self, request_id: str) -> bool:
        """End a request now and free its blocks; its last output comes with the next ``step``.

        Returns:
          Whether there was such a request; cancelling twice or an unknown id does nothing.
        """
        live = self._by_id.get(request_id)
        if live is None:
            return False
        self.scheduler.cancel(request_id)
        self._ready.append(live.output())
        self._forget(live)
        return True

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, then collect the one before it.

        Returns:
          An output for every request that got tokens or ended; with ``best_of`` above ``n``, or
          beams, only when it ended.

        Raises:
          RuntimeError: an earlier step failed, so the pool's content is unknown; or another thread
            is inside a step (that one goes on).
          FloatingPointError: NaN logits, with ``EngineConfig.check_logits``.
        """
        self._check_alive()
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError(
                "this engine is inside a step already: one thread at a time may use it"
            )
        begin = time.perf_counter()
        try:
            outputs, self._ready = self._ready, []
            outputs += self._step()
        except BaseException as error:
            self._dead = error
            if self._record is not None:
                self._record.fail(error)
            raise
        finally:
            self._stepping.release()
        self.stats.step_seconds += time.perf_counter() - begin
        if self._record is not None and not self.has_unfinished:
            self._record.flush()
        return outputs

    def _step(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        plan = self._schedule()
        if isinstance(plan, NeedsValues):
            outputs += self._collect()
            plan = self._schedule()
            assert not isinstance(plan, NeedsValues)  # nothing is in flight any more
        handle = None
        if not plan.is_empty:
            self._zero_freed()
            handle = self.executor.execute(plan)
            blocks = self._counters.dispatch(plan, handle)
            if self._record is not None:
                self._record.dispatch(plan, blocks)
        outputs += self._collect()
        self._zero_freed()
        if handle is not None:
            self._in_flight = (plan, handle)
        if self.config.debug_integrity:
            self.scheduler.check_integrity()
        return outputs

    def _settle(self) -> None:
        """With nothing alive: wait for the step in flight and give back all that it held."""
        try:
            self._ready += self._collect()
            self.block_manager.begin_step()
            self._zero_freed()
        except BaseException as error:
            self._dead = error
            raise

    def _zero_freed(self) -> None:
        """With ``zero_on_free``: overwrite what became free, before any later use of it."""
        if self.config.zero_on_free:
            self.executor.zero(self.block_manager.take_freed())

    def _schedule(self) -> Plan | NeedsValues:
        if self._record is not None:
            self._record.begin_step()
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        self.stats.schedule_seconds += time.perf_counter() - begin
        return plan

    def _collect(self) -> list[RequestOutput]:
        """Wait for the step in flight, if any, and hand its values out."""
        if self._in_flight is None:
            return []
        (plan, handle), self._in_flight = self._in_flight, None
        result = handle.result()
        now = time.monotonic()
        logprobs = iter(result.logprobs)
        entries = {
            row.sequence: deque(itertools.islice(logprobs, row.num_sampled))
            for row in plan.sampling_rows
        }
        take_seconds = 0.0

        def take_token(sequence: Sequence, token_id: int) -> str | None:
            nonlocal take_seconds
            begin = time.perf_counter()
            live, entry = self._by_sequence[sequence], entries[sequence].popleft()
            stopped = live.take_token(sequence, token_id, entry, now)
            take_seconds += time.perf_counter() - begin
            return stopped

        begin = time.perf_counter()
        updates = self.scheduler.update(
            plan, result.token_ids, result.candidates, take_token=take_token
        )
        self.stats.schedule_seconds += time.perf_counter() - begin - take_seconds
        self.stats.num_output_tokens += len(updates)
        self._counters.collect()
        for sequence, position, entry in result.prompt_logprobs:
            if sequence in self._by_sequence:
                self._by_sequence[sequence].take_prompt_entry(position, entry)
        # A request that only scores its prompt ends without a token.
        changed = {row.sequence: None for row in plan.prefill_rows if row.sequence.is_finished}
        changed |= self._collect_beams(result.candidates, now)
        changed |= dict.fromkeys(sequence for sequence, _ in updates)
        lives = dict.fromkeys(self._by_sequence[s] for s in changed if s in self._by_sequence)
        outputs = [live.output() for live in lives if live.has_output]
        for live in lives:
            if live.is_finished:
                self._forget(live)
        return outputs

    def _collect_beams(self, searches: Iterable[Request], now: float) -> dict[Sequence, None]:
        """The first sequence of each of these beam searches that ended with this step."""
        ended: dict[Sequence, None] = {}
        for request in searches:
            live = self._by_id.get(str(request.request_id))
            if live is None or live.beam is None or live.sequence.request is not request:
                continue
            live.note_token(now)
            if live.is_finished:
                ended[live.sequence] = None
                best = live.beam.hypotheses[: live.params.n]
                self.stats.num_output_tokens += sum(len(one.token_ids) for one in best)
        return ended

    def _forget(self, live: LiveRequest) -> None:
        del self._by_id[live.request_id]
        for completion in live.completions:
            del self._by_sequence[completion.sequence]
        if self._record is not None:
            self._record.end([completion.sequence for completion in live.completions])

    def _namespace(self, cache_salt: str | None) -> Namespace:
        """Whose cached blocks a new request shares.

        The pool is the engine's own, so the weights' identity need only differ from that of
        weights which the engine had before.
        """
        require(
            cache_salt is None or (isinstance(cache_salt, str) and cache_salt != ""),
            f"cache_salt={cache_salt!r} must be a string that is not empty, or None",
        )
        model = f"{self.model.name}, reset {self._num_cache_resets} times"
        return Namespace(model=model, salt=cache_salt)

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.model.tokenizer is None:
            return None
        return TextStream(
            self.model.tokenizer.token_bytes,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise RuntimeError(
                "this engine stopped in a step "
                f"({type(self._dead).__name__}: {self._dead}); make a new one"
            ) from self._dead
