"""Engines run the same requests in turns, in one process, so that ratios compare neighbours."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

from paged_jax import Engine, SamplingParams
from paged_jax_scripts import workload


@dataclasses.dataclass(slots=True)
class Contender:
    """An engine with its measured runs.

    Attributes:
      engine: what runs.
      seconds: of each counted run.
      latencies: of each counted run: the mean over requests of seconds from arrival to the end, an
        output token (the paper's normalized latency).
      token_ids: what it said last.
      peak_rows: most sequences that ran at once.
    """

    engine: Engine
    seconds: list[float] = dataclasses.field(default_factory=list)
    latencies: list[float] = dataclasses.field(default_factory=list)
    token_ids: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    peak_rows: int = 0

    def run(self, requests: Sequence[workload.Request]) -> None:
        """Run all requests to their end, greedily, end tokens ignored."""
        prompts = [request.prompt_token_ids for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            for request in requests
        ]
        begin = time.perf_counter()
        request_ids = self.engine.add_requests(prompts, params)
        ended = {}
        while self.engine.has_unfinished:
            for output in self.engine.step():
                ended[output.request_id] = output
            self.peak_rows = max(self.peak_rows, self.engine.scheduler.num_running)
        self.seconds.append(time.perf_counter() - begin)
        outputs = [ended[request_id] for request_id in request_ids]
        self.token_ids = [output.token_ids for output in outputs]
        self.latencies.append(
            statistics.mean(
                (output.finish_time - output.arrival_time) / len(output.token_ids)
                for output in outputs
            )
        )

    def forget(self) -> None:
        """Drop what was measured so far: it held compilation."""
        self.seconds.clear()
        self.latencies.clear()
        self.engine.stats.reset()


def run_in_turns[K](
    contenders: Mapping[K, Contender], requests: Sequence[workload.Request], *, runs: int
) -> None:
    """Run all ``runs`` times after one that compiles, each time beginning with another one."""
    order = list(contenders)
    for index in range(runs + 1):
        for key in order:
            contenders[key].run(requests)
        if index == 0:
            for contender in contenders.values():
                contender.forget()
        order.append(order.pop(0))
