"""The engines of ``bench_peers``: where each lives, and a process that runs one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An engine to compare.

    Attributes:
      program: its adapter in this folder.
      python: of its environment; None: of this one.
      arguments: of the adapter.
      is_exact: its greedy tokens in float32 are compared with ours.
    """

    program: str
    python: Path | None
    arguments: tuple[str, ...] = ()
    is_exact: bool = True

    @property
    def is_installed(self) -> bool:
        """Whether its environment is there."""
        return self.python is None or self.python.exists()


PEERS: dict[str, Peer] = {
    "ours": Peer(program="own_peer.py", python=None),
    "vllm": Peer(program="vllm_peer.py", python=ROOT / ".venv-vllm" / "bin" / "python"),
    "hf": Peer(program="hf_peer.py", python=ROOT / ".venv-hf" / "bin" / "python"),
    "hf-static": Peer(
        program="hf_peer.py", python=ROOT / ".venv-hf" / "bin" / "python", arguments=("static",)
    ),
}


class Running:
    """A loaded engine in a process of its own.

    Args:
      name: in ``PEERS``.
      log: file for what its libraries print.
      command: the ``load`` command.

    Raises:
      RuntimeError: it could not be loaded; the message has the end of its log.
    """

    def __init__(self, name: str, log: Path, command: dict[str, Any]) -> None:
        peer = PEERS[name]
        self.name, self._log = name, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(peer.python or sys.executable), str(HERE / peer.program), *peer.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._ask({"command": "load", **command})

    def run(self) -> dict[str, Any]:
        """Run all requests once; see ``protocol.Timer.answer``."""
        return self._ask({"command": "run"})

    def peak_mib(self) -> float:
        """Most resident memory so far, summed over its processes."""
        return sum(_peak_kib(pid) for pid in _tree(self._process.pid)) / 2**10

    def close(self) -> None:
        """End the process."""
        with self._process as process:  # closes its pipes
            process.kill()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
            answer = json.loads(stdout.readline() or b'{"error": "its process ended"}')
        except BrokenPipeError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            self.close()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{self.name}: {answer['error']}\n{tail}")
        return answer


def _tree(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += _tree(int(child))
    return found


def _peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
