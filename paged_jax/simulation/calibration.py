"""Fits the cost model to steps of a real engine, and says how far off its predictions are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.simulation.assumptions import CostConstants
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import Geometry, Gpu, Server

_MAX_ROUNDS = 20
_FASTEST = 1e30  # where no step was bound by it


class MeasuredStep(NamedTuple):
    """A step of an engine: what it computed, and the seconds from its planning to its end."""

    rows: Sequence[RowWork]
    num_sampled: int
    seconds: float


class RelativeErrors(NamedTuple):
    """Of predictions, |predicted - measured| / measured: the median and the 90th percentile."""

    median: float
    p90: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine as steps show it.

    Attributes:
      model: that ran.
      bandwidth: bytes a second that are reached.
      flops: operations a second that are reached.
      overhead: seconds a step.
      row_overhead: seconds a sampled token.
    """

    model: Geometry
    bandwidth: float
    flops: float
    overhead: float
    row_overhead: float

    @property
    def constants(self) -> CostConstants:
        """For ``server``, whose peaks are what is reached."""
        return CostConstants(
            bandwidth_efficiency=1.0,
            flops_efficiency=1.0,
            overhead=self.overhead,
            row_overhead=self.row_overhead,
        )

    def server(self, *, num_slots: int) -> Server:
        """The machine, with a pool of so many token positions."""
        machine = Gpu(
            name="measured",
            memory_bytes=0,
            bandwidth=self.bandwidth,
            flops=self.flops,
            link_bandwidth=_FASTEST,
        )
        kv_bytes = num_slots * self.model.kv_bytes_per_token
        return Server(model=self.model, gpu=machine, num_gpus=1, kv_bytes=kv_bytes)

    def errors(self, steps: Sequence[MeasuredStep]) -> RelativeErrors:
        """How far off the predictions of these steps are."""
        cost_model = CostModel(self.server(num_slots=0), self.constants)
        measured = np.array([step.seconds for step in steps])
        predicted = np.array(
            [cost_model.step_time(s.rows, num_sampled=s.num_sampled).total for s in steps]
        )
        errors = np.abs(predicted - measured) / measured
        return RelativeErrors(*np.quantile(errors, [0.5, 0.9]).tolist())


def fit(model: Geometry, steps: Sequence[MeasuredStep]) -> Calibration:
    """Find the figures that make the cost model's relative errors small, none of them negative.

    Weights and attention are each bound by bandwidth or by operations; which of them depends on
    what is looked for. So this starts from a guess, fits, looks again, and so on.

    Args:
      model: that ran.
      steps: of many kinds, or figures cannot be told apart.

    Raises:
      ValueError: there are fewer than 4 steps, as many as figures.
    """
    if len(steps) < 4:
        raise ValueError(f"steps has {len(steps)}, it must have at least 4")
    work = np.array([_work_of(model, step) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    sampled = np.array([step.num_sampled for step in steps])
    # A guess: half of all time goes into each.
    per_byte = seconds.sum() / work[:, :, 0].sum() / 2
    per_operation = seconds.sum() / work[:, :, 1].sum() / 2
    best = np.zeros(4)
    least = np.inf
    for _ in range(_MAX_ROUNDS):
        by_bytes = work[:, :, 0] * per_byte >= work[:, :, 1] * per_operation
        columns = np.stack(
            [
                np.where(by_bytes, work[:, :, 0], 0).sum(1),
                np.where(by_bytes, 0, work[:, :, 1]).sum(1),
                np.ones(len(steps)),
                sampled,
            ],
            axis=1,
        )
        found, residual = _solve(columns / seconds[:, None])
        if residual >= least:
            break
        best, least = found, residual
        per_byte, per_operation = best[:2]
    rates = [1 / value if value > 0 else _FASTEST for value in best[:2].tolist()]
    overheads = best[2:].tolist()
    return Calibration(
        model=model,
        bandwidth=rates[0],
        flops=rates[1],
        overhead=overheads[0],
        row_overhead=overheads[1],
    )


def _work_of(model: Geometry, step: MeasuredStep) -> list[list[float]]:
    """(bytes, operations) of a step's weights, and of its attention, as ``CostModel`` counts."""
    unit = Calibration(model=model, bandwidth=1, flops=_FASTEST, overhead=0, row_overhead=0)
    pair = unit, dataclasses.replace(unit, bandwidth=_FASTEST, flops=1)
    models = [CostModel(one.server(num_slots=0), one.constants) for one in pair]
    moved, computed = (one.step_time(step.rows, num_sampled=step.num_sampled) for one in models)
    return [[moved.dense, computed.dense], [moved.attention, computed.attention]]


def _solve(columns: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative factors of the columns whose sum is nearest to ones, and the squared error.

    With this few columns the answer is the best plain fit of all subsets that has no negatives.
    """
    num_rows, num_columns = columns.shape
    best, least = np.zeros(num_columns), float(num_rows)
    for size in range(1, num_columns + 1):
        for chosen in map(list, itertools.combinations(range(num_columns), size)):
            part = columns[:, chosen]
            scales = np.linalg.norm(part, axis=0)
            if not scales.all():
                continue
            factors = np.linalg.lstsq(part / scales, np.ones(num_rows), rcond=None)[0] / scales
            error = float(((part @ factors - 1) ** 2).sum())
            if factors.min() >= 0 and error < least:
                best, least = np.zeros(num_columns), error
                best[chosen] = factors
    return best, least
