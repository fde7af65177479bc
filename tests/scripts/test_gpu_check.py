"""`gpu_check` without a GPU: its rehearsal, its judgement of results, and what it does with workers
that die or hang."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.devices import B200, H100
from scripts import gpu_check
from scripts.gpu import cases, numerics, records, speed, supervisor, worker
from scripts.gpu.summary import draw, summarise

SCRIPT = Path(gpu_check.__file__)


def run_script(out, *flags):
    return subprocess.run(
        [sys.executable, str(SCRIPT), f"--out={out}", *flags],
        cwd=out.parent,  # nothing is found by way of the working folder
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_rehearsal_runs_every_section(tmp_path):
    result = run_script(tmp_path / "out", "--cpu_rehearsal", "--threads=2")
    log = (tmp_path / "out/worker.log").read_text()
    assert result.returncode == 0, result.stdout + result.stderr + log
    found = json.loads((tmp_path / "out/results.json").read_text())
    by_section = {name: [] for name in records.SECTIONS}
    for line in found["results"]:
        assert line["status"] in ("pass", "measured"), line
        by_section[line["section"]].append(line)
    backends = {line["contender"] for line in by_section["numerics"]}
    assert backends == {"mosaic", "triton", "xla"}
    assert {line["contender"] for line in by_section["racing"]} == {"mosaic", "triton"}
    contenders = by_section["speed"][0]["contenders"]
    assert {"mosaic", "triton", "xla", "dense xla", "jax paged", "empty"} <= set(contenders)
    assert set(by_section["speed"][0]["skipped"]) == {"dense cudnn", "torch sdpa", "flashinfer"}
    assert any(line["item"] == "engine/smollm2" for line in by_section["step"])
    assert "decode attention, bytes/s as a share" in (tmp_path / "out/summary.txt").read_text()
    assert found["device"]["versions"]["jax"]


def test_no_gpu_is_an_error(tmp_path):
    result = run_script(tmp_path / "out")
    assert result.returncode == 2
    assert "error: no NVIDIA GPU: JAX's default device is cpu" in result.stderr


def test_a_spent_budget_skips_and_still_writes(tmp_path):
    result = run_script(tmp_path / "out", "--cpu_rehearsal", "--budget_s=0.001")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert {line["status"] for line in found["results"]} <= {"skipped"}


def test_flags_that_do_not_fit(tmp_path):
    result = run_script(tmp_path / "out", "extra")
    assert "unexpected arguments ['extra']" in result.stdout + result.stderr
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "--out must name a folder" in result.stdout + result.stderr


def test_annotations_without_jaxtyping():
    program = (
        "import sys; sys.modules['jaxtyping'] = None\n"
        f"sys.path.insert(0, {str(SCRIPT.parents[1])!r})\n"
        "from scripts.gpu_check import provide_jaxtyping\n"
        "del sys.modules['jaxtyping']\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jaxtyping': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "provide_jaxtyping()\n"
        "import pallas_kernels.paged_attention, pallas_kernels.kv_write\n"
        "import pallas_kernels.block_copy, scripts.gpu.numerics, scripts.gpu.speed\n"
        "print('imported')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout == "imported\n", result.stderr


# Workers made of a few lines of Python: what they leave in the records is all that counts.
APPEND = (
    "import json, os, sys, time; f = open({path!r}, 'a', buffering=1)\n"
    "def say(kind, **x): f.write(json.dumps(dict(kind=kind, **x)) + '\\n')\n"
    "done = [json.loads(x)['item'] for x in open({path!r}) if '\"result\"' in x]\n"
    "excluded = sys.argv[1].split(',')\n"
    "def ok(item): say('result', item=item, section='numerics', status='pass')\n"
)


def supervised(tmp_path, program, *, limits=None, threads=4):
    record_file = records.RecordFile(tmp_path / "records.jsonl")
    record_file.path.touch()
    starts = []

    def command(start):
        starts.append(start)
        code = APPEND.format(path=str(record_file.path)) + program
        return [sys.executable, "-c", code, ",".join(start.excluded)]

    supervisor.supervise(
        command,
        record_file,
        records.Budget(started=time.time(), seconds=60),
        tmp_path / "log",
        threads=threads,
        limits=limits or supervisor.Limits(),
    )
    return {r["item"]: r for r in record_file.results()}, starts, record_file.read()


def test_a_kernel_that_kills_its_worker_fails_and_the_rest_goes_on(tmp_path):
    program = (
        "for item in ('a', 'b', 'c'):\n"
        "    if item in done: continue\n"
        "    say('begin', item=item, contender='mosaic')\n"
        "    if item == 'b': os._exit(9)\n"
        "    ok(item)\n"
    )
    results, starts, _ = supervised(tmp_path, program)
    assert {item: r["status"] for item, r in results.items()} == {
        "a": "pass",
        "b": "fail",
        "c": "pass",
    }
    assert results["b"]["reason"] == "the process ended with exit code 9"
    assert len(starts) == 2


def test_a_hang_is_ended(tmp_path):
    program = (
        "if 'a' in done: ok('b'); sys.exit()\n"
        "say('begin', item='a', contender='mosaic'); time.sleep(60)\n"
    )
    limits = supervisor.Limits(item=1.5, compiling=60)
    results, _, _ = supervised(tmp_path, program, limits=limits)
    assert results["a"]["reason"] == "the process gave no sign of life for 2 s"
    assert results["b"]["status"] == "pass"


def test_after_a_fatal_compilation_one_at_a_time(tmp_path):
    program = (
        "first = sum('compiling' in x for x in open(f.name)) == 0\n"
        "say('compiling', items=['a', 'b'])\n"
        "if first: os._exit(6)\n"
        "ok('a'); ok('b')\n"
    )
    results, starts, _ = supervised(tmp_path, program)
    assert [start.threads for start in starts] == [4, 1]
    assert all(r["status"] == "pass" for r in results.values())


def test_a_contender_that_is_fatal_is_left_out_and_its_item_tried_again(tmp_path):
    program = (
        "say('begin', item='decode/x', contender='')\n"
        "say('phase', item='decode/x', contender='mosaic')\n"
        "if 'mosaic' not in excluded: os._exit(1)\n"
        "ok('decode/x')\n"
    )
    results, starts, lines = supervised(tmp_path, program)
    assert results["decode/x"]["status"] == "pass"
    assert starts[1].excluded == ("mosaic",)
    assert any("tried again without" in r.get("text", "") for r in lines)


def test_a_worker_that_does_nothing_is_fatal(tmp_path):
    _, _, lines = supervised(tmp_path, "sys.exit(3)\n")
    assert lines[-1]["reason"] == "the worker ended with exit code 3 before it did anything"


def test_compare_names_the_worst_place():
    wanted = (np.zeros((2, 3)), np.array([0.0, -np.inf]))
    assert numerics.compare(wanted, wanted, 1e-3)["status"] == "pass"
    wrong = np.zeros((2, 3))
    wrong[1, 2] = 0.5
    fields = numerics.compare((wrong, wanted[1]), wanted, 1e-3)
    assert fields["reason"] == "out[1, 2] is 0.5, must be 0.0"
    wrong[1, 2] = np.nan
    fields = numerics.compare((wrong, wanted[1]), wanted, 1e-3)
    assert (fields["status"], fields["out_error"]) == ("fail", "not finite")
    fields = numerics.compare((wanted[0], np.array([0.0, 1.0])), wanted, 1e-3)
    assert fields["reason"] == "lse[1] is 1.0, must be -inf"


@pytest.mark.parametrize("case", cases.attention_cases(rehearsal=False)[::7])
def test_cases_poison_what_is_not_read(case):
    call = cases.attention_arrays(case)
    _, pool, tables, kv_lens, q_lens = call.args
    used = np.arange(tables.shape[1]) < -(-kv_lens // case.block_size)[:, None]
    assert np.isin(tables[~used], cases.POISON_ENTRIES).all()
    poisoned = call.arrays["kv_scales"] if "kv_scales" in call.arrays else pool.astype(np.float32)
    assert np.isnan(poisoned).any()
    assert (q_lens <= np.minimum(kv_lens, case.max_new)).all()


def test_cases_have_names_of_their_own_and_every_axis():
    all_cases = cases.attention_cases(rehearsal=False)
    assert len({case.name for case in all_cases}) == len(all_cases)
    assert {case.kv_dtype for case in all_cases} == set(cases.DTYPES)
    assert {case.max_new for case in all_cases} == {1, 4, 64, 512}
    assert {case.head_dim for case in all_cases} == {64, 80, 96, 128, 256}
    assert {case.block_size for case in all_cases} == {8, 16, 32, 64, 128}


def test_the_speed_section_has_every_shape_of_the_benchmark():
    shapes = speed.shapes(rehearsal=False)
    loads = {(s.batch, s.context) for s in shapes}
    assert loads == {(b, c) for b in (1, 8, 32, 128) for c in (512, 2048, 8192, 32768)}
    assert len({s.name for s in shapes}) == len(shapes) == 4 * 2 * 16


def test_sets_of_rows_defeat_the_cache_where_they_can():
    large = speed.Shape(heads=speed.HEAD_SHAPES["llama3-8b"], batch=8, context=2048, block_size=16)
    sets = speed.num_sets(large.call(), B200)
    assert sets * large.cost.kv_bytes >= 2 * B200.l2_bytes
    assert speed.num_turns(large.call(), H100, 2) * 2 * large.cost.floor_seconds(H100) < 0.01


def test_in_place_results_are_judged_by_bits_or_by_a_rounding():
    x = np.array([[1.0, np.nan]], np.float32)
    assert numerics._difference(x, x.copy(), False) == ""
    assert "1 elements differ" in numerics._difference(x, x + 1e-6, False)
    stored = np.full((1, 1, 1, 1, 4), 5, np.int8)
    assert numerics._difference(stored, stored + np.int8(1), True) == ""
    assert "4 elements differ" in numerics._difference(stored, stored + np.int8(2), True)


def test_summary_and_plot_of_a_run_with_failures(tmp_path):
    record_file = records.RecordFile(tmp_path / "records.jsonl")
    record_file.append(
        "device", device_kind="NVIDIA Z", versions={"jax": "0.11.2"}, date="2026-01-01"
    )
    common = {"section": "speed", "in_l2": True, "copy_bytes_per_s": 2e12, "floor_seconds": 1e-5}
    record_file.append(
        "result",
        item="decode/toy",
        status="measured",
        contenders={"triton": {"seconds": 2e-5, "share_of_copy": 0.75}},
        **common,
    )
    record_file.append("result", item="bad", section="numerics", status="fail", reason="wrong")
    with record_file.path.open("a") as file:
        file.write('{"kind": "resu')  # by a process that was killed
    text, everything = summarise(record_file, seconds=12.3)
    assert "numerics: 1 fail" in text
    assert "  bad: wrong" in text
    assert "75%  (in L2)" in text
    assert draw(everything, tmp_path / "speed.png").startswith(("plot: ", "no plot: matplotlib"))
    assert draw({"results": []}, tmp_path / "none.png") == "no plot: no speed was measured"


def test_a_lost_device_ends_the_worker_after_its_result(tmp_path, monkeypatch):
    context = worker.Context(
        rehearsal=True,
        backends=("triton",),
        excluded=frozenset({"mosaic"}),
        budget=records.Budget(started=time.time(), seconds=60),
        records=records.RecordFile(tmp_path / "records.jsonl"),
    )

    def broken(programs):
        raise RuntimeError("illegal address")

    def refuse():
        raise NotImplementedError("not here")

    def item(name, contender, prepare):
        return worker.Item(item_id=name, section="racing", contender=contender, prepare=prepare)

    items = [
        item("excluded", "mosaic", refuse),
        item("refused", "triton", refuse),
        item("broken", "triton", lambda: worker.Prepared(programs={}, run=broken)),
    ]
    worker.work(items, context, threads=1)  # the device still answers: no end
    status = {r["item"]: r["status"] for r in context.records.results()}
    assert status == {"excluded": "skipped", "refused": "unsupported", "broken": "fail"}
    monkeypatch.setattr(worker, "device_answers", lambda: False)
    context.records.path.unlink()
    with pytest.raises(worker.LostDeviceError):
        worker.work(items, context, threads=1)
    assert context.records.results()[-1]["item"] == "broken"
