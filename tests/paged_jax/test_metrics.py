"""Counters."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import EngineStats, count_compilations


def test_compilations_are_counted_jitted_and_eager():
    def twice(x):
        return 2 * x

    step = jax.jit(twice)
    three, four = np.ones(3, np.float32), np.ones(4, np.float32)
    begin = time.perf_counter()
    with count_compilations() as counted:
        step(three)
        assert counted.count == 1
        step(three)
        assert counted.count == 1
        step(four)
        assert counted.count == 2
        jnp.asarray(np.ones((7, 3, 5), np.float32)) ** jnp.float32(1.5)  # an eager operation
        assert counted.count > 2
    assert 0 < counted.seconds < time.perf_counter() - begin


def test_counting_ends_with_the_block_and_nests():
    step = jax.jit(lambda x: x + 3)
    with count_compilations() as outer:
        with count_compilations() as inner:
            step(np.ones(3, np.float32))
        step(np.ones(4, np.float32))
    step(np.ones(5, np.float32))
    assert (inner.count, outer.count) == (1, 2)


def test_shares_of_nothing_are_zero():
    stats = EngineStats()
    assert stats.block_utilisation == stats.padding_share == stats.prefix_cache_hit_rate == 0.0
    stats = EngineStats(
        filled_slots=3, used_slots=4, num_positions=10, num_padding_positions=1, step_seconds=2.0
    )
    assert (stats.block_utilisation, stats.padding_share) == (0.75, 0.1)
    assert EngineStats(prefix_cache_queries=8, prefix_cache_hits=2).prefix_cache_hit_rate == 0.25
    stats.reset()
    assert stats == EngineStats()
