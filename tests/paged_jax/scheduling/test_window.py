"""The scheduler with windows: what it frees, what a group is counted with, random traffic."""

from __future__ import annotations

import random

import pytest
from suites.host_simulation import SimulatedServer, make_request

from paged_jax.scheduling.group import SequenceGroup
from paged_jax.scheduling.window import first_needed, most_blocks


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_most_blocks_is_what_a_window_touches_at_most(window, block_size):
    touched = []
    for position in range(100):  # of the newest token
        begin = first_needed(position, window)
        assert position + 1 - begin == min(window, position + 1)
        touched.append(position // block_size - begin // block_size + 1)
        assert most_blocks(position + 1, window, block_size) == max(touched)


def test_without_a_window_everything_is_needed():
    assert first_needed(1000, None) == 0
    assert most_blocks(1000, None, 16) == 63


def test_samples_are_counted_with_their_windows_or_with_what_they_share():
    def most(prompt: int, max_tokens: int, window: int | None) -> int:
        request = make_request("r", prompt, max_tokens, num_samples=3)
        group = SequenceGroup(request, first_seq_id=0, max_tokens=max_tokens, window=window)
        return group.max_blocks(4)

    assert most(80, 41, None) == 20 + 3 * 10
    assert most(80, 41, 9) == 3 * 3
    assert most(8, 3, 9) == 2 + 3 * 1  # full prompt blocks are still shared


def test_blocks_behind_the_window_are_freed_before_the_next_step():
    server = SimulatedServer(num_blocks=20, block_size=4, window=6, prefill_chunk_len=10)
    sequence = server.add(make_request("r", 25, 20))
    tables = []
    while server.step() is not None:
        if server.manager.has_table(sequence.seq_id):
            tables.append(server.manager.table_array(sequence.seq_id).tolist())
    holes = [table.count(0) for table in tables]
    # Chunks begin at 0, 10, 20; then one token a step from position 25 on.
    starts = [0, 10, 20, *range(25, 44)]
    assert holes == [max(start - 5, 0) // 4 for start in starts][: len(holes)]
    assert len(holes) >= 20
    server.drain()


def test_prompt_is_computed_in_chunks_that_the_pool_has_room_for():
    """Three usable blocks, a prompt of fifteen: the window needs two and a half."""
    server = SimulatedServer(num_blocks=4, block_size=4, window=6)
    server.add(make_request("r", 60, 30))
    chunks = []
    while (plan := server.step()) is not None:
        chunks.append(sum(row.num_new for row in plan.prefill_rows))
    chunks = [chunk for chunk in chunks if chunk]
    assert chunks[0] == 12
    assert sum(chunks) == 60
    assert min(chunks[1:-1]) >= 1
    server.drain()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9))]
)
def test_random_traffic(window, seed):
    """Small pools, several samples, cancels: outputs as alone, no stall, all is given back."""
    rng = random.Random(100 * window + seed)
    most = most_blocks(1000, window, 4)
    server = SimulatedServer(
        num_blocks=1 + 3 * most + rng.randrange(3),
        block_size=4,
        window=window,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        prefill_chunk_len=rng.choice([None, 3]),
    )
    waiting = [
        make_request(
            number,
            rng.randrange(1, 50),
            rng.randrange(1, 50),
            num_samples=rng.choice([1, 1, 2, 3]),
        )
        for number in range(10)
    ]
    cancelled = set(rng.sample(range(10), 3))
    added: list[int] = []
    while waiting or server.scheduler.has_unfinished:
        if waiting and rng.random() < 0.4:
            request = waiting.pop()
            server.add(request)
            added.append(request.request_id)
        for request_id in cancelled & set(added):
            if rng.random() < 0.1:
                server.scheduler.cancel(request_id)
                cancelled.discard(request_id)
        server.step()
        assert server.num_steps < 20_000
    server.drain()


def test_random_traffic_preempts():
    server = SimulatedServer(num_blocks=9, block_size=4, window=9, max_num_seqs=6)
    for number in range(5):
        server.add(make_request(number, 2 + number, 40, num_samples=1 + number % 2))
    server.drain()
    assert server.scheduler.preemptor.num_preemptions > 0


def test_needed_hole_is_a_broken_invariant():
    server = SimulatedServer(num_blocks=20, block_size=4, window=6)
    sequence = server.add(make_request("r", 25, 20))
    server.step()
    server.manager.drop_before(sequence.seq_id, 24)
    with pytest.raises(RuntimeError, match=r"has holes in .* the blocks that it needs next"):
        server.scheduler.check_integrity()
