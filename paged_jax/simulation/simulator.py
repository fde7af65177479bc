"""A serving run in virtual time: the real scheduler and block manager, execution by a formula.

The loop is the engine's own, one step in flight: while the machine computes a step the host plans
the next one, so a sequence whose last token ends it computes one token more, and a request that
arrives during a step is planned when that step has ended, behind the one that runs by then.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.demand import ReservationPolicy
from paged_jax.blocks.reservation import make_manager
from paged_jax.engine_record import EngineRecord
from paged_jax.events import EventLog
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.plan import NeedsValues, Plan
from paged_jax.scheduling.preemption import PreemptionCosts
from paged_jax.scheduling.preemptor import Preemptor
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence
from paged_jax.simulation.beams import BeamModel
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.executor import (
    STOP_TOKEN,
    SimulatedExecutor,
    SimulatedHandle,
    VirtualClock,
)
from paged_jax.simulation.machines import Server
from paged_jax.simulation.requests import RequestMaker, require_valid
from paged_jax.simulation.results import (
    RequestRecord,
    SimulationResult,
    StepUse,
    TokenGaps,
    UseMeter,
)
from paged_jax.simulation.settings import Policy, SimulationSettings
from paged_jax.simulation.static_batching import simulate_static
from paged_jax.simulation.traces import TraceRequest

__all__ = ["Policy", "SimulationResult", "SimulationSettings", "simulate"]

MEMORY_STEPS = 4
"""The pool's use is looked at in every so many steps."""

DEFAULTS = SimulationSettings()


def simulate(
    server: Server,
    requests: SequenceOf[TraceRequest],
    *,
    policy: Policy = "paged",
    settings: SimulationSettings = DEFAULTS,
) -> SimulationResult:
    """Serve requests, in order of arrival, to the last token of the last one.

    Args:
      server: the model and what it runs on.
      requests: by arrival; each of a request's sequences has its ``num_output`` tokens.
      policy: how memory is given out.
      settings: everything else.

    Raises:
      ValueError: a request cannot be served, or ``settings`` do not fit the policy.
    """
    max_model_len = settings.resolve_max_model_len(server)
    require_valid(requests, settings, max_model_len=max_model_len)
    if policy == "static":
        return simulate_static(server, requests, settings=settings, max_model_len=max_model_len)
    return _Run(server, requests, policy, settings, max_model_len).run()


class _Run:
    """One run: its parts, what is in flight, and what has been seen so far."""

    def __init__(
        self,
        server: Server,
        requests: SequenceOf[TraceRequest],
        policy: ReservationPolicy,
        settings: SimulationSettings,
        max_model_len: int,
    ) -> None:
        _require_fitting(policy, settings)
        self._requests, self._settings = requests, settings
        self._shares_prefix = policy == "paged" and settings.shared_prefix_len > 0
        self._clock = VirtualClock()
        self._log = _open_log(settings, self._clock, settings.resolve_num_blocks(server))
        self._manager = make_manager(
            policy,
            max_model_len=max_model_len,
            num_blocks=settings.resolve_num_blocks(server),
            block_size=settings.block_size,
            num_host_blocks=settings.num_host_blocks,
            observer=None if self._log is None else self._log.take,
        )
        self._scheduler = Scheduler(
            self._manager,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefill_row_len=settings.prefill_row_len,
            max_model_len=max_model_len,
            preemptor=_make_preemptor(self._manager, server, settings),
            prefix_cache=settings.prefix_cache,
        )
        self._record = self._log and EngineRecord(
            self._log, scheduler=self._scheduler, block_manager=self._manager
        )
        self._maker = RequestMaker(settings)
        width = settings.beam_width
        self._executor = SimulatedExecutor(
            CostModel(server, settings.constants),
            self._clock,
            last_positions={
                index: settings.shared_prefix_len + request.num_prompt + request.num_output - 1
                for index, request in enumerate(requests)
            },
            beam_model=None
            if width is None
            else BeamModel(
                width=width, concentration=settings.beam_concentration, seed=settings.seed
            ),
            block_size=settings.block_size,
        )
        self._in_flight: SimulatedHandle | None = None
        self._groups: dict[Request, SequenceGroup] = {}
        self._records: list[RequestRecord | None] = [None] * len(requests)
        self._first_times: dict[Request, float] = {}
        # When each step's tokens came, and in which step each sequence's last one did.
        self._times: list[float] = []
        self._last_steps: dict[Sequence, int] = {}
        self._gaps, self._meter = TokenGaps(), UseMeter()
        self._num_steps = 0
        self._busy_seconds = self._unseen_seconds = 0.0
        self._steps: list[StepUse] = []

    def run(self) -> SimulationResult:
        """Serve all requests."""
        requests, clock, scheduler = self._requests, self._clock, self._scheduler
        if self._shares_prefix:
            self._register_prefix()
        num_added = 0
        while num_added < len(requests) or scheduler.has_unfinished or self._in_flight:
            if not (scheduler.has_unfinished or self._in_flight):
                clock.wait_until(requests[num_added].arrival)
            while num_added < len(requests) and requests[num_added].arrival <= clock.now:
                self._add(num_added)
                num_added += 1
            self._step()
        if self._log is not None:
            self._log.close()
        return SimulationResult(
            records=[record for record in self._records if record is not None],
            gaps=self._gaps,
            meter=self._meter,
            num_steps=self._num_steps,
            busy_seconds=self._busy_seconds,
            steps=self._steps,
        )

    def _register_prefix(self) -> None:
        """Compute the shared prefix, before time begins."""
        tokens, scheduler = self._maker.prefix_token_ids, self._scheduler
        scheduler.add(Request("prefix", tokens, SamplingParams(max_tokens=0), is_prefix=True))
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            assert isinstance(plan, Plan), "nothing is in flight"
            scheduler.update(plan, [])

    def _add(self, index: int) -> None:
        request = self._maker.make(index, self._requests[index])
        group = self._scheduler.add(request)
        num_output, most = self._requests[index].num_output, group.sequences[0].max_tokens
        if most < num_output:
            raise ValueError(
                f"requests[{index}] has {num_output} output tokens, it must have at most {most}: "
                f"the pool has no more room for {len(group.sequences)} sequences of its prompt"
            )
        self._groups[request] = group
        if self._record is not None:
            self._record.arrive(group.sequences)

    def _step(self) -> None:
        """Begin the next step, then collect the one before it (``EngineCore.step``)."""
        plan = self._schedule()
        if isinstance(plan, NeedsValues):
            self._collect()
            plan = self._schedule()
            assert not isinstance(plan, NeedsValues), "nothing is in flight"
        handle = None
        if not plan.is_empty:
            handle = self._executor.execute(plan)
            self._count(plan, handle.seconds)
        self._collect()
        self._in_flight = handle

    def _schedule(self) -> Plan | NeedsValues:
        if self._record is not None:
            self._record.begin_step()
        return self._scheduler.schedule()

    def _count(self, plan: Plan, seconds: float) -> None:
        """Note what a step that begins computes and holds."""
        self._num_steps += 1
        self._busy_seconds += seconds
        self._meter.add_batch(seconds, num_requests=self._num_batched(plan))
        self._unseen_seconds += seconds
        if self._num_steps % MEMORY_STEPS == 1 % MEMORY_STEPS:
            self._meter.add_use(self._unseen_seconds, self._manager.memory_use())
            self._unseen_seconds = 0.0
        if self._settings.traces_steps or self._record is not None:
            blocks = self._manager.stats()
            if self._record is not None:
                self._record.dispatch(plan, blocks)
            if self._settings.traces_steps:
                num_preempted = sum(len(one.sequences) for one in plan.preemptions)
                counts = blocks.used, blocks.filled, len(plan.copies), num_preempted
                self._steps.append(StepUse(*counts))

    def _num_batched(self, plan: Plan) -> int:
        if self._settings.num_sequences > 1:
            return len({row.sequence.request for row in plan.rows})
        return len(plan.decode_rows) + len({row.sequence for row in plan.prefill_rows})

    def _collect(self) -> None:
        """Take the tokens of the step in flight, if there is one."""
        handle, self._in_flight = self._in_flight, None
        if handle is None:
            return
        result = handle.result()
        emitted = self._scheduler.update(handle.plan, result.token_ids, result.candidates)
        now, number, last_steps = self._clock.now, len(self._times), self._last_steps
        self._times.append(now)
        num_next = 0
        for sequence, token in emitted:
            before = last_steps.get(sequence, -1)
            last_steps[sequence] = number
            if before == number - 1 >= 0:
                num_next += 1
            elif before >= 0:
                self._gaps.add(now - self._times[before])
            else:
                self._first_times.setdefault(sequence.request, now)
            if token == STOP_TOKEN:
                del last_steps[sequence]
                self._end_if_over(sequence.request)
        for request in result.candidates:
            self._take_beams(request)
        if num_next:
            self._gaps.add(now - self._times[-2], count=num_next)

    def _take_beams(self, request: Request) -> None:
        """A search went on: its beams count as one stream of tokens."""
        group = self._groups[request]
        number, leader = len(self._times) - 1, group.sequences[0]
        before = self._last_steps.get(leader)
        if before is None:
            self._first_times[request] = self._clock.now
        else:
            self._gaps.add(self._clock.now - self._times[before])
        self._last_steps[leader] = number
        if not group.live:
            del self._last_steps[leader]
            self._end_if_over(request)

    def _end_if_over(self, request: Request) -> None:
        group = self._groups.get(request)
        if group is None or group.live:  # others of its sequences ended in this step, or have not
            return
        del self._groups[request]
        index = int(str(request.request_id))
        traced = self._requests[index]
        self._records[index] = RequestRecord(
            request_id=index,
            arrival=traced.arrival,
            first_token=self._first_times.pop(request),
            end=self._clock.now,
            num_prompt=len(request.prompt_token_ids),
            num_output=traced.num_output,
            num_cached=request.num_cached_tokens,
            num_preemptions=max(sequence.num_preemptions for sequence in group.sequences),
        )
        if self._record is not None:
            self._record.end(group.sequences)


def _require_fitting(policy: ReservationPolicy, settings: SimulationSettings) -> None:
    """Refuse what contiguous regions cannot do; ``make_manager`` refuses the rest."""
    for name, neutral in (("prefix_cache", False), ("preemption", "recompute")):
        value = getattr(settings, name)
        if policy != "paged" and value != neutral:
            raise ValueError(f"{name}={value!r} must be {neutral!r} with policy={policy!r}")


def _make_preemptor(
    manager: BlockManager, server: Server, settings: SimulationSettings
) -> Preemptor:
    """How blocks are taken away, at the cost model's prices."""
    constants, model = settings.constants, server.model
    flops = server.gpu.flops * constants.flops_efficiency * server.num_gpus
    return Preemptor(
        manager,
        mode=settings.preemption,
        costs=PreemptionCosts(
            prefill_tokens_per_second=flops / (2 * model.num_params),
            swap_bytes_per_second=constants.host_bandwidth,
            swap_seconds_per_block=constants.swap_latency,
        ),
        block_nbytes=settings.block_size * model.kv_bytes_per_token,
    )


def _open_log(
    settings: SimulationSettings, clock: VirtualClock, num_blocks: int
) -> EventLog | None:
    if settings.event_log is None:
        return None
    return EventLog(
        settings.event_log,
        clock=lambda: clock.now,
        about={"num_blocks": num_blocks, "block_size": settings.block_size},
    )
