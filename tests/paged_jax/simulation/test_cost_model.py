"""The roofline of a step: what bounds it, what it grows with, by hand."""

import dataclasses

import pytest

from paged_jax.simulation import machines
from paged_jax.simulation.cost_model import CostConstants, CostModel, RowWork

PEAK = CostConstants(
    bandwidth_efficiency=1, flops_efficiency=1, link_efficiency=1, reduce_latency=0, overhead=0,
    row_overhead=0, host_bandwidth=25e9, swap_latency=0,
)  # fmt: skip


def test_one_decode_row_reads_all_weights_and_its_context():
    server = machines.PAPER_OPT_13B
    time = CostModel(server, PEAK).step_time([RowWork(1, 1000)], num_sampled=1)
    assert time.dense == pytest.approx(server.model.weight_bytes / server.gpu.bandwidth)
    assert time.attention == pytest.approx(1000 * 819200 / server.gpu.bandwidth)
    assert (time.reduce, time.moves, time.overhead) == (0, 0, 0)
    assert time.total == pytest.approx(time.dense + time.attention)


def test_a_long_prompt_is_bound_by_operations():
    server = machines.PAPER_OPT_13B
    time = CostModel(server, PEAK).step_time([RowWork(2000, 2000)], num_sampled=1)
    assert time.dense == pytest.approx(2 * server.model.num_params * 2000 / server.gpu.flops)
    queries_by_keys = 2000 * 2001 / 2 + 2000 * 0.0  # each sees itself and what is before it
    flops = 4 * 40 * 5120 * queries_by_keys
    assert time.attention == pytest.approx(flops / server.gpu.flops, rel=1e-3)


def test_more_gpus_share_the_work_and_talk():
    model = machines.OPT_175B
    one = machines.Server(model=model, gpu=machines.A100_80GB, num_gpus=1, kv_bytes=1e9)
    eight = dataclasses.replace(one, num_gpus=8)
    rows = [RowWork(1, 500)] * 10
    alone, together = (CostModel(s, PEAK).step_time(rows, num_sampled=10) for s in (one, eight))
    assert together.dense == pytest.approx(alone.dense / 8)
    assert together.attention == pytest.approx(alone.attention / 8)
    assert alone.reduce == 0 < together.reduce


def test_moves_and_overheads():
    constants = dataclasses.replace(PEAK, overhead=1.0, row_overhead=0.5, swap_latency=2.0)
    model = CostModel(machines.PAPER_OPT_13B, constants)
    time = model.step_time([], num_sampled=4, num_swapped_blocks=3, block_size=16)
    assert time.overhead == 3.0
    assert time.moves == pytest.approx(3 * (16 * 819200 / 25e9 + 2.0))
    copied = model.step_time([], num_sampled=0, num_copied_blocks=2, block_size=16)
    assert copied.moves == pytest.approx(4 * 16 * 819200 / machines.A100_40GB.bandwidth)


def test_the_papers_slots():
    """Its Table 1, to the rounding of the memory that it prints."""
    for server, printed in (
        (machines.PAPER_OPT_13B, 15_700),
        (machines.PAPER_OPT_66B, 9_700),
        (machines.PAPER_OPT_175B, 60_100),
    ):
        assert server.num_slots == pytest.approx(printed, rel=0.02)


@pytest.mark.parametrize(
    ("name", "value", "sign"),
    [("overhead", -1, ">="), ("bandwidth_efficiency", 0, ">"), ("host_bandwidth", 0, ">")],
)
def test_constants_that_mean_nothing_are_refused(name, value, sign):
    with pytest.raises(ValueError, match=f"{name}={value} must be {sign} 0"):
        CostConstants(**{name: value})
