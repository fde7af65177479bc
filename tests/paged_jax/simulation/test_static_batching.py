"""Static batches by hand: who is in them, how long they take, what they hold."""

import dataclasses

import pytest

from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax.simulation.simulator import SimulationSettings, simulate
from paged_jax.simulation.traces import TraceRequest

# Two rows of 64 tokens, and 16 positions that are in none.
SETTINGS = SimulationSettings(num_blocks=10, max_model_len=64)


def seconds_of(num_rows: int, longest_prompt: int, longest_output: int) -> float:
    model = CostModel(PAPER_OPT_13B, SETTINGS.constants)
    steps = [RowWork(longest_prompt, longest_prompt)]
    steps += [RowWork(1, longest_prompt + place) for place in range(1, longest_output)]
    return sum(model.step_time([one] * num_rows, num_sampled=num_rows).total for one in steps)


def test_batches_are_padded_and_end_together():
    requests = [TraceRequest(10, 5), TraceRequest(30, 2), TraceRequest(7, 3)]
    result = simulate(PAPER_OPT_13B, requests, policy="static", settings=SETTINGS)
    first = seconds_of(2, 30, 5)
    second = first + seconds_of(1, 7, 3)
    assert [one.end for one in result.records] == pytest.approx([first, first, second])
    assert [one.first_token for one in result.records] == [one.end for one in result.records]
    assert result.num_steps == 5 + 3


def test_whoever_comes_during_a_batch_waits_for_the_next():
    requests = [TraceRequest(10, 5), TraceRequest(10, 5, arrival=0.01)]
    records = simulate(PAPER_OPT_13B, requests, policy="static", settings=SETTINGS).records
    assert records[1].end == pytest.approx(2 * records[0].end)
    idle = [TraceRequest(10, 5), TraceRequest(10, 5, arrival=100.0)]
    records = simulate(PAPER_OPT_13B, idle, policy="static", settings=SETTINGS).records
    assert records[1].latency == pytest.approx(records[0].latency)


def test_each_row_takes_the_longest_context():
    memory = simulate(
        PAPER_OPT_13B, [TraceRequest(40, 1)], policy="static", settings=SETTINGS
    ).summary().memory  # fmt: skip
    found = [memory.filled, memory.reserved, memory.internal, memory.external, memory.free]
    assert found == pytest.approx([40 / 144, 1 / 144, 23 / 144, 0, 80 / 144])


def test_a_pool_shorter_than_the_context_is_one_row():
    settings = dataclasses.replace(SETTINGS, max_model_len=None)
    result = simulate(PAPER_OPT_13B, [TraceRequest(9, 3)] * 2, policy="static", settings=settings)
    assert result.summary().mean_batched == 1
