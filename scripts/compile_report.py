"""Compiles every GPU kernel and the whole decode step for A100, H100, H200 and B200, without a GPU.

`make compile-report` makes the environment that this needs (JAX's CUDA plugin, ptxas, nvdisasm)
and runs it. It writes a table and the same as JSON, and ends with 1 if a kernel spills, misses the
tensor cores, copies the pool or breaks another of the rules of `aot/gates.py`.
"""

import datetime
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from paged_jax_scripts.aot import cases, gates, table
from paged_jax_scripts.aot.diff import diff_lines
from paged_jax_scripts.aot.kernels import tool_version
from paged_jax_scripts.aot.runner import Results, run_all
from paged_jax_scripts.aot.targets import TARGETS

_GPUS = flags.DEFINE_list("gpus", list(TARGETS), "GPUs to compile for")
_KERNELS = flags.DEFINE_list(
    "kernels", [], "only cases whose key (backend/kind-...) contains one of these; none: all"
)
_OUT = flags.DEFINE_string("out", None, "write the Markdown report here")
_JSON = flags.DEFINE_string("json", None, "write the figures here")
_DIFF = flags.DEFINE_string("diff", None, "print what differs from this JSON")
_UPDATE = flags.DEFINE_string(
    "update", None, "take what is not compiled now from this JSON of the same versions"
)
_JOBS = flags.DEFINE_integer("jobs", 2, "compiling processes at a time", lower_bound=1)


def choose_cases(words: list[str]) -> list[cases.Case]:
    """The cases whose key contains one of the words, or all.

    Raises:
        app.UsageError: no case does.
    """
    chosen = [
        case for case in cases.all_cases() if not words or any(word in case.key for word in words)
    ]
    if not chosen:
        raise app.UsageError(f"--kernels={','.join(words)} names no case")
    return chosen


def versions() -> dict[str, Any]:
    """What the figures depend on.

    Raises:
        FileNotFoundError: CUDA's compiler or disassembler is not there.
    """
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "jax": importlib.metadata.version("jax"),
        "ptxas": tool_version("ptxas"),
        "nvdisasm": tool_version("nvdisasm"),
    }


def merge(kept: dict[str, Any], new: dict[str, Any]) -> Results:
    """The new results, and of the kept ones what the new have not.

    Args:
        kept: an earlier report.
        new: the report of this run.

    Raises:
        ValueError: the versions differ.
    """
    for name in ("schema", "jax", "ptxas", "nvdisasm"):
        if kept[name] != new[name]:
            raise ValueError(f"--update: {name} was {kept[name]}; must be {new[name]}")
    known = {case.key for case in cases.all_cases()}
    results: Results = {}
    for gpu in TARGETS:
        both = kept["results"].get(gpu, {}) | new["results"].get(gpu, {})
        if found := {key: facts for key, facts in both.items() if key in known}:
            results[gpu] = found
    return results


def markdown(report: dict[str, Any], chosen: list[cases.Case]) -> str:
    """The report for readers."""
    statuses = [facts["status"] for found in report["results"].values() for facts in found.values()]
    head = table.HEADER.format(
        **{name: report[name] for name in ("date", "jax", "ptxas", "nvdisasm")},
        num_ok=statuses.count("ok"),
        num_unsupported=statuses.count("unsupported"),
        num_violations=len(report["violations"]),
        rows=cases.NUM_ROWS,
        heads=cases.NUM_KV_HEADS,
        context=cases.CONTEXT,
        prefill=cases.PREFILL_ROWS,
        layers=cases.NUM_LAYERS,
    )
    lines = [head, "## Violations\n"]
    lines += [f"- {line}" for line in report["violations"]] or ["None."]
    lines += table.report_lines(report["results"], chosen)
    return "\n".join(lines) + "\n"


def to_json(report: dict[str, Any]) -> str:
    """The report as JSON, a line for every case."""
    lines = [f'"{name}": {json.dumps(report[name])},' for name in report if name != "results"]
    gpus = []
    for gpu, found in report["results"].items():
        rows = [f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found)]
        gpus.append(f'"{gpu}": {{\n' + ",\n".join(rows) + "\n}")
    return "{\n" + "\n".join(lines) + '\n"results": {\n' + ",\n".join(gpus) + "\n}\n}\n"


def main(argv: list[str]) -> None:
    """Compile, check, write, compare."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    unknown = sorted(set(_GPUS.value) - set(TARGETS))
    if unknown:
        raise app.UsageError(f"--gpus names {unknown}; must be of {list(TARGETS)}")
    chosen, start = choose_cases(_KERNELS.value), time.monotonic()
    try:
        made_with = versions()
    except FileNotFoundError as error:
        print(f"error: {error}; run `make compile-report`", file=sys.stderr)
        sys.exit(2)
    results = run_all(_GPUS.value, chosen, jobs=_JOBS.value, report=lambda x: print(x, flush=True))
    report = {**made_with, "violations": [], "results": results}
    if _UPDATE.value is not None and Path(_UPDATE.value).is_file():
        report["results"] = merge(json.loads(Path(_UPDATE.value).read_text()), report)
        chosen = cases.all_cases()
    for gpu, found in report["results"].items():
        present = [case for case in chosen if case.key in found]
        report["violations"] += gates.check(gpu, present, found)
    if _DIFF.value is not None and Path(_DIFF.value).is_file():
        changed = diff_lines(json.loads(Path(_DIFF.value).read_text()), report)
        print(f"{len(changed)} figures differ from {_DIFF.value}")
        print("\n".join(changed))
    for path, text in ((_OUT.value, markdown(report, chosen)), (_JSON.value, to_json(report))):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
    print(f"{len(report['violations'])} violations in {time.monotonic() - start:.0f} s")
    print("\n".join(report["violations"]))
    sys.exit(bool(report["violations"]))


def run() -> None:
    """Entry point."""
    app.run(main)


if __name__ == "__main__":
    run()
