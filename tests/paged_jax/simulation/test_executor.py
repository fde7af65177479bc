"""The simulated machine: one step after the other, and as many tokens as a plan's rows yield."""

import pytest

from paged_jax.blocks.block_manager import BlockManager
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.plan import Plan
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.scheduling.sequence import Sequence
from paged_jax.simulation.assumptions import CostConstants
from paged_jax.simulation.cost_model import CostModel, RowWork
from paged_jax.simulation.executor import STOP_TOKEN, SimulatedExecutor, VirtualClock, step_work
from paged_jax.simulation.machines import PAPER_OPT_13B


class RepeatLast:
    """Drafts the last token again: right everywhere but at an output's end."""

    def propose(self, sequence: Sequence, *, limit: int) -> list[int]:
        return sequence.output_token_ids[-1:] * min(limit, 3)

    def forget(self, sequence: Sequence) -> None:
        pass


def make_scheduler(**options) -> Scheduler:
    manager = BlockManager(num_blocks=50, block_size=4)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 100}
    return Scheduler(manager, **limits, prefill_row_len=4, **options)


def make_executor(clock: VirtualClock, lasts: dict) -> SimulatedExecutor:
    model = CostModel(PAPER_OPT_13B, CostConstants())
    return SimulatedExecutor(model, clock, last_positions=lasts, block_size=4)


def test_rows_of_a_prompt_are_one_piece_of_work():
    scheduler = make_scheduler()
    for name, num_prompt in (("a", 10), ("b", 3)):
        scheduler.add(Request(name, [5] * num_prompt, SamplingParams(max_tokens=4)))
    plan = scheduler.schedule()
    assert isinstance(plan, Plan)
    assert len(plan.prefill_rows) == 4
    assert step_work(plan) == ([RowWork(10, 10), RowWork(3, 3)], 2)


def test_a_step_begins_when_the_one_before_it_has_ended():
    scheduler, clock = make_scheduler(), VirtualClock()
    executor = make_executor(clock, {"a": 6})
    scheduler.add(Request("a", [5] * 5, SamplingParams(stop_token_ids=(STOP_TOKEN,))))
    plans = [scheduler.schedule(), scheduler.schedule()]
    first, second = (executor.execute(plan) for plan in plans if isinstance(plan, Plan))
    assert clock.now == 0
    assert first.end == pytest.approx(first.seconds)
    assert second.end == pytest.approx(first.seconds + second.seconds)
    assert first.result().token_ids == [STOP_TOKEN + 1]
    assert clock.now == first.end
    assert second.result().token_ids == [STOP_TOKEN]
    assert clock.now == second.end
    first.result()
    assert clock.now == second.end, "time never goes back"


def test_rows_with_drafts_yield_a_token_for_each_position():
    scheduler, clock = make_scheduler(drafter=RepeatLast()), VirtualClock()
    executor = make_executor(clock, {"a": 14})
    group = scheduler.add(Request("a", [5] * 5, SamplingParams(stop_token_ids=(STOP_TOKEN,))))
    num_steps = num_drafts = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert isinstance(plan, Plan)
        num_steps += 1
        num_drafts += sum(len(row.drafts) for row in plan.verify_rows)
        scheduler.update(plan, executor.execute(plan).result().token_ids)
    (sequence,) = group.sequences
    assert sequence.output_token_ids == [STOP_TOKEN + 1] * 9 + [STOP_TOKEN]
    assert num_drafts > 5
    assert num_steps < 10
