"""Random traffic on the whole scheduler, one step in flight, over the slot-checking executor."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from suites.host_simulation import VOCAB_SIZE, Oracle, SimulatedServer, make_request

from paged_jax.scheduling.preemption import PREEMPTION_MODES

# What prompts begin with; the second parts from the first within its second block of 4.
BEGINNINGS = [[(i * i + 3) % VOCAB_SIZE for i in range(40)] for _ in range(2)]
BEGINNINGS[1][6:] = BEGINNINGS[1][:-6]
SALTS = st.sampled_from([None, None, None, "a"])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, cancels and steps in any order; outputs equal those of each request alone."""

    seen: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        prefill_row_len=st.integers(1, 8),
        prefill_chunk_len=st.none() | st.integers(1, 12),
        max_model_len=st.integers(4, 60),
        mode=st.sampled_from(PREEMPTION_MODES),
        num_host_blocks=st.sampled_from([0, 2, 3, 6, 16]),
        num_draft_tokens=st.integers(0, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, *, num_draft_tokens: int, **limits: Any) -> None:
        drafter = Oracle(num_draft_tokens) if num_draft_tokens else None
        self.server = SimulatedServer(drafter=drafter, **limits)
        self.ids: list[int] = []
        self.limits = limits

    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.none() | st.integers(0, 40),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        ignore_eos=st.booleans(),
        num_samples=st.sampled_from([1, 1, 1, 2, 3, 5]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        beam_width=st.sampled_from([None, None, 1, 2, 3, 5]),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
        needs_penalties=st.sampled_from([False, False, True]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        beginning=st.sampled_from(BEGINNINGS),
        num_shared=st.integers(0, 40),
        salt=SALTS,
    )
    def add(
        self,
        prompt_len: int,
        max_tokens: int | None,
        beginning: list[int] = BEGINNINGS[0],
        num_shared: int = 0,
        **params: Any,
    ) -> None:
        request_id = len(self.ids)
        if max_tokens == 0:
            params["num_samples"], params["beam_width"] = 1, None
        own = [(7 * request_id + 5 * i * i) % VOCAB_SIZE for i in range(prompt_len)]
        prompt = [*beginning[:num_shared], *own[num_shared:]][:prompt_len]
        request = make_request(request_id, prompt, max_tokens, eos_token_ids={3}, **params)
        num_samples, size = request.num_samples, self.limits["block_size"]
        num_usable = self.limits["num_blocks"] - 1
        shared = min(prompt_len // size, num_usable)
        room = (shared + (num_usable - shared) // num_samples) * size
        if num_samples > self.limits["max_num_seqs"]:
            with pytest.raises(ValueError, match="must be at most max_num_seqs"):
                self.server.add(request)
            return
        if prompt_len + (max_tokens != 0) > min(self.limits["max_model_len"], room):
            with pytest.raises(ValueError, match="must leave room"):
                self.server.add(request)
            return
        try:
            self.server.add(request)
        except ValueError:
            # Registered prefixes may leave less room.
            assert self.server.manager.num_pinned
            self.seen["refused beside a prefix"] += 1
            return
        self.ids.append(request_id)

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        length=st.integers(1, 24),
        salt=SALTS,
    )
    def register(self, beginning: list[int], length: int, salt: str | None) -> None:
        prefix = make_request(
            f"prefix-{len(self.server.emitted)}", beginning[:length], 0, is_prefix=True, salt=salt
        )
        try:
            self.server.add(prefix)
        except ValueError:
            self.seen["prefixes refused"] += 1
            return
        # As the engine does: nobody else comes before it is resident.
        while prefix.pin_id is None:
            self.server.step()
        self.seen["prefixes"] += 1

    @precondition(lambda self: self.server.prefixes)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        self.server.unpin(data.draw(st.sampled_from(self.server.prefixes)))
        self.server.scheduler.check_integrity()

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=2, max_size=6),
        count=st.integers(1, 30),
        num_samples=st.integers(1, 3),
        num_shared=st.integers(0, 12),
    )
    def burst(
        self, sizes: list[tuple[int, int]], count: int, num_samples: int, num_shared: int
    ) -> None:
        for prompt_len, max_tokens in sizes:
            self.add(
                prompt_len,
                max_tokens,
                ignore_eos=True,
                num_samples=num_samples,
                num_shared=num_shared,
            )
        self.steps(count)

    @rule()
    def step(self) -> None:
        self.server.step()

    @rule(count=st.integers(2, 9))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.server.step()

    @rule()
    def collect(self) -> None:
        self.server.collect()

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.ids))
        self.server.scheduler.cancel(request_id)
        assert not self.server.scheduler.cancel(request_id)
        self.server.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.drain()
            stats = self.server.manager.prefix_stats()
            self.seen["hit tokens"] += stats.hit_tokens
            self.seen["evictions"] += stats.evictions
            self.seen["preemptions"] += self.server.scheduler.preemptor.num_preemptions
            requests = {sequence.request for sequence in self.server.emitted}
            for request in requests:
                self.seen["requests with a hit"] += request.num_cached_tokens > 0
                assert not (request.params.prompt_logprobs == 0 and request.num_cached_tokens)


def run_machine(**options: int | bool) -> collections.Counter[str]:
    """Run it; what happened in all runs together."""
    SchedulerMachine.seen = collections.Counter()
    run_state_machine_as_test(SchedulerMachine, settings=settings(deadline=None, **options))
    print(dict(SchedulerMachine.seen))
    return SchedulerMachine.seen


def test_random_traffic():
    """2,000 operations, in which everything worth testing happens."""
    seen = run_machine(max_examples=40, stateful_step_count=50, derandomize=True)
    assert all(seen[name] >= 5 for name in ("prefixes", "evictions", "preemptions"))
    assert seen["requests with a hit"] >= 50


@pytest.mark.long
def test_random_traffic_for_long():
    seen = run_machine(max_examples=1000, stateful_step_count=100)
    assert seen["requests with a hit"] >= 1000
