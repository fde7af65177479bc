"""Simulated runs, several at a time, and the search for the request rate that a policy sustains."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import Any

from paged_jax.simulation.assumptions import DEFAULT, Assumptions
from paged_jax.simulation.machines import Server
from paged_jax.simulation.simulator import Policy, SimulationSettings, simulate
from paged_jax_scripts.experiments.records import Options, Row
from paged_jax_scripts.experiments.workloads import Workload, WorkloadName

# Names in the paper.
POLICY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "paged": "paged",
        "orca_oracle": "Orca (Oracle)",
        "orca_pow2": "Orca (Pow2)",
        "orca_max": "Orca (Max)",
        "static": "FasterTransformer",
    }
)
_MAX_WIDENINGS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One simulation; travels to another process.

    Attributes:
      server: model, GPUs, pool.
      policy: how memory is reserved.
      workload: what arrives.
      assumptions: all that the paper does not say.
      settings: fields of ``SimulationSettings`` other than the scheduler's limits and constants.
    """

    server: Server
    policy: Policy
    workload: Workload
    assumptions: Assumptions = DEFAULT
    settings: tuple[tuple[str, Any], ...] = ()

    def at(self, rate: float) -> Job:
        """The same with another request rate."""
        return dataclasses.replace(self, workload=dataclasses.replace(self.workload, rate=rate))


def make_job(
    server: Server,
    policy: Policy,
    name: WorkloadName,
    *,
    rate: float,
    options: Options,
    share_of_minutes: float = 1.0,
    **settings: Any,
) -> Job:
    """A simulation as the options say.

    Args:
      server: model, GPUs, pool.
      policy: how memory is reserved.
      name: of the lengths.
      rate: requests a second.
      options: how long, which draws, and the assumptions.
      share_of_minutes: of the options' minutes.
      settings: as ``Job.settings``.
    """
    minutes = options.minutes * share_of_minutes
    return Job(
        server=server,
        policy=policy,
        workload=Workload(name=name, rate=rate, minutes=minutes, seed=options.seed),
        assumptions=options.assumptions,
        settings=tuple(settings.items()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Finds the highest rate at which the mean normalized latency stays within the limit.

    Attributes:
      job: what is run; its rate is the first one tried.
      widening: factor between the rates tried until one is on each side.
      tolerance: factor between the bracketing rates that is close enough.
    """

    job: Job
    widening: float = 2.0
    tolerance: float = 1.03


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sustained:
    """What a search found.

    Attributes:
      rate: between the bracketing ones.
      rows: of all simulations, by rate.
    """

    rate: float
    rows: tuple[Row, ...]


def run_all[Item, Result](
    function: Callable[[Item], Result], items: Sequence[Item], *, num_processes: int
) -> list[Result]:
    """Call a function of a module with each item, in several processes; results in order."""
    if num_processes == 1:
        return [function(item) for item in items]
    # Spawned: a process that imported jax has threads, which a fork would not survive.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        return list(pool.map(function, items))


def run_job(job: Job) -> Row:
    """Simulate, and say what came out as a row."""
    assumptions, workload = job.assumptions, job.workload
    settings = SimulationSettings(
        max_num_seqs=assumptions.max_num_seqs,
        max_num_batched_tokens=assumptions.max_num_batched_tokens,
        beam_concentration=assumptions.beam_concentration,
        constants=assumptions.cost,
        seed=workload.seed,
        **dict(job.settings),
    )
    requests = workload.requests(assumptions)
    result = simulate(job.server, requests, policy=job.policy, settings=settings)
    summary = result.summary()
    return {
        "model": job.server.model.name,
        "workload": workload.name,
        "policy": job.policy,
        **dict(job.settings),
        "rate": workload.rate,
        "requests": len(requests),
        "normalized_latency": summary.normalized_latency,
        "requests_per_second": summary.requests_per_second,
        "batched_requests": summary.mean_batched,
        "token_states": summary.memory.token_states,
        "filled": summary.memory.filled,
        "reserved": summary.memory.reserved,
        "internal": summary.memory.internal,
        "external": summary.memory.external,
        "free": summary.memory.free,
        "saved": summary.memory.saved,
        "preemptions": summary.num_preemptions,
    }


def sustained_rate(search: Search) -> Sustained:
    """Widen until the limit is between two rates, then halve the distance of their logarithms.

    Raises:
      ValueError: every rate is on one side of the limit.
    """
    limit = search.job.assumptions.max_normalized_latency
    rows: dict[float, Row] = {}

    def is_sustained(rate: float) -> bool:
        rows[rate] = run_job(search.job.at(rate))
        return rows[rate]["normalized_latency"] <= limit

    low = high = search.job.workload.rate
    step = search.widening
    if is_sustained(low):
        for _ in range(_MAX_WIDENINGS):
            low, high = high, high * step
            if not is_sustained(high):
                break
        else:
            raise ValueError(f"rate={high:g} must be too much for the server, and is not")
    else:
        for _ in range(_MAX_WIDENINGS):
            low, high = low / step, low
            if is_sustained(low):
                break
        else:
            raise ValueError(
                f"max_normalized_latency={limit:g} must be within reach; {low:g} requests a "
                f"second have {rows[low]['normalized_latency']:.3g}"
            )
    while high / low > search.tolerance:
        middle = (low * high) ** 0.5
        if is_sustained(middle):
            low = middle
        else:
            high = middle
    return Sustained(rate=(low * high) ** 0.5, rows=tuple(rows[rate] for rate in sorted(rows)))
