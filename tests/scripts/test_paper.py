import dataclasses
import json
import operator

import pytest
from rich.console import Console

from paged_jax.simulation.assumptions import DEFAULT
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax_scripts.experiments import runs
from paged_jax_scripts.experiments.catalogue import EXPERIMENTS, resolve_names, run_named
from paged_jax_scripts.experiments.decoding import parallel_rows
from paged_jax_scripts.experiments.preemption import model_row
from paged_jax_scripts.experiments.records import Bars, Comparison, Experiment, Options
from paged_jax_scripts.experiments.sensitivity import HEADLINES
from paged_jax_scripts.experiments.workloads import Workload


@pytest.mark.parametrize(
    ("ours", "options", "difference", "verdict"),
    [
        (1.7, {}, 0, "inside"),
        (2.7, {}, 0, "inside"),
        (1.36, {}, -0.2, "within 20 %"),
        (3.3, {}, 0.6 / 2.7, "outside"),
        (3.3, {"margin": 0.25}, 0.6 / 2.7, "within 25 %"),
        (9.7, {"margin": 8, "in_points": True}, 7, "within 8 points"),
        (-7.3, {"margin": 8, "in_points": True}, -9, "outside"),
    ],
)
def test_verdicts(ours, options, difference, verdict):
    comparison = Comparison(what="a ratio", paper=(1.7, 2.7), ours=ours, **options)
    assert comparison.difference == pytest.approx(difference)
    assert comparison.verdict == verdict


def test_a_simulated_figure_is_printed_drawn_and_written(tmp_path):
    console = Console(record=True, width=120)
    options = Options(minutes=0.5, seed=3, num_processes=1)
    assert run_named(["fig2"], options, out=tmp_path, console=console) == []
    assert (tmp_path / "fig2.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "fig2.json").read_text())
    assert record["kind"] == "simulated"
    assert record["assumptions"] == DEFAULT.values
    assert record["options"] == {"minutes": 0.5, "seed": 3, "model": None}
    tokens = {
        row["policy"]: row["token states %"] for row in record["rows"] if row["requests/s"] == 2
    }
    assert tokens["Orca (Max)"] < tokens["Orca (Pow2)"] < tokens["Orca (Oracle)"] < tokens["paged"]
    for row in record["rows"]:
        names = ("token states %", "reserved %", "internal %", "external and others %")
        assert sum(row[name] for name in names) == pytest.approx(100)
    shown = console.export_text()
    for one in record["comparisons"]:
        assert one["verdict"] in shown


def test_an_executed_figure_uses_the_block_manager():
    rows = parallel_rows(Options(minutes=0.3), concurrency=4)
    assert {row["kind"] for row in rows} == {"executed"}
    saved = {(row["workload"], row["sequences"]): row["saved %"] for row in rows}
    for name in ("sharegpt", "alpaca"):
        assert 0 < saved[name, 2] < saved[name, 4] < saved[name, 6] < 100
    assert saved["alpaca", 6] < saved["sharegpt", 6]


def test_one_failure_does_not_end_the_run(tmp_path):
    bars = Bars(title="", y_label="", groups=("a",), series={"ours": (1.0,), "paper": (None,)})
    good = Experiment(
        name="good", title="", kind="executed", how="", rows=({"a": 1},), panels=(bars,)
    )

    def fail(options):
        raise RuntimeError(f"no luck in {options.minutes} minutes")

    console = Console(record=True)
    experiments = {"bad": fail, "good": lambda options: good}
    failed = run_named(
        [*experiments], Options(), out=tmp_path, console=console, experiments=experiments
    )
    assert failed == ["bad"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json", "good.png"]
    assert "no luck in 20.0 minutes" in console.export_text()
    with pytest.raises(RuntimeError, match="no luck"):
        run_named(["bad"], Options(), out=tmp_path, console=console, experiments=experiments)


@pytest.mark.parametrize("first", [0.02, 1.9, 700.0])
def test_the_sustained_rate_is_between_those_that_are_not(first, monkeypatch):
    monkeypatch.setattr(runs, "run_job", lambda job: {"normalized_latency": job.workload.rate / 10})
    workload = Workload(name="sharegpt", rate=first, minutes=1)
    job = runs.Job(server=PAPER_OPT_13B, policy="paged", workload=workload)
    found = runs.sustained_rate(runs.Search(job=job))
    assert found.rate == pytest.approx(2, rel=0.03)
    latencies = [row["normalized_latency"] for row in found.rows]
    assert latencies == sorted(latencies)
    assert latencies[0] < 0.2 < latencies[-1]


@pytest.mark.parametrize(("latency", "message"), [(0.1, "too much"), (0.3, "within reach")])
def test_a_limit_that_no_rate_meets(latency, message, monkeypatch):
    monkeypatch.setattr(runs, "run_job", lambda job: {"normalized_latency": latency})
    workload = Workload(name="sharegpt", rate=1.0, minutes=1)
    job = runs.Job(server=PAPER_OPT_13B, policy="paged", workload=workload)
    with pytest.raises(ValueError, match=message):
        runs.sustained_rate(runs.Search(job=job))


def test_processes_keep_the_order():
    assert runs.run_all(operator.neg, [3, 1, 2], num_processes=2) == [-3, -1, -2]


def test_chat_prompts_are_the_end_of_a_history():
    chats = Workload(name="chat", rate=1.0, minutes=30).requests(DEFAULT)
    alone = Workload(name="sharegpt", rate=1.0, minutes=30).requests(DEFAULT)
    assert len(chats) == len(alone) == 1800
    assert max(one.num_prompt for one in chats) == DEFAULT.chat_max_prompt
    cut = sum(one.num_prompt == DEFAULT.chat_max_prompt for one in chats)
    assert cut > 900 > sum(one.num_prompt == DEFAULT.chat_max_prompt for one in alone)
    assert max(one.num_output for one in chats) <= DEFAULT.chat_max_output


def test_translations_and_alpaca_take_a_sixth_of_the_minutes():
    for name, mean in (("translation", 42.0), ("alpaca", 58.45)):
        requests = Workload(name=name, rate=12.0, minutes=30).requests(DEFAULT)
        assert len(requests) == 3600
        assert sum(one.num_output for one in requests) / 3600 == pytest.approx(mean, rel=0.05)
        assert requests[-1].arrival == pytest.approx(300, rel=0.1)


def test_what_a_headline_does_not_use_does_not_move_it():
    options, assumptions = Options(minutes=0.2), DEFAULT
    for name in set(DEFAULT.values) - HEADLINES["memory"].uses:
        assumptions = assumptions.scaled(name, 2.0)
    changed = dataclasses.replace(options, assumptions=assumptions)
    compute = HEADLINES["memory"].compute
    assert compute(changed) == compute(options)


def test_every_constant_is_of_use_to_some_headline():
    used = frozenset().union(*(headline.uses for headline in HEADLINES.values()))
    assert used == set(DEFAULT.values)


def test_beams_that_are_more_alike_save_more():
    options = Options(minutes=1)
    few, many = (
        HEADLINES["savings"].compute(
            dataclasses.replace(options, assumptions=DEFAULT.scaled("beam_concentration", factor))
        )
        for factor in (0.5, 2.0)
    )
    assert all(few[name] < many[name] for name in few)


def test_small_blocks_are_slow_to_swap_and_recomputation_does_not_care():
    small, large = (model_row(size, 256, DEFAULT.cost) for size in (1, 256))
    assert small["swap s"] > large["swap s"]
    assert small["recompute s"] == large["recompute s"]


@pytest.mark.parametrize("options", [{"minutes": 0.0}, {"num_processes": 0}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Options(**options)


def test_the_program(run_program, tmp_path):
    arguments = ("--minutes=0.05", "--jobs=1", f"--out={tmp_path}")
    result = run_program("paper", "fig13", *arguments, is_toy=False)
    assert result.returncode == 0, result.stderr
    assert "Orca (Oracle)" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fig13.json", "fig13.png"]


def test_names_of_experiments():
    assert resolve_names(["fig13", "fig2"]) == ["fig13", "fig2"]
    assert resolve_names(["fig2", "all"]) == [*EXPERIMENTS]
    for names in ([], ["fig1"], ["all", "fig1"]):
        with pytest.raises(ValueError, match="must be some of"):
            resolve_names(names)


def test_all_of_the_papers_figures_are_there():
    figures = {f"fig{number}" for number in (2, *range(12, 20))}
    assert set(EXPERIMENTS) == figures | {"sensitivity"}
