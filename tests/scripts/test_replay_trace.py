import json
from pathlib import Path

import numpy as np
import pytest

from models.llama import LlamaConfig, as_model, random_params
from paged_jax import Engine, EngineConfig, count_compilations
from paged_jax.events import read_events
from paged_jax.simulation.results import RequestRecord
from paged_jax.simulation.traces import TraceRequest, read_trace
from paged_jax_scripts.replay_figures import make_figures, most_at_once, table_rows
from paged_jax_scripts.replaying import EngineReplay, PromptMaker, warm_up

TRACE = Path(__file__).parents[1] / "data" / "prefix_trace.csv"
SIMULATED = ("--mode=simulated", "--server=opt-13b")
REQUESTS = [TraceRequest(9, 3), TraceRequest(5, 6, arrival=0.01), TraceRequest(20, 1, arrival=0.02)]


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig.tiny()
    return as_model(config, random_params(config, seed=0))


@pytest.fixture
def make_engine(model):
    def make(**settings) -> Engine:
        fixed = {"block_size": 4, "num_blocks": 65, "max_num_seqs": 2, "max_model_len": 64}
        return Engine(model, config=EngineConfig(**fixed, **settings))

    return make


def replay(engine: Engine, requests, **settings) -> EngineReplay:
    prompts = PromptMaker(vocab_size=engine.model.spec.vocab_size, tokens_per_id=4, seed=0)
    result = EngineReplay(engine, requests, make_prompt=prompts.make, **settings)
    result.run()
    return result


def test_real(run_program, tmp_path):
    figures_path, log = tmp_path / "figures.json", tmp_path / "events.jsonl"
    result = run_program(
        "replay_trace", f"--trace={TRACE}", "--block_size=4", "--num_blocks=65", "--time_scale=100",
        "--max_model_len=20", "--max_num_batched_tokens=32", f"--json={figures_path}",
        f"--event_log={log}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    requests = read_trace(TRACE)
    num_fitting = sum(one.num_prompt + one.num_output <= 20 for one in requests)
    figures = json.loads(figures_path.read_text())
    assert 0 < num_fitting < len(requests)
    assert (figures["num_left_out"], figures["num_clipped"]) == (len(requests) - num_fitting, 0)
    assert figures["summary"]["num_requests"] == num_fitting
    assert figures["summary"]["hit_rate"] > 0
    assert "left out (--clip cuts them)" in result.stdout
    events = list(read_events(log))
    assert sum(event["event"] == "end" for event in events) == num_fitting
    assert f"│ {num_fitting}" in result.stdout


def test_simulated(run_program, tmp_path):
    figures_path, log = tmp_path / "figures.json", tmp_path / "events.jsonl"
    result = run_program(
        "replay_trace", f"--trace={TRACE}", *SIMULATED, "--block_size=4", "--max_model_len=20",
        "--clip", "--rate=50", f"--json={figures_path}", f"--event_log={log}", is_toy=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(figures_path.read_text())
    assert figures["num_clipped"] > 0 == figures["num_left_out"]
    assert figures["summary"]["num_requests"] == len(read_trace(TRACE))
    assert figures["summary"]["hit_rate"] > 0
    assert sum(event["event"] == "end" for event in read_events(log)) == len(read_trace(TRACE))


def test_simulated_dataset_in_whole_batches(run_program):
    result = run_program(
        "replay_trace", "--dataset=alpaca", "--num_requests=20", "--rate=5", "--policy=static",
        *SIMULATED, is_toy=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "opt-13b, static, simulated" in result.stdout


def test_malformed_trace_is_one_line(run_program, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,3,1\n1,none,1\n")
    result = run_program("replay_trace", f"--trace={path}", *SIMULATED, is_toy=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "line 3: prompt_tokens='none' must be an integer" in result.stderr


def test_flags_that_do_not_fit(run_program):
    result = run_program("replay_trace", f"--trace={TRACE}", "--policy=static", is_toy=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: policy=static must be run with mode=simulated")


@pytest.mark.parametrize("policy", ["paged", "orca_max", "orca_pow2", "orca_oracle"])
def test_every_policy_on_an_engine(make_engine, policy):
    engine = make_engine(reservation=policy, prefix_cache=False)
    run = replay(engine, REQUESTS)
    records = sorted(run.records, key=lambda record: record.request_id)
    assert [(one.num_prompt, one.num_output) for one in records] == [(9, 3), (5, 6), (20, 1)]
    assert all(one.arrival <= one.first_token <= one.end for one in records)
    assert (run.num_added, run.refused) == (3, [])
    memory = make_figures(run.records, gaps=run.gaps, meter=run.meter).summary.memory
    parts = memory.filled + memory.reserved + memory.internal + memory.external + memory.free
    assert parts == pytest.approx(1)
    assert memory.filled > 0
    assert (memory.reserved == 0) == (policy == "paged")


def test_ids_are_found_in_the_cache(make_engine):
    twice = [TraceRequest(10, 2, (0, 1, 2)), TraceRequest(10, 2, (0, 1, 3), arrival=0.3)]
    run = replay(make_engine(), twice)
    assert [one.num_cached for one in run.records] == [0, 8]


def test_refused_requests_are_kept_apart(make_engine):
    run = replay(make_engine(), [TraceRequest(70, 1), *REQUESTS])
    assert [one.request_id for one in run.refused] == [0]
    assert "70" in run.refused[0].reason
    assert len(run.records) == run.num_added == 3
    figures = make_figures(
        run.records, gaps=run.gaps, meter=run.meter, num_refused=len(run.refused)
    )
    assert dict(table_rows(figures))["requests that ended"] == "3, 1 were refused"


def test_ends_when_time_is_over(make_engine):
    run = replay(
        make_engine(), [TraceRequest(4, 1), TraceRequest(4, 1, arrival=60)], max_seconds=0.5
    )
    assert [one.request_id for one in run.records] == [0]


def test_prompts(model):
    size = model.spec.vocab_size
    prompts = PromptMaker(vocab_size=size, tokens_per_id=4, seed=1)
    first, second = (prompts.make(TraceRequest(7, 1, ids)) for ids in ((5, 6), (5, 7)))
    alone = [prompts.make(TraceRequest(7, 1)) for _ in range(2)]
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]
    assert alone[0] != alone[1]
    assert {len(prompt) for prompt in (first, second, *alone)} == {7}
    assert np.max([first, second, *alone]) < size


def test_warm_engine_compiles_nothing(make_engine):
    warm_up(make_engine(), seed=0)
    engine = make_engine()
    with count_compilations() as compiled:
        run = replay(engine, REQUESTS)
    assert len(run.records) == len(REQUESTS)
    assert compiled.count == 0


def test_most_at_once():
    def record(first: float, end: float) -> RequestRecord:
        return RequestRecord(
            request_id=0, arrival=0.0, first_token=first, end=end, num_prompt=1, num_output=1
        )

    assert most_at_once([record(0, 2), record(1, 3), record(2, 4)]) == 2
    assert most_at_once([]) == 0
