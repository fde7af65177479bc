"""What a run leaves behind: one JSON object a line, written as it happens, and the time budget."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

SECTIONS = ("numerics", "racing", "speed", "step")  # in order of value
# Share of the budget at which a section stops; what is left over goes to the next.
SECTION_ENDS = {"numerics": 0.42, "racing": 0.5, "speed": 0.85, "step": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Seconds that a run may take, counted from its start and across restarts of its worker."""

    started: float
    seconds: float

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.time() - self.started

    def has_room(self, section: str) -> bool:
        """Whether a section may begin something new."""
        return self.used < self.seconds * SECTION_ENDS[section]


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """`records.jsonl`; `kind` is "device", "compiling", "begin", "phase", "result" or "fatal"."""

    path: Path

    def append(self, kind: str, **fields: Any) -> None:
        """Add a line; it is on disk when this returns, whatever the GPU does next."""
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Every whole line."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text().splitlines()
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the last line of a process that was killed
                continue
        return records

    def results(self) -> list[dict[str, Any]]:
        """The results, one an item: the last, where an item was tried again."""
        return list({r["item"]: r for r in self.read() if r["kind"] == "result"}.values())
