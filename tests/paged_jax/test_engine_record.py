"""The engine's event record says how memory was really used: replayed, it is the same."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from suites.block_model import check_replay
from suites.engine_runs import drive, greedy, make_engine, random_mix, random_prompts, run_all
from suites.small_models import letters, nan_model, scripted_model

from paged_jax.blocks.replay import BlockReplay
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.events import block_events, read_events


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "events.jsonl"


def lines_of(path: pathlib.Path, *events: str) -> list[dict[str, Any]]:
    return [line for line in read_events(path) if line["event"] in events]


def replay_now(engine: Engine, path: pathlib.Path) -> None:
    """What the record says so far is what the manager holds; what step lines count adds up."""
    assert engine._record is not None
    engine._record.flush()
    replay, about = BlockReplay(), {}
    for line in read_events(path):
        if line["event"] == "file":
            about = {name: line[name] for name in ("num_blocks", "block_size")}
        if line["event"] == "step":
            stats = replay.stats(**about)
            for name in ("filled", "waste", "saved"):
                assert line[name] == getattr(stats, name), line
            assert line["used"] + line["free"] == about["num_blocks"] - 1
            assert line["waste"] <= line["used"] * about["block_size"] - line["filled"]
        for event in block_events(line):
            replay.take(event)
    check_replay(replay, engine.block_manager)


@pytest.mark.parametrize("seed", range(2))
def test_replaying_a_random_run_gives_every_table_at_every_step(path: pathlib.Path, seed: int):
    engine = make_engine(
        num_blocks=17, event_log=str(path), event_log_bytes=6000, event_log_files=99
    )
    ids = list(random_mix(engine, seed, after_step=lambda: replay_now(engine, path)))
    lines = list(read_events(path))
    assert sum(line["event"] == "file" for line in lines) > 1
    assert {line["event"] for line in lines} >= {"allocate", "fill", "share", "free", "preempt"}
    assert {line["request"] for line in lines if line["event"] == "arrive"} == set(ids)
    assert sorted(line["request"] for line in lines if line["event"] == "end") == sorted(ids)
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, engine.stats.num_steps + 1))
    times = [line["t"] for line in lines if line["event"] not in ("file", "fill")]
    assert times == sorted(times)
    for name, total in (
        ("prompt_tokens", engine.stats.num_prompt_tokens),
        ("filled", engine.stats.filled_slots),
    ):
        assert sum(line[name] for line in lines if line["event"] == "step") == total


def test_the_life_of_a_request(path: pathlib.Path):
    engine = make_engine(scripted_model([1, 2, 3], vocab_size=5), event_log=str(path))
    name = engine.add_request([4] * 6, greedy(5))
    engine.add_request([4] * 3, greedy(2, n=2))
    drive(engine)
    life = [line for line in read_events(path) if line.get("request") == name]
    for line in life:
        del line["t"]
    idle = {"running": 0, "waiting": 1, "preempted": 0, "used": 0, "free": 16}
    both = {"running": 3, "waiting": 0, "preempted": 0, "used": 3, "free": 13}
    alone = {"running": 0, "waiting": 0, "preempted": 0, "used": 0, "free": 16}
    assert life == [
        {"step": 0, "event": "arrive", "request": name, "seqs": [0]}
        | {"prompt_tokens": 6, "max_tokens": 5}
        | idle,
        {"step": 1, "event": "start", "request": name, "seqs": [0]} | both,
        {"step": 6, "event": "end", "request": name, "seqs": [0]}
        | {"prompt_tokens": 6, "output_tokens": [5], "reasons": ["length"], "preemptions": 0}
        | alone,
    ]
    other = lines_of(path, "end")[0]
    assert (other["seqs"], other["output_tokens"]) == ([1, 2], [2, 2])
    assert other["reasons"] == ["length", "length"]


def test_ends_have_their_reasons(path: pathlib.Path):
    model = scripted_model([1, 2, 3], vocab_size=6, tokenizer=letters(6), eos_token_ids=(3,))
    engine = make_engine(model, event_log=str(path))
    by_token = engine.add_request([4], greedy(9))
    by_text = engine.add_request([5], greedy(2, stop=["c"]))  # together with the length
    dropped = engine.add_request([5], greedy(9))
    engine.cancel(dropped)
    drive(engine)
    ends = {line["request"]: line["reasons"] for line in lines_of(path, "end")}
    assert ends == {by_token: ["stop"], by_text: ["stop"], dropped: ["cancelled"]}
    # The blocks were given back for the reason that was known then.
    assert {line["reason"] for line in lines_of(path, "free")} == {"stop", "length"}


def test_a_preemption_is_told_before_its_blocks_go(path: pathlib.Path):
    engine = make_engine(num_blocks=9, event_log=str(path))
    run_all(engine, random_prompts(0, [8, 9, 9]), greedy(20))
    assert engine.stats.num_preemptions
    lines = list(read_events(path))
    preempts = [index for index, line in enumerate(lines) if line["event"] == "preempt"]
    assert len(preempts) == engine.stats.num_preemptions
    for index in preempts:
        line, after = lines[index], lines[index + 1]
        assert line["reason"] == "recompute"
        assert (after["event"], after["reason"]) == ("free", "preempt")
        assert [after["seq"]] == line["seqs"]
        assert after["step"] == line["step"]
        assert line["computed_tokens"][0] > 0
    resumed = [line["request"] for line in lines if line["event"] == "resume"]
    assert sorted(resumed) == sorted(lines[index]["request"] for index in preempts)
    ends = {line["request"]: line["preemptions"] for line in lines if line["event"] == "end"}
    assert sum(ends.values()) == engine.stats.num_preemptions


def test_no_text_and_no_token_is_written(path: pathlib.Path):
    """Neither the prompt's words nor the ids of tokens, which are all above any count here."""
    model = scripted_model([777, 888], vocab_size=1000, tokenizer=letters(1000))
    engine = make_engine(model, event_log=str(path))
    secret = letters(1000).decode([901, 902, 903, 904, 905])
    out = engine.generate([secret], greedy(6, stop=[chr(0x61 + 888)]))[0]
    assert out.text
    assert 777 in out.token_ids

    def numbers(value: Any) -> set[int]:
        if isinstance(value, dict):
            return set().union(*(numbers(v) for k, v in value.items() if k not in ("t", "time")))
        if isinstance(value, list):
            return set().union(*map(numbers, value))
        return {value} if isinstance(value, int) else set()

    for line in read_events(path):
        assert not numbers(line) & {777, 888, 901, 902, 903, 904, 905}, line
    text = path.read_text("utf-8")
    assert not any(letter in text for letter in secret)
    assert "\\u" not in text


def test_the_record_is_written_when_the_engine_is_idle_and_when_it_fails(path: pathlib.Path):
    engine = make_engine(event_log=str(path))
    engine.generate([[1, 2, 3]], greedy(4))
    assert lines_of(path, "end")
    bad = path.with_name("bad.jsonl")
    engine = make_engine(nan_model(), check_logits=True, event_log=bad)
    with pytest.raises(FloatingPointError):
        engine.generate([[1, 2, 3]], greedy(4))
    assert lines_of(bad, "fail")[0]["error"] == "FloatingPointError"
    assert lines_of(bad, "start")


def test_outputs_are_the_same_with_and_without(path: pathlib.Path):
    prompts = random_prompts(3, [5, 9, 14])
    outputs = [
        [out.token_ids for out in run_all(make_engine(**config), prompts, greedy(12))]
        for config in list[dict[str, Any]]([{}, {"event_log": str(path)}])
    ]
    assert outputs[0] == outputs[1]


def test_without_a_record_nobody_observes():
    engine = make_engine()
    assert engine.block_manager._observer is None
    assert engine.scheduler.preemptor.on_preempt is None


def test_a_bad_path_is_refused_when_the_engine_is_made(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="must be a file that can be written"):
        make_engine(event_log=str(tmp_path / "no" / "events"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("event_log", 3),
        ("event_log_bytes", 0),
        ("event_log_files", -1),
        ("zero_on_free", 1),
    ],
)
def test_settings_are_checked(field: str, value: Any):
    with pytest.raises(ValueError, match=f"{field}={value!r} must be"):
        EngineConfig(**{field: value})
