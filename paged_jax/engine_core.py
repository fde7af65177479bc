"""The engine's loop: schedule, execute, update, one step in flight.

While the device computes step k+1, the host reads the tokens of step k. The device feeds its own
samples to itself, so the host never holds it up (docs/design.md, "One step in flight").
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

import jax
import numpy as np

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.namespace import Namespace
from paged_jax.config import EngineConfig, require
from paged_jax.engine_record import EngineRecord, open_event_log
from paged_jax.executor import JaxExecutor
from paged_jax.host_pool import resolve_num_host_blocks
from paged_jax.live_request import LiveCompletion, LiveRequest
from paged_jax.metrics import EngineStats
from paged_jax.model import Model
from paged_jax.outputs import PrefixHandle, RequestOutput
from paged_jax.pool import bytes_per_block, resolve_num_blocks
from paged_jax.prompts import Prompt, encode_prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.ngram import NgramDrafter
from paged_jax.scheduling.plan import NeedsValues, Plan
from paged_jax.scheduling.preemption import PreemptionCosts, default_costs
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence
from paged_jax.scheduling.window import most_blocks
from paged_jax.step_result import StepHandle
from paged_jax.text_stream import TextStream
from pallas_kernels.devices import current_device


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
        block_nbytes = bytes_per_block(
            model.spec,
            block_size=config.block_size,
            dtype=config.kv_dtype,
            head_dim=config.pool_head_dim,
        )
        num_host_blocks = resolve_num_host_blocks(
            config, num_blocks=self.num_blocks, block_nbytes=block_nbytes
        )
        log = self.event_log = open_event_log(config, num_blocks=self.num_blocks)
        self.block_manager = BlockManager(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            tracks_freed=config.zero_on_free,
            observer=None if log is None else log.take,
            num_host_blocks=num_host_blocks,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_row_len=config.prefill_row_len,
            prefill_chunk_len=config.prefill_chunk_len,
            max_model_len=self.max_model_len,
            window=model.spec.window,
            preemptor=Preemptor(
                self.block_manager,
                mode=config.preemption,
                costs=_preemption_costs(config, model),
                block_nbytes=block_nbytes,
            ),
            drafter=None if config.speculation is None else NgramDrafter(config.speculation),
            prefix_cache=config.prefix_cache,
        )
        self._record = log and EngineRecord(
            log, scheduler=self.scheduler, block_manager=self.block_manager
        )
        self.executor = JaxExecutor(
            model,
            config,
            num_blocks=self.num_blocks,
            num_host_blocks=num_host_blocks,
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
        _check_priority(priority, self.config)
        if request_id is None:
            names = (f"request-{number}" for number in self._counter)
            request_id = next(name for name in names if name not in self._by_id)
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
            self._count(plan, handle)
        outputs += self._collect()
        self._zero_freed()
        if handle is not None:
            self._in_flight = (plan, handle)
        if self.config.debug_integrity:
            self.scheduler.check_integrity()
        return outputs

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
        self._count_drafts()
        for sequence, position, entry in result.prompt_logprobs:
            if sequence in self._by_sequence:
                self._by_sequence[sequence].take_prompt_entry(position, entry)
        # A request that only scores its prompt ends without a token.
        changed = {row.sequence: None for row in plan.prefill_rows if row.sequence.is_finished}
        changed |= self._collect_beams(plan, now)
        changed |= dict.fromkeys(sequence for sequence, _ in updates)
        lives = dict.fromkeys(self._by_sequence[s] for s in changed if s in self._by_sequence)
        outputs = [live.output() for live in lives if live.has_output]
        for live in lives:
            if live.is_finished:
                self._forget(live)
        return outputs

    def _collect_beams(self, plan: Plan, now: float) -> dict[Sequence, None]:
        """The first sequence of each beam search that ended with this step."""
        lives = dict.fromkeys(self._by_sequence.get(row.sequence) for row in plan.sampling_rows)
        ended: dict[Sequence, None] = {}
        for live in lives:
            if live is None or live.beam is None:
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

    def _count(self, plan: Plan, handle: StepHandle) -> None:
        stats, manager = self.stats, self.block_manager
        stats.num_steps += 1
        stats.num_prompt_tokens += sum(row.num_new for row in plan.prefill_rows)
        stats.num_positions += handle.num_positions
        stats.num_padding_positions += handle.num_positions - handle.num_real_positions
        stats.num_copied_blocks += len(plan.copies)
        self._count_preemptions(plan)
        prefixes, before = manager.prefix_stats(), self._prefix_stats
        stats.prefix_cache_queries += prefixes.query_tokens - before.query_tokens
        stats.prefix_cache_hits += prefixes.hit_tokens - before.hit_tokens
        self._prefix_stats = prefixes
        stats.pack_seconds += handle.pack_seconds
        blocks = manager.stats()
        stats.peak_used_blocks = max(stats.peak_used_blocks, blocks.used)
        stats.used_slots += blocks.used * manager.block_size
        stats.filled_slots += blocks.filled
        if self._record is not None:
            self._record.dispatch(plan, blocks)

    def _count_preemptions(self, plan: Plan) -> None:
        stats = self.stats
        for preemption in plan.preemptions:
            num_sequences = len(preemption.sequences)
            stats.num_preemptions += num_sequences
            stats.num_swap_preemptions += num_sequences * preemption.is_swap
            stats.num_swap_refusals += num_sequences * preemption.is_refused
        stats.num_swapped_out_blocks += len(plan.swap_outs)
        stats.num_swapped_in_blocks += len(plan.swap_ins)
        num_swaps = len(plan.swap_outs) + len(plan.swap_ins)
        stats.swapped_bytes += num_swaps * self.executor.pool.block_nbytes

    def _count_drafts(self) -> None:
        speculation = self.scheduler.speculation
        if speculation is not None:
            self.stats.num_drafted_tokens += speculation.num_drafted_tokens
            self.stats.num_accepted_tokens += speculation.num_accepted_tokens
            speculation.num_drafted_tokens = speculation.num_accepted_tokens = 0

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
    wanted = config.max_model_len or longest
    if most_blocks(wanted, model.spec.window, config.block_size) < num_blocks:
        return wanted
    return (num_blocks - 1) * config.block_size


def _check_priority(priority: int, config: EngineConfig) -> None:
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    require(is_int, f"priority={priority!r} must be an integer")
    require(
        priority == 0 or config.scheduling == "priority",
        f"priority={priority} must be 0 with scheduling={config.scheduling!r}",
    )


def _preemption_costs(config: EngineConfig, model: Model) -> PreemptionCosts | None:
    """What the policy 'auto' goes by, from the settings or for this device and model."""
    if config.preemption != "auto" or config.preemption_costs is not None:
        return config.preemption_costs
    device = current_device()
    num_params = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(model.params))
    rate = device.matmul_rate if device.is_cuda else None
    return default_costs(num_params=num_params, matmul_rate=rate)
