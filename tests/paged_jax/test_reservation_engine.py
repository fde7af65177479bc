"""The contiguous baselines in the engine: settings, refusals, and the event record."""

import pytest
from suites.engine_runs import drive, greedy, make_engine

from paged_jax import EngineConfig, SamplingParams
from paged_jax.blocks.replay import BlockReplay
from paged_jax.events import block_events, read_events

ORCA = {"reservation": "orca_oracle", "prefix_cache": False}


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="reservation='orca' must be one of 'paged', 'orca_max'"):
        EngineConfig(reservation="orca")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix_cache=True must be False with reservation='orca_"):
        EngineConfig(reservation="orca_pow2")
    with pytest.raises(ValueError, match="preemption='swap' must be 'recompute' with reservation="):
        EngineConfig(reservation="orca_max", prefix_cache=False, preemption="swap")


def test_registered_prefixes_are_refused():
    engine = make_engine(**ORCA)
    with pytest.raises(
        ValueError, match="reservation='orca_oracle' must be 'paged' for registered"
    ):
        engine.register_prefix([1, 2, 3])
    assert not engine.has_unfinished


def test_what_would_never_fit_is_refused_when_added():
    engine = make_engine(**ORCA)
    with pytest.raises(ValueError, match="orca_oracle: 4 regions of 20 tokens must fit the pool"):
        engine.add_request([1] * 9, SamplingParams(n=4, max_tokens=20))
    request_id = engine.add_request([1] * 9, SamplingParams(n=4, max_tokens=5, seed=0))
    assert drive(engine)[request_id][-1].finished


def test_no_preemption_and_fewer_at_a_time():
    """Three of 20 tokens start paged, one preempts another; contiguous, two regions of 32 fit."""
    most = {}
    for policy in ("paged", "orca_oracle", "orca_max"):
        engine = make_engine(reservation=policy, prefix_cache=False)
        running: list[int] = []
        for first in range(4):
            engine.add_request([first] * 8, greedy(12))

        def look(index: int, engine=engine, running=running) -> None:
            running.append(engine.scheduler.num_running)

        drive(engine, before_step=look)
        most[policy] = max(running)
        assert (engine.stats.num_preemptions > 0) is (policy == "paged")
    assert most == {"paged": 4, "orca_oracle": 2, "orca_max": 1}


def test_the_record_tells_regions_and_where_memory_goes(tmp_path):
    path = tmp_path / "events.jsonl"
    engine = make_engine(event_log=path, **ORCA)
    engine.add_request([1] * 9, SamplingParams(n=2, max_tokens=6, seed=0))
    drive(engine)
    replay, steps = BlockReplay(), []
    for line in read_events(path):
        if line["event"] == "step":
            steps.append(line)
            assert replay.stats(num_blocks=17, block_size=4).filled == line["filled"]
            assert sorted(map(len, replay.reserved.values())) == [4, 4]
        for event in block_events(line):
            replay.take(event)
    # Two regions of 9 + 6 tokens in 4 blocks; the step that computes the prompt forks it too.
    first = {name: steps[0][name] for name in ("filled", "reserved", "external", "waste")}
    assert first == {"filled": 18, "reserved": 12, "external": 2, "waste": 14}
    assert not replay.tables
    assert not replay.reserved
