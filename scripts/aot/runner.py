"""Runs the workers, a few at a time, and survives those that abort."""

import collections
import concurrent.futures
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paged_jax_scripts.aot.cases import Case

GROUP_SIZE = 12

type Results = dict[str, dict[str, dict[str, Any]]]  # by GPU, by the cases' keys


def run_all(
    gpus: list[str], cases: list[Case], *, jobs: int, report: Callable[[str], None]
) -> Results:
    """Compile every case for every GPU, in processes of their own.

    Args:
        gpus: names in `TARGETS`.
        cases: what to compile.
        jobs: processes at a time.
        report: gets a line for every case that is done.
    """
    results: Results = {gpu: {} for gpu in gpus}
    total, lock, start = len(gpus) * len(cases), threading.Lock(), time.monotonic()

    def finish(gpu: str, key: str, facts: dict[str, Any]) -> None:
        with lock:
            results[gpu][key] = facts
            done = sum(map(len, results.values()))
            note = facts.get("reason", f"{facts.get('seconds')} s")
            elapsed = time.monotonic() - start
            report(
                f"[{done:3}/{total} {elapsed:4.0f} s] {gpu} {key}: {facts['status']}, {note[:120]}"
            )

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = [
            pool.submit(_run_group, gpu, [case.key for case in group], finish)
            for gpu in gpus
            for group in groups(cases)
        ]
        for future in waiting:
            future.result()
    return results


def groups(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that share a process: of one backend and kind, `GROUP_SIZE` at most."""
    together = collections.defaultdict(list)
    for case in cases:
        together[case.backend, case.kind].append(case)
    for group in together.values():
        for at in range(0, len(group), GROUP_SIZE):
            yield group[at : at + GROUP_SIZE]


def _run_group(gpu: str, keys: list[str], finish: Callable[[str, str, dict], None]) -> None:
    """Run a worker; cases that it does not report, because it broke itself, have crashed."""
    left, folder = list(keys), Path(tempfile.mkdtemp(prefix="compile_report_"))
    command = [sys.executable, "-m", "paged_jax_scripts.aot.worker", gpu, str(folder), *keys]
    errors = folder / "worker.txt"
    try:
        with (
            errors.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue  # what a compiler prints
                facts = json.loads(line)
                key = facts.pop("key")
                left.remove(key)
                finish(gpu, key, facts)
        last = errors.read_text(errors="replace").strip()[-400:]
        for key in left:
            reason = f"the worker ended with code {process.returncode}: {last}"
            finish(gpu, key, {"status": "crashed", "reason": reason})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
