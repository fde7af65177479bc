"""A machine whose steps follow the cost model is found again from them."""

import random

import pytest

from paged_jax.simulation.calibration import Calibration, MeasuredStep, fit
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import OPT_13B

TRUTH = Calibration(model=OPT_13B, bandwidth=2e12, flops=1e14, overhead=4e-3, row_overhead=2e-4)


def measure(num_steps: int, *, noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(0)
    model = CostModel(TRUTH.server(num_slots=0), TRUTH.constants)
    steps = []
    for _ in range(num_steps):
        rows = [RowWork(1, rng.randint(1, 2000)) for _ in range(rng.randint(0, 60))]
        rows += [RowWork(n, n) for n in [rng.randint(1, 1500)] * rng.randint(0, 1)]
        seconds = model.step_time(rows, num_sampled=len(rows)).total
        steps.append(MeasuredStep(rows, len(rows), seconds * rng.uniform(1 - noise, 1 + noise)))
    return steps


def test_exact_steps_give_the_machine():
    found = fit(OPT_13B, measure(60))
    assert found.bandwidth == pytest.approx(TRUTH.bandwidth)
    assert found.flops == pytest.approx(TRUTH.flops)
    assert found.overhead == pytest.approx(TRUTH.overhead)
    assert found.row_overhead == pytest.approx(TRUTH.row_overhead)
    assert found.errors(measure(60)).p90 < 1e-9


def test_noise_leaves_errors_of_its_size():
    steps = measure(200, noise=0.2)
    errors = fit(OPT_13B, steps[::2]).errors(steps[1::2])
    assert 0.05 < errors.median < 0.15
    assert errors.median < errors.p90 < 0.3


def test_nothing_is_negative():
    # The longer the work the shorter the time: only an overhead can say that.
    steps = [MeasuredStep([RowWork(1, n)], 1, 1 / n) for n in range(1, 20)]
    found = fit(OPT_13B, steps)
    assert min(found.bandwidth, found.flops) > 0
    assert min(found.overhead, found.row_overhead) >= 0


def test_too_few_steps():
    with pytest.raises(ValueError, match="steps has 3, it must have at least 4"):
        fit(OPT_13B, measure(3))
