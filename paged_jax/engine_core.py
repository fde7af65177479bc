"""The engine's loop: schedule, execute, update, one step in flight.

While the device computes step k+1, the host reads the tokens of step k. The device feeds its own
samples to itself, so the host never holds it up (docs/design.md, "One step in flight").
"""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.config import EngineConfig, require
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
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence
from paged_jax.step_result import StepHandle
from paged_jax.text_stream import TextStream


class EngineCore:
    """Requests in, steps, outputs out; ``Engine`` adds the ways to use it."""

    def __init__(self, model: Model, *, config: EngineConfig | None = None) -> None:
        config = EngineConfig() if config is None else config
        require(isinstance(model, Model), f"model={model!r} must be a paged_jax.Model")
        require(isinstance(config, EngineConfig), f"config={config!r} must be an EngineConfig")
        self.config = config
        self.model = model
        self.num_blocks = resolve_num_blocks(config, model.spec)
        self.max_model_len = _resolve_max_model_len(config, model, self.num_blocks)
        self.block_manager = BlockManager(num_blocks=self.num_blocks, block_size=config.block_size)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_row_len=config.prefill_row_len,
            prefill_chunk_len=config.prefill_chunk_len,
            max_model_len=self.max_model_len,
            prefix_cache=config.prefix_cache,
        )
        self.executor = JaxExecutor(
            model,
            config,
            num_blocks=self.num_blocks,
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
        self._num_preemptions = 0
        self._prefix_stats = self.block_manager.prefix_stats()
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
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt.

        Args:
          prompt: text (needs a tokenizer) or token ids.
          params: how to sample and when to stop.
          request_id: a name not in use; None makes one.
          cache_salt: only requests with the same one share cached prefixes, so that a tenant cannot
            learn from a fast first token what another one sent. None is shared by all without.

        Returns:
          The request's id.

        Raises:
          ValueError: the prompt is empty, holds a token outside the vocabulary, or leaves no room
            for one new token of each completion in ``max_model_len`` or the pool; more completions
            than ``max_num_seqs`` are asked for; the parameters do not fit the model; the id is in
            use; the salt is empty or no string.
        """
        params = SamplingParams() if params is None else params
        return self._add(prompt, params, request_id=request_id, cache_salt=cache_salt).request_id

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
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
            names = (f"request-{number}" for number in self._counter)
            request_id = next(name for name in names if name not in self._by_id)
        request = Request(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.model.eos_token_ids,
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
        live = LiveRequest(request_id, completions, params, tuple(token_ids), seed)
        self._by_id[request_id] = live
        self._by_sequence.update(dict.fromkeys(group.sequences, live))
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
          An output for every request that got tokens or ended; with ``best_of`` above ``n`` only
          when it ended.

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
            raise
        finally:
            self._stepping.release()
        self.stats.step_seconds += time.perf_counter() - begin
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
            handle = self.executor.execute(plan)
            self._count(plan, handle)
        outputs += self._collect()
        if handle is not None:
            self._in_flight = (plan, handle)
        if self.config.debug_integrity:
            self.scheduler.check_integrity()
        return outputs

    def _schedule(self) -> Plan | NeedsValues:
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
        entries = dict(
            zip((row.sequence for row in plan.sampling_rows), result.logprobs, strict=True)
        )
        begin = time.perf_counter()
        updates = self.scheduler.update(plan, result.token_ids)
        self.stats.schedule_seconds += time.perf_counter() - begin
        self.stats.num_output_tokens += len(updates)
        for sequence, position, entry in result.prompt_logprobs:
            if sequence in self._by_sequence:
                self._by_sequence[sequence].take_prompt_entry(position, entry)
        # A request that only scores its prompt ends without a token.
        changed = {row.sequence: None for row in plan.prefill_rows if row.sequence.is_finished}
        for sequence, token_id in updates:
            changed[sequence] = None
            live = self._by_sequence[sequence]
            stopped = live.take_token(sequence, token_id, entries[sequence], now)
            if stopped is not None:
                self.scheduler.finish(sequence, "stop", stopped)
        lives = dict.fromkeys(self._by_sequence[s] for s in changed if s in self._by_sequence)
        outputs = [live.output() for live in lives if live.has_output]
        for live in lives:
            if live.is_finished:
                self._forget(live)
        return outputs

    def _forget(self, live: LiveRequest) -> None:
        del self._by_id[live.request_id]
        for completion in live.completions:
            del self._by_sequence[completion.sequence]

    def _count(self, plan: Plan, handle: StepHandle) -> None:
        stats, manager = self.stats, self.block_manager
        stats.num_steps += 1
        stats.num_prompt_tokens += sum(row.num_new for row in plan.prefill_rows)
        stats.num_positions += handle.num_positions
        stats.num_padding_positions += handle.num_positions - handle.num_real_positions
        stats.num_copied_blocks += len(plan.copies)
        num_preemptions = self.scheduler.num_preemptions
        stats.num_preemptions += num_preemptions - self._num_preemptions
        self._num_preemptions = num_preemptions
        prefixes, before = manager.prefix_stats(), self._prefix_stats
        stats.prefix_cache_queries += prefixes.query_tokens - before.query_tokens
        stats.prefix_cache_hits += prefixes.hit_tokens - before.hit_tokens
        self._prefix_stats = prefixes
        stats.pack_seconds += handle.pack_seconds
        blocks = manager.stats()
        stats.peak_used_blocks = max(stats.peak_used_blocks, blocks.used)
        stats.used_slots += blocks.used * manager.block_size
        stats.filled_slots += blocks.filled

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


def _resolve_max_model_len(config: EngineConfig, model: Model, num_blocks: int) -> int:
    longest = model.spec.max_position
    require(
        config.max_model_len is None or config.max_model_len <= longest,
        f"max_model_len={config.max_model_len} must be at most the model's {longest}",
    )
    room = (num_blocks - 1) * config.block_size
    return min(config.max_model_len or longest, room)
