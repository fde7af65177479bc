"""Runs in virtual time: latencies by hand, who ends when, what is shared, and what is refused."""

import dataclasses
import random

import pytest

from paged_jax.events import read_events
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax.simulation.simulator import Policy, SimulationSettings, simulate
from paged_jax.simulation.traces import TraceRequest

SMALL = SimulationSettings(num_blocks=21, max_model_len=160, max_num_seqs=8, traces_steps=True)
POLICIES: list[Policy] = ["paged", "orca_max", "orca_pow2", "orca_oracle"]


def draw(num_requests: int, *, seed: int = 0) -> list[TraceRequest]:
    rng = random.Random(seed)
    lens = [(rng.randint(1, 80), rng.randint(1, 80)) for _ in range(num_requests)]
    times = sorted(rng.uniform(0, 20) for _ in lens)
    return [TraceRequest(*pair, arrival=at) for pair, at in zip(lens, times, strict=True)]


def test_a_request_alone_takes_the_sum_of_its_steps():
    model = CostModel(PAPER_OPT_13B, SimulationSettings().constants)
    steps = [RowWork(100, 100)] + [RowWork(1, 100 + place) for place in range(1, 8)]
    times = [model.step_time([work], num_sampled=1).total for work in steps]
    result = simulate(PAPER_OPT_13B, [TraceRequest(100, 8, arrival=3.0)])
    (record,) = result.records
    assert record.time_to_first_token == pytest.approx(times[0])
    assert record.latency == pytest.approx(sum(times))
    # The host learns of the end one step later: one more was in flight.
    assert result.num_steps == 9
    assert result.summary().inter_token.p50 == pytest.approx(times[4], rel=1e-3)


@pytest.mark.parametrize("policy", [*POLICIES, "static"])
def test_every_request_ends_once_with_its_lengths(policy):
    requests = draw(40)
    settings = dataclasses.replace(SMALL, traces_steps=False)
    result = simulate(PAPER_OPT_13B, requests, policy=policy, settings=settings)
    found = [(one.request_id, one.num_prompt, one.num_output) for one in result.records]
    assert found == [(i, one.num_prompt, one.num_output) for i, one in enumerate(requests)]
    for record in result.records:
        assert record.arrival < record.first_token <= record.end
    assert result.busy_seconds <= max(record.end for record in result.records) + 1
    summary = result.summary()
    memory = summary.memory
    shares = (memory.filled, memory.reserved, memory.internal, memory.external, memory.free)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    assert 1 <= summary.mean_batched <= 8


@pytest.mark.parametrize("policy", POLICIES)
def test_first_tokens_come_in_order_of_arrival(policy):
    records = simulate(PAPER_OPT_13B, draw(40), policy=policy, settings=SMALL).records
    firsts = [record.first_token for record in records if record.num_preemptions == 0]
    assert firsts == sorted(firsts)


def test_paging_runs_more_requests_than_any_reservation():
    requests = [dataclasses.replace(one, arrival=0.0) for one in draw(60)]
    runs = {p: simulate(PAPER_OPT_13B, requests, policy=p, settings=SMALL) for p in POLICIES}
    batched = {policy: run.summary().mean_batched for policy, run in runs.items()}
    assert batched["orca_max"] < batched["orca_oracle"] < batched["paged"]
    assert runs["paged"].summary().num_preemptions > 0


def test_lengths_that_are_known_save_the_last_step():
    requests = [TraceRequest(10, 5)]
    told = dataclasses.replace(SMALL, hides_lengths=False)
    results = [simulate(PAPER_OPT_13B, requests, settings=one) for one in (SMALL, told)]
    assert [result.num_steps for result in results] == [6, 5]
    assert results[0].records == results[1].records


def test_a_shared_prefix_is_computed_and_held_once():
    settings = dataclasses.replace(SMALL, shared_prefix_len=40, max_model_len=120)
    requests = [TraceRequest(20, 20) for _ in range(6)]
    paged = simulate(PAPER_OPT_13B, requests, settings=settings)
    assert [record.num_cached for record in paged.records] == [40] * 6
    assert paged.summary().hit_rate == pytest.approx(40 / 60)
    assert paged.summary().memory.saved > 0.2
    other = simulate(PAPER_OPT_13B, requests, policy="orca_oracle", settings=settings)
    assert [(one.num_prompt, one.num_cached) for one in other.records] == [(60, 0)] * 6


def test_equal_prefix_ids_are_found_in_the_cache():
    settings = dataclasses.replace(SMALL, prefix_cache=True)
    ids = [(1, 2, 3), (), (1, 2, 4), ()]
    requests = [TraceRequest(40, 4, one, arrival=i) for i, one in enumerate(ids)]
    records = simulate(PAPER_OPT_13B, requests, settings=settings).records
    assert [record.num_cached for record in records] == [0, 0, 32, 0]


def test_beams_and_samples_end_with_their_request():
    for extra in ({"beam_width": 3}, {"num_samples": 3}):
        settings = dataclasses.replace(SMALL, **extra)
        requests = [TraceRequest(30, 12), TraceRequest(9, 20, arrival=0.1)]
        result = simulate(PAPER_OPT_13B, requests, settings=settings)
        assert [record.num_output for record in result.records] == [12, 20]
        assert result.summary().memory.saved > 0.1
        assert sum(step.num_copies for step in result.steps) > 0


def test_the_event_record_has_virtual_times(tmp_path):
    path = tmp_path / "events.jsonl"
    settings = dataclasses.replace(SMALL, event_log=path)
    result = simulate(PAPER_OPT_13B, [TraceRequest(30, 6, arrival=5.0)], settings=settings)
    lines = {line["event"]: line for line in read_events(path)}
    assert lines["arrive"]["t"] == pytest.approx(5.0)
    assert lines["end"]["t"] == pytest.approx(result.records[0].end, abs=1e-5)
    assert lines["end"]["output_tokens"] == [6]


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "at least one request"),
        ([TraceRequest(9, 9), TraceRequest(100, 61)], {}, r"requests\[1\] has 100 prompt tokens"),
        ([TraceRequest(9, 0)], {}, r"requests\[0\]"),
        ([TraceRequest(9, 9, arrival=1), TraceRequest(9, 9)], {}, r"requests\[1\] arrives at 0"),
        ([TraceRequest(60, 90)], {"num_samples": 4}, r"requests\[0\] has 90 output tokens"),
        ([TraceRequest(40, 4, (1,))], {"prefix_cache": True}, "must stand for its 40 prompt"),
        ([TraceRequest(4, 4)], {"max_model_len": 4096}, "at most the model's 2048"),
    ],
)
def test_what_cannot_be_served_is_refused(requests, options, message):
    with pytest.raises(ValueError, match=message):
        simulate(PAPER_OPT_13B, requests, settings=dataclasses.replace(SMALL, **options))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("orca_max", {"prefix_cache": True}, "prefix_cache=True must be False"),
        ("orca_max", {"preemption": "swap"}, "preemption='swap' must be 'recompute'"),
        ("static", {"num_samples": 2}, "num_samples=2 must be left out"),
    ],
)
def test_what_a_policy_has_not_got_is_refused(policy, options, message):
    settings = dataclasses.replace(SimulationSettings(), **options)
    with pytest.raises(ValueError, match=message):
        simulate(PAPER_OPT_13B, [TraceRequest(4, 4)], policy=policy, settings=settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be >= 1"),
        ({"preemption": "maybe"}, "preemption='maybe' must be one of"),
        ({"beam_width": 2, "num_samples": 2}, "num_samples=2 must be 1"),
        ({"prefix_cache": True, "shared_prefix_len": 5}, "shared_prefix_len=5 must be 0"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        SimulationSettings(**options)
