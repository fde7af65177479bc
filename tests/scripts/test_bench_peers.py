import pytest

from models import load_model
from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax_scripts.peers.engines import PEERS, Running
from paged_jax_scripts.peers.protocol import Timer
from paged_jax_scripts.peers.rounds import figures_of, installed

REQUESTS = [
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 4},
    {"prompt_token_ids": [8, 9], "max_tokens": 2},
]
COMMAND = {
    "dtype": "float32",
    "requests": REQUESTS,
    "max_model_len": 16,
    "unroll": False,
    "sampled": False,
}


@pytest.fixture
def started(toy_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "cache"))

    def start(**changes):
        folder = str(changes.pop("folder", toy_model))
        return Running("ours", tmp_path / "log", COMMAND | {"folder": folder} | changes)

    return start


def test_our_engine_by_the_peers_protocol(started, toy_model, tmp_path):
    engine = started()
    try:
        answers = [engine.run() for _ in range(2)]
        assert engine.peak_mib() > 50
    finally:
        engine.close()
    model = load_model(toy_model, cache_dir=tmp_path / "cache", progress=False)
    expected = Engine(model, config=EngineConfig(prefix_cache=False)).generate(
        [one["prompt_token_ids"] for one in REQUESTS],
        [
            SamplingParams(temperature=0.0, max_tokens=one["max_tokens"], ignore_eos=True)
            for one in REQUESTS
        ],
    )
    for answer in answers:
        assert answer["tokens"] == [list(one.token_ids) for one in expected]
        assert len(answer["gaps"]) == 3 + 1
        assert 0 < min(answer["first"]) <= answer["seconds"]
    figures = figures_of("ours", answers, answers)
    assert figures["ratios"] == [1.0, 1.0]
    assert figures["equal_requests"] == 2


def test_an_engine_that_cannot_load_says_why(started):
    with pytest.raises(RuntimeError, match=r"ours: ValueError: name_or_path='absent'"):
        started(folder="absent")


def test_missing_and_unknown_peers():
    class Printed:
        def __init__(self):
            self.lines = []

        def print(self, line):
            self.lines.append(line)

    console = Printed()
    assert installed(["ours"], console) == ["ours"]
    missing = [name for name in PEERS if not PEERS[name].is_installed]
    assert installed(list(PEERS), console) == [name for name in PEERS if name not in missing]
    assert len(console.lines) == len(missing)
    with pytest.raises(ValueError, match="--peers=frob must be among ours, vllm"):
        installed(["vllm", "frob"], console)


def test_a_timer_sees_first_tokens_and_gaps():
    timer = Timer(2)
    timer.saw(0, 1)
    timer.saw(1, 2)  # two at once: one gap, shared
    timer.saw(0, 1)  # nothing new
    timer.saw(0, 4)
    assert len(timer.gaps) == 3
    assert timer.gaps[0] == timer.gaps[1] == timer.gaps[2] > 0
    assert timer.answer([[1], [2]])["tokens"] == [[1], [2]]
