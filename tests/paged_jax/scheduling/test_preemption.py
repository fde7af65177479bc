"""The cost model: both sides of the break-even, and what it refuses."""

import math

import pytest

from paged_jax.scheduling.preemption import PreemptionCosts, default_costs

GOOD = {
    "prefill_tokens_per_second": 1000.0,
    "swap_bytes_per_second": 1e6,
    "swap_seconds_per_block": 0.001,
}


def test_times_are_those_of_the_formula():
    costs = PreemptionCosts(**GOOD)
    assert costs.recompute_seconds(250) == 0.25
    # 10 blocks, there and back: 4 ms for the bytes of each and 1 ms for the block.
    assert math.isclose(costs.swap_seconds(10, block_nbytes=4000), 2 * 10 * 0.005)


@pytest.mark.parametrize(("block_size", "is_swap_faster"), [(1, False), (8, False), (16, True)])
def test_small_blocks_are_dear_to_swap(block_size, is_swap_faster):
    """The same 320 tokens: what a block costs is paid for each of fewer blocks (paper Fig. 19)."""
    costs = PreemptionCosts(
        prefill_tokens_per_second=1e4, swap_bytes_per_second=1e9, swap_seconds_per_block=5e-4
    )
    swap = costs.swap_seconds(320 // block_size, block_nbytes=10_000 * block_size)
    assert (swap < costs.recompute_seconds(320)) is is_swap_faster


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "fast", None])
def test_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a finite number >"):
        PreemptionCosts(**{**GOOD, name: value})


def test_a_rate_of_zero_is_refused_and_blocks_may_cost_nothing():
    assert PreemptionCosts(**{**GOOD, "swap_seconds_per_block": 0}).swap_seconds_per_block == 0
    with pytest.raises(ValueError, match="swap_bytes_per_second=0 must be a finite number > 0"):
        PreemptionCosts(**{**GOOD, "swap_bytes_per_second": 0})


def test_defaults_follow_model_and_machine():
    small, large = (default_costs(num_params=n, matmul_rate=None) for n in (10**8, 10**9))
    assert small.prefill_tokens_per_second == 10 * large.prefill_tokens_per_second
    slow, fast = (default_costs(num_params=10**9, matmul_rate=rate) for rate in (1e14, 1e15))
    assert fast.prefill_tokens_per_second == 10 * slow.prefill_tokens_per_second
    assert slow.prefill_tokens_per_second > large.prefill_tokens_per_second
    assert default_costs(num_params=0, matmul_rate=None).prefill_tokens_per_second > 0
