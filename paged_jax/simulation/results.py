"""What became of the requests of a run, simulated or executed, and its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.blocks.block_stats import MemoryUse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that has ended; times are seconds since the run began.

    Attributes:
      request_id: its place in the order of arrival, from 0.
      arrival: when it came.
      first_token: when its first token was known.
      end: when its last token was.
      num_prompt: prompt tokens.
      num_output: output tokens, of each of its sequences.
      num_cached: prompt tokens that were not computed when it started first.
      num_preemptions: how often it lost its blocks.
    """

    request_id: int
    arrival: float
    first_token: float
    end: float
    num_prompt: int
    num_output: int
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def latency(self) -> float:
        """Seconds from arrival to end."""
        return self.end - self.arrival

    @property
    def normalized_latency(self) -> float:
        """Latency a token of output (paper 6.1)."""
        return self.latency / self.num_output

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival


class Percentiles(NamedTuple):
    """Of a distribution, in seconds; 0 where there is none."""

    p50: float
    p90: float
    p99: float


class TokenGaps:
    """Times between a sequence's tokens, equal ones of a step counted together.

    >>> gaps = TokenGaps()
    >>> gaps.add(0.05, count=9)
    >>> gaps.add(2.0)
    >>> gaps.percentiles()
    Percentiles(p50=0.05, p90=0.05, p99=2.0)
    """

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._counts: list[int] = []

    def add(self, seconds: float, *, count: int = 1) -> None:
        """Count ``count`` gaps of as many seconds each."""
        self._seconds.append(seconds)
        self._counts.append(count)

    def percentiles(self) -> Percentiles:
        """The smallest gaps that so many percent of all do not exceed."""
        return _percentiles(self._seconds, self._counts)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShares:
    """Shares of the pool's token positions, averaged over time (paper, Fig. 2).

    Attributes:
      filled: hold a token.
      reserved: will hold one.
      internal: never will, though a sequence has them.
      external: are lost between sequences.
      free: are nobody's.
      saved: of what there would be without sharing, the part that sharing saves, of used blocks
        (paper, Fig. 15).
    """

    filled: float
    reserved: float
    internal: float
    external: float
    free: float
    saved: float

    @property
    def token_states(self) -> float:
        """Of what sequences take, the share that holds tokens: the paper's Fig. 2."""
        taken = self.filled + self.reserved + self.internal + self.external
        return self.filled / taken if taken else 0.0


class UseMeter:
    """Averages the pool's use and the size of the batch over the time in which requests run."""

    __slots__ = ("_batched", "_seconds", "_sums")

    _NAMES = ("filled", "reserved", "internal", "external", "free")

    def __init__(self) -> None:
        self._seconds = self._batched = 0.0
        self._sums = dict.fromkeys((*self._NAMES, "total", "saved"), 0.0)

    def add_batch(self, seconds: float, *, num_requests: int) -> None:
        """For so many seconds a step computed for so many requests."""
        self._seconds += seconds
        self._batched += seconds * num_requests

    def add_use(self, seconds: float, use: MemoryUse) -> None:
        """For so many seconds the pool was used thus."""
        for name in self._sums:
            self._sums[name] += seconds * getattr(use, name)

    @property
    def mean_batched(self) -> float:
        """Requests a step, averaged over time (paper, Fig. 13)."""
        return self._batched / self._seconds if self._seconds else 0.0

    @property
    def memory(self) -> MemoryShares:
        """How the pool was used."""
        sums = self._sums
        total = sums["total"] or 1.0
        unshared = sums["saved"] + sums["total"] - sums["free"]
        shares = (sums[name] / total for name in self._NAMES)
        return MemoryShares(*shares, saved=sums["saved"] / unshared if unshared else 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in figures.

    Attributes:
      num_requests: that ended.
      seconds: from the first arrival to the last end.
      requests_per_second: both together.
      normalized_latency: mean over requests of seconds a token of output (paper 6.1).
      time_to_first_token: percentiles over requests.
      inter_token: percentiles over all tokens but first ones.
      mean_batched: requests a step, averaged over time.
      memory: shares of the pool, averaged over time.
      num_preemptions: times that a request lost its blocks.
      hit_rate: share of the prompt tokens that were found in the prefix cache.
    """

    num_requests: int
    seconds: float
    requests_per_second: float
    normalized_latency: float
    time_to_first_token: Percentiles
    inter_token: Percentiles
    mean_batched: float
    memory: MemoryShares
    num_preemptions: int
    hit_rate: float


def summarise(records: Sequence[RequestRecord], *, gaps: TokenGaps, meter: UseMeter) -> RunSummary:
    """The figures of a run.

    Raises:
      ValueError: there are no records.
    """
    if not records:
        raise ValueError("records=[] must hold at least one request")
    seconds = max(one.end for one in records) - min(one.arrival for one in records)
    firsts = [one.time_to_first_token for one in records]
    return RunSummary(
        num_requests=len(records),
        seconds=seconds,
        requests_per_second=len(records) / seconds,
        normalized_latency=sum(one.normalized_latency for one in records) / len(records),
        time_to_first_token=_percentiles(firsts, [1] * len(firsts)),
        inter_token=gaps.percentiles(),
        mean_batched=meter.mean_batched,
        memory=meter.memory,
        num_preemptions=sum(one.num_preemptions for one in records),
        hit_rate=sum(one.num_cached for one in records) / sum(one.num_prompt for one in records),
    )


def _percentiles(values: Sequence[float], counts: Sequence[int]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0, 0.0)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(counts)[order])
    places = np.searchsorted(reached, np.array([0.5, 0.9, 0.99]) * reached[-1])
    return Percentiles(*np.asarray(values)[order][places].tolist())


class StepUse(NamedTuple):
    """What a step did to the pool: blocks used and positions filled, once it was planned."""

    used: int
    filled: int
    num_copies: int
    num_preemptions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A simulated run.

    Attributes:
      records: of all requests, in order of arrival.
      gaps: between tokens.
      meter: of the pool and the batch.
      num_steps: that the machine computed.
      busy_seconds: for how long it did.
      steps: one a step, if they were to be kept.
    """

    records: list[RequestRecord]
    gaps: TokenGaps
    meter: UseMeter
    num_steps: int
    busy_seconds: float
    steps: list[StepUse]

    def summary(self) -> RunSummary:
        """The figures of the run."""
        return summarise(self.records, gaps=self.gaps, meter=self.meter)
