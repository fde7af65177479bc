"""Runs plans on a machine that is only a formula: takes time on a virtual clock, yields tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from paged_jax.scheduling.beam import Candidate
from paged_jax.scheduling.plan import Plan, PlanRow
from paged_jax.scheduling.request import Request
from paged_jax.simulation.beams import BeamModel
from paged_jax.simulation.cost_model import CostModel, RowWork

STOP_TOKEN = 1
"""Ends an output, where it is its request's turn; every other token is above it."""


class VirtualClock:
    """Seconds since the run began, which only grow.

    Attributes:
      now: the host's time.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, seconds: float) -> None:
        """Let time pass, unless it has passed already."""
        self.now = max(self.now, seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedResult:
    """What a step yields.

    Attributes:
      token_ids: for each sampling row of the plan its ``num_sampled`` tokens, in
        ``Plan.sampling_rows`` order.
      candidates: the continuations of each beam search that has rows which sample, best first.
    """

    token_ids: list[int]
    candidates: dict[Request, list[Candidate]]


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedHandle:
    """A step that the machine computes.

    Attributes:
      plan: what it computes.
      seconds: how long that takes.
      end: the time at which it is done.
    """

    plan: Plan
    seconds: float
    end: float
    _executor: SimulatedExecutor

    def result(self) -> SimulatedResult:
        """Wait for the step on the virtual clock."""
        self._executor.clock.wait_until(self.end)
        return self._executor.sample(self.plan)


class SimulatedExecutor:
    """Computes one step after the other, each as long as the cost model says.

    Args:
      cost_model: prices steps.
      clock: the host's time, at which plans come.
      last_positions: by request id, the position of the token that ends each of its sequences.
      beam_model: what beam searches find; None: there are none.
      block_size: token positions a block.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: VirtualClock,
        *,
        last_positions: Mapping[Hashable, int],
        beam_model: BeamModel | None = None,
        block_size: int,
    ) -> None:
        self.clock = clock
        self._cost_model = cost_model
        self._last_positions = last_positions
        self._beam_model = beam_model
        self._block_size = block_size
        self._busy_until = 0.0

    def execute(self, plan: Plan) -> SimulatedHandle:
        """Begin a step as soon as the one before it is done."""
        work = _prompt_work(plan.prefill_rows)
        work += [RowWork(1, row.start + 1) for row in plan.decode_rows]
        work += [RowWork(row.num_new, row.start + row.num_new) for row in plan.verify_rows]
        num_sampled = sum(row.samples for row in plan.prefill_rows) + len(plan.branch_rows)
        num_sampled += len(plan.decode_rows) + sum(row.num_sampled for row in plan.verify_rows)
        seconds = self._cost_model.step_time(
            work,
            num_sampled=num_sampled,
            num_copied_blocks=len(plan.copies),
            num_swapped_blocks=len(plan.swap_outs) + len(plan.swap_ins),
            block_size=self._block_size,
        ).total
        self._busy_until = max(self._busy_until, self.clock.now) + seconds
        return SimulatedHandle(plan, seconds, self._busy_until, self)

    def sample(self, plan: Plan) -> SimulatedResult:
        """The tokens and candidates of a plan; each output ends where its request's does."""
        lasts = self._last_positions
        rows = plan.sampling_rows
        if plan.verify_rows:
            tokens = [token for row in rows for token in self._tokens_of(row)]
        else:
            # A million rows an hour: one expression, no call a row.
            tokens = [
                STOP_TOKEN
                if row.start + row.num_new == lasts[row.sequence.request.request_id]
                else row.sequence.sample_index + 2
                for row in rows
            ]
        return SimulatedResult(tokens, self._candidates(rows, tokens) if self._beam_model else {})

    def _candidates(
        self, rows: SequenceOf[PlanRow], tokens: SequenceOf[int]
    ) -> dict[Request, list[Candidate]]:
        """What follows the beams of each search; in its last step, nothing but ends."""
        assert self._beam_model is not None
        beams: dict[Request, list[float]] = {}
        ended: set[Request] = set()
        for row, token in zip(rows, tokens, strict=True):
            request = row.sequence.request
            beams.setdefault(request, []).append(row.sequence.cumulative_logprob)
            if token == STOP_TOKEN:
                ended.add(request)
        found: dict[Request, list[Candidate]] = {}
        for request, logprobs in beams.items():
            candidates = self._beam_model.candidates(logprobs, token_id=STOP_TOKEN + 1)
            if request in ended:
                candidates = [one._replace(token_id=STOP_TOKEN) for one in candidates]
            found[request] = candidates
        return found

    def _tokens_of(self, row: PlanRow) -> list[int]:
        """A row's tokens; one with drafts has one for each of its positions."""
        sequence, last = row.sequence, self._last_positions[row.sequence.request.request_id]
        end = row.start + row.num_new
        positions = range(end - len(row.drafts), end + 1)
        return [STOP_TOKEN if p == last else sequence.sample_index + 2 for p in positions]


def _prompt_work(rows: SequenceOf[PlanRow]) -> list[RowWork]:
    """A chunk of a prompt each, however many rows it has: its attention reads the context once."""
    work: list[RowWork] = []
    for _, chunk in itertools.groupby(rows, key=attrgetter("sequence")):
        first, *others = chunk
        last = others[-1] if others else first
        end = last.start + last.num_new
        work.append(RowWork(end - first.start, end))
    return work
