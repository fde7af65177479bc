"""How an engine that is compared speaks: JSON lines, a command in, an answer out.

Needs the standard library only, as every peer runs in an environment of its own. The commands, in
this order: ``load`` once (folder, dtype, requests), then ``run`` any number of times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any


class Timer:
    """Times of the tokens of one run.

    Args:
      num_requests: whose tokens are timed; all are added when the timer is made.
    """

    def __init__(self, num_requests: int) -> None:
        self._begin = time.perf_counter()
        self._counts = [0] * num_requests
        self._last = [0.0] * num_requests
        self.first = [0.0] * num_requests
        self.gaps: list[float] = []
        self.end = 0.0

    def saw(self, request: int, count: int) -> None:
        """Note that a request has ``count`` tokens now."""
        now = time.perf_counter() - self._begin
        new = count - self._counts[request]
        if new <= 0:
            return
        if self._counts[request] == 0:
            self.first[request] = now
        else:
            self.gaps.extend([(now - self._last[request]) / new] * new)
        self._counts[request], self._last[request], self.end = count, now, now

    def answer(self, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What ``run`` answers: seconds from the requests' arrival on, and the tokens."""
        return {
            "seconds": self.end,
            "first": self.first,
            "gaps": self.gaps,
            "tokens": [[int(token) for token in one] for one in tokens],
        }


def serve(load: Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]) -> None:
    """Answer commands until the input ends.

    Args:
      load: takes the ``load`` command, returns what runs all requests and makes the answer.
    """
    # Libraries print: what they say goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run: Callable[[], dict[str, Any]] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["command"] == "load":
                run = load(command)
                answer: dict[str, Any] = {"ready": True}
            else:
                assert run is not None, "load comes first"
                answer = run()
        except Exception as error:  # an answer is owed, whatever happens in a library
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
