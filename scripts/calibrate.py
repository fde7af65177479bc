"""The cost model against the real engine: fitted to half of a run's steps, compared with the rest.

Each step is waited for before the next is planned, so that a step's time is its own, the host's
part included. Figures are fitted to every second step, and predictions of the others printed beside
what was measured; then the whole run is simulated with those figures, requests arriving when they
did.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from paged_jax import Engine, SamplingParams
from paged_jax.scheduling.plan import Plan
from paged_jax.simulation.calibration import Calibration, MeasuredStep, fit
from paged_jax.simulation.executor import step_work
from paged_jax.simulation.machines import Geometry
from paged_jax.simulation.simulator import SimulationSettings, simulate
from paged_jax.simulation.traces import TraceRequest
from paged_jax_scripts import cli, workload

NUM_REQUESTS = flags.DEFINE_integer("num_requests", 32, "of the 32", lower_bound=1)
STEPS_APART = flags.DEFINE_float("steps_apart", 4, "mean steps from one arrival to the next")
SEED = flags.DEFINE_integer("seed", 0, "of the arrivals")
JSON_FILE = flags.DEFINE_string("json", None, "also write the figures to this file")
cli.define_engine_flags()
flags.adopt_module_key_flags(cli)


class TimedRun:
    """Runs requests that arrive at given steps, one step at a time.

    Attributes:
      steps: what each did, in how many seconds.
      arrivals: of the requests, in seconds from the beginning.
      seconds: of the whole run.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[MeasuredStep] = []
        self.arrivals: list[float] = []
        self.seconds = 0.0
        self._engine = engine
        self._plan: Plan | None = None
        self._execute, engine.executor.execute = engine.executor.execute, self._wait_for

    def run(self, requests: Sequence[workload.Request], arrival_steps: Sequence[int]) -> None:
        """Serve all requests."""
        self.steps.clear()
        self.arrivals.clear()
        begin = time.perf_counter()
        number = 0
        while len(self.arrivals) < len(requests) or self._engine.has_unfinished:
            while len(self.arrivals) < len(requests) and (
                arrival_steps[len(self.arrivals)] <= number or not self._engine.has_unfinished
            ):
                request = requests[len(self.arrivals)]
                params = SamplingParams(
                    temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
                )
                self._engine.add_request(request.prompt_token_ids, params)
                self.arrivals.append(time.perf_counter() - begin)
            self._step()
            number += 1
        self.seconds = time.perf_counter() - begin

    def _step(self) -> None:
        self._plan = None
        begin = time.perf_counter()
        self._engine.step()
        if self._plan is not None:
            seconds = time.perf_counter() - begin
            self.steps.append(MeasuredStep(*step_work(self._plan), seconds))

    def _wait_for(self, plan: Plan) -> Any:
        handle = self._execute(plan)
        jax.block_until_ready([dispatch.outputs for dispatch in handle.dispatches])
        self._plan = plan
        return handle


def fitting(requests: Sequence[workload.Request], engine: Engine) -> list[workload.Request]:
    """The requests, in a small vocabulary and with shorter outputs and prompts if need be."""
    vocab_size, longest = engine.model.spec.vocab_size, engine.max_model_len
    cut: list[workload.Request] = []
    for request in requests:
        num_output = min(request.max_tokens, longest // 2)
        tokens = request.prompt_token_ids[: longest - num_output]
        cut.append(workload.Request([token % vocab_size for token in tokens], num_output))
    return cut


def geometry_of(engine: Engine) -> Geometry:
    """What the cost model needs of the engine's model."""
    spec, leaves = engine.model.spec, jax.tree.leaves(engine.model.params)
    return Geometry(
        name=engine.model.name,
        num_params=float(sum(np.size(leaf) for leaf in leaves)),
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position=spec.max_position,
        bytes_per_value=engine.executor.pool.blocks.dtype.itemsize,
    )


def simulate_run(
    calibration: Calibration, engine: Engine, run: TimedRun, requests: Sequence[workload.Request]
) -> float:
    """Seconds that the simulator says the same run takes."""
    config, block_size = engine.config, engine.config.block_size
    traced = [
        TraceRequest(len(request.prompt_token_ids), request.max_tokens, arrival=arrival)
        for request, arrival in zip(requests, run.arrivals, strict=True)
    ]
    settings = SimulationSettings(
        block_size=block_size,
        num_blocks=engine.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_row_len=config.prefill_row_len,
        max_model_len=engine.max_model_len,
        constants=calibration.constants,
        hides_lengths=False,
    )
    server = calibration.server(num_slots=(engine.num_blocks - 1) * block_size)
    return max(record.end for record in simulate(server, traced, settings=settings).records)


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}")
    console = Console()
    engine = cli.make_engine(cli.load_model(), prefix_cache=False)
    requests = fitting(workload.load()[: NUM_REQUESTS.value], engine)
    gaps = np.random.default_rng(SEED.value).exponential(STEPS_APART.value, len(requests))
    arrival_steps = np.cumsum(gaps).astype(int).tolist()
    run = TimedRun(engine)
    with console.status("one run to compile, one counted"):
        run.run(requests, arrival_steps)
        run.run(requests, arrival_steps)
    calibration = fit(geometry_of(engine), run.steps[::2])
    errors = calibration.errors(run.steps[1::2])
    simulated = simulate_run(calibration, engine, run, requests)
    figures: dict[str, float] = {
        "steps": len(run.steps),
        "bandwidth, GB/s": calibration.bandwidth / 1e9,
        "operations, GFLOP/s": calibration.flops / 1e9,
        "overhead of a step, ms": calibration.overhead * 1e3,
        "overhead of a sampled token, ms": calibration.row_overhead * 1e3,
        "steps kept aside: median error, %": errors.median * 100,
        "steps kept aside: 90th percentile, %": errors.p90 * 100,
        "the whole run, seconds": run.seconds,
        "the whole run, simulated": simulated,
    }
    rows = [(name, "none bound" if v > 1e15 else f"{v:,.2f}") for name, v in figures.items()]
    cli.print_figures(console, rows, title=f"{engine.model.name}, {len(requests)} requests")
    if JSON_FILE.value:
        with open(JSON_FILE.value, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
