"""One small workload in the real engine and in the simulator: every step does the same to the pool.

The engine computes the integer-hash model on the CPU; the pool's use must not depend on that, nor
on how long steps take. Lengths are told beforehand on both sides: no model ends outputs at will.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from suites.engine_runs import STANDARD, make_engine, random_prompts

from paged_jax.engine import Engine
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.beam import Candidate
from paged_jax.scheduling.plan import Plan
from paged_jax.simulation import simulator
from paged_jax.simulation.machines import PAPER_OPT_13B
from paged_jax.simulation.results import StepUse
from paged_jax.simulation.simulator import Policy, SimulationSettings, simulate
from paged_jax.simulation.traces import TraceRequest

GEOMETRY = {name: value for name, value in STANDARD.items() if name != "debug_integrity"}


class EngineRun:
    """Runs requests in an engine; keeps what each step did, and what beam searches found."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepUse] = []
        self.found: list[list[Candidate]] = []
        self._engine = engine
        self._execute, engine.executor.execute = engine.executor.execute, self._noting

    def run(self, requests: list[TraceRequest], **params: Any) -> None:
        prompts = random_prompts(0, [request.num_prompt for request in requests])
        wanted = [
            SamplingParams(
                temperature=0.0, max_tokens=request.num_output, ignore_eos=True, **params
            )
            for request in requests
        ]
        self._engine.generate(prompts, wanted)

    def candidates(self, logprobs: list[float], *, token_id: int) -> list[Candidate]:
        """As a ``BeamModel``: what the engine found, in the same order."""
        del logprobs, token_id
        return self.found.pop(0)

    def _noting(self, plan: Plan):
        stats = self._engine.block_manager.stats()
        num_preempted = sum(len(one.sequences) for one in plan.preemptions)
        self.steps.append(StepUse(stats.used, stats.filled, len(plan.copies), num_preempted))
        handle = self._execute(plan)
        if any(row.sequence.request.is_search for row in plan.rows):
            # No step of a search is planned before the one before it is collected.
            self.found += handle.result().candidates.values()
        return handle


def draw(seed: int, num_requests: int, *, longest: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    lens = [(rng.randint(1, longest), rng.randint(1, longest)) for _ in range(num_requests)]
    return [TraceRequest(*pair) for pair in lens]


def simulated(
    requests: list[TraceRequest], policy: Policy = "paged", **settings: Any
) -> list[StepUse]:
    wanted = SimulationSettings(**GEOMETRY, hides_lengths=False, traces_steps=True, **settings)
    return simulate(PAPER_OPT_13B, requests, policy=policy, settings=wanted).steps


@pytest.mark.parametrize("policy", ["paged", "orca_max", "orca_pow2", "orca_oracle"])
def test_each_step_uses_the_pool_alike(policy):
    requests = draw(1, 14, longest=32)
    run = EngineRun(make_engine(reservation=policy, prefix_cache=False))
    run.run(requests)
    assert simulated(requests, policy) == run.steps
    assert (sum(step.num_preemptions for step in run.steps) > 0) == (policy == "paged")


@pytest.mark.parametrize(
    ("policy", "num_samples"), [("paged", 2), ("paged", 3), ("orca_oracle", 2)]
)
def test_parallel_samples_too(policy, num_samples):
    requests = draw(2, 10, longest=9)
    run = EngineRun(make_engine(reservation=policy, prefix_cache=False))
    run.run(requests, n=num_samples)
    assert simulated(requests, policy, num_samples=num_samples) == run.steps
    assert sum(step.num_copies for step in run.steps) > 0


@pytest.mark.parametrize("policy", ["paged", "orca_oracle"])
def test_beams_too_where_they_find_the_same(policy, monkeypatch):
    requests = draw(3, 8, longest=11)
    run = EngineRun(make_engine(reservation=policy, prefix_cache=False))
    run.run(requests, beam_width=2)
    monkeypatch.setattr(simulator, "BeamModel", lambda **_: run)
    assert simulated(requests, policy, beam_width=2) == run.steps
    assert not run.found
    assert sum(step.num_copies for step in run.steps) > 10


def test_swapping_too():
    requests = draw(1, 14, longest=32)
    run = EngineRun(make_engine(prefix_cache=False, preemption="swap", num_host_blocks=17))
    run.run(requests)
    assert simulated(requests, preemption="swap", num_host_blocks=17) == run.steps
    assert sum(step.num_preemptions for step in run.steps) > 0
