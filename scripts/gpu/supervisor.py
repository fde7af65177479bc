"""Starts workers until every item has a result; what killed or hung one is a failed item."""

import dataclasses
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .records import SECTIONS, Budget, RecordFile

POLL_SECONDS = 0.2
GRACE_SECONDS = 15  # past the budget, for an item that had begun
MAX_WORKERS = 16
MAX_DEATHS_OF_A_CONTENDER = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds without a new record after which a worker is taken to hang."""

    item: float = 100.0
    compiling: float = 150.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """How the next worker is to be started: one compilation at a time after a fatal one."""

    threads: int
    excluded: tuple[str, ...]


def supervise(
    command: Callable[[Start], Sequence[str]],
    records: RecordFile,
    budget: Budget,
    log: Path,
    *,
    threads: int,
    limits: Limits,
) -> None:
    """Run workers one after the other until one ends well or the time is up.

    Args:
        command: the worker's command line.
        records: what workers write, and what is blamed is added to.
        budget: of the run.
        log: the workers' standard error.
        threads: compilations at a time, until one is fatal.
        limits: when a worker is taken to hang.
    """
    deaths: Counter[str] = Counter()
    retried: set[str] = set()
    for _ in range(MAX_WORKERS):
        excluded = tuple(n for n, d in deaths.items() if n and d >= MAX_DEATHS_OF_A_CONTENDER)
        before = len(records.read())
        with log.open("a") as errors:
            ending = _watch(
                subprocess.Popen(command(Start(threads=threads, excluded=excluded)), stderr=errors),
                records,
                budget,
                limits,
            )
        lines = records.read()
        if ending is None or any(r["kind"] == "fatal" for r in lines):
            return
        last = _last_unfinished(lines[before:])
        if last is None:
            if len(lines) == before:
                records.append("fatal", reason=f"the worker {ending} before it did anything")
                return
            continue  # it gave up the device after a failure that it had recorded
        if last["kind"] == "compiling":
            threads = 1  # then the next death names its item
            continue
        item, contender = last["item"], last.get("contender", "")
        deaths[contender] += 1
        if last["kind"] == "phase" and item not in retried:
            retried.add(item)
            deaths[contender] = MAX_DEATHS_OF_A_CONTENDER  # the others are measured without it
            records.append("note", text=f"{item}: {ending} with {contender}; tried again without")
            continue
        records.append(
            "result",
            item=item,
            section=_section(item),
            contender=contender,
            status="fail",
            reason=f"the process {ending}",
            trace=log.read_text()[-2000:],
        )
        print(f"{item}: fail: the process {ending}", flush=True)


def _watch(
    process: subprocess.Popen[Any], records: RecordFile, budget: Budget, limits: Limits
) -> str | None:
    """How the worker ended, or None if it ended well or at the end of the time."""
    seen, since = 0, time.time()
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            size = records.path.stat().st_size if records.path.is_file() else 0
            if size != seen:
                seen, since = size, time.time()
            if budget.used > budget.seconds + GRACE_SECONDS:
                records.append("note", text="stopped at the end of the time budget")
                return None
            lines = records.read()
            is_compiling = not lines or lines[-1]["kind"] in ("compiling", "device")
            limit = limits.compiling if is_compiling else limits.item
            if time.time() - since > limit:
                return f"gave no sign of life for {limit:.0f} s"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return None if process.returncode == 0 else f"ended with exit code {process.returncode}"


def _last_unfinished(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What had begun and has no result."""
    done = {r["item"] for r in lines if r["kind"] == "result"}
    for line in reversed(lines):
        if line["kind"] == "compiling":
            return None if set(line["items"]) <= done else line
        if line["kind"] in ("begin", "phase"):
            return None if line["item"] in done else line
    return None


def _section(item: str) -> str:
    """The section of an item, by its id's first part."""
    first = item.split("/")[0]
    names = {"racing": "racing", "decode": "speed", "step": "step", "engine": "step"}
    return names.get(first, SECTIONS[0])
