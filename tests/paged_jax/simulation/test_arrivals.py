import math

import numpy as np
import pytest

from paged_jax.simulation.arrivals import poisson, scaled
from paged_jax.simulation.traces import TraceRequest

REQUESTS = [TraceRequest(3 + index, 1, (index,), 2.0 * index) for index in range(4000)]


def test_poisson_gaps():
    timed = poisson(REQUESTS, rate=4.0, seed=0)
    gaps = np.diff([0.0, *(request.arrival for request in timed)])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.05)
    # Memoryless: of the gaps beyond a mean, 1 / e are beyond two.
    longer, longest = (gaps > 1 / 4).mean(), (gaps > 2 / 4).mean()
    assert longest / longer == pytest.approx(1 / math.e, rel=0.1)


def test_poisson_changes_times_alone():
    timed = poisson(REQUESTS[:5], rate=1.0, seed=3)
    assert [request.prefix_ids for request in timed] == [(index,) for index in range(5)]
    assert timed == poisson(REQUESTS[:5], rate=1.0, seed=3) != poisson(REQUESTS[:5], rate=1, seed=4)
    faster = poisson(REQUESTS[:5], rate=2.0, seed=3)
    assert [2 * request.arrival for request in faster] == pytest.approx(
        [request.arrival for request in timed]
    )


def test_scaled():
    assert [request.arrival for request in scaled(REQUESTS[:3], time_scale=4)] == [0.0, 0.5, 1.0]
    assert REQUESTS[2].arrival == 4.0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_not_positive(value):
    with pytest.raises(ValueError, match=r"rate=.* must be a number > 0"):
        poisson(REQUESTS, rate=value, seed=0)
    with pytest.raises(ValueError, match=r"time_scale=.* must be a number > 0"):
        scaled(REQUESTS, time_scale=value)
