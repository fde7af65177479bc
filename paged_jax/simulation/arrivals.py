"""When the requests of a workload come."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from paged_jax.simulation.traces import TraceRequest


def poisson(requests: Sequence[TraceRequest], *, rate: float, seed: int) -> list[TraceRequest]:
    """The same requests in the same order, as a Poisson process from time 0 (paper section 6.1).

    Args:
      requests: their own arrivals are not looked at.
      rate: requests a second, on average.
      seed: of the gaps.

    Raises:
      ValueError: the rate is not a positive number.
    """
    _check_positive("rate", rate)
    times = np.random.default_rng(seed).exponential(1 / rate, len(requests)).cumsum().tolist()
    return [
        dataclasses.replace(request, arrival=time)
        for request, time in zip(requests, times, strict=True)
    ]


def scaled(requests: Sequence[TraceRequest], *, time_scale: float) -> list[TraceRequest]:
    """The same requests, ``time_scale`` times as fast: at 2 an hour of arrivals takes half an hour.

    Raises:
      ValueError: the scale is not a positive number.
    """
    _check_positive("time_scale", time_scale)
    return [
        dataclasses.replace(request, arrival=request.arrival / time_scale) for request in requests
    ]


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a number > 0")
