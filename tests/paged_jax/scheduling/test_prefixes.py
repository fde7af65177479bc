"""What starts where, what is published when, and what registered prefixes leave."""

from __future__ import annotations

import pytest
from suites.host_simulation import SimulatedServer, make_request

from paged_jax.blocks.namespace import Namespace

PROMPT = [(5 * i * i + i) % 17 for i in range(40)]


def make_server(**limits: int | bool) -> SimulatedServer:
    return SimulatedServer(**{"num_blocks": 40, "block_size": 4, "prefill_row_len": 4, **limits})


def warm(server: SimulatedServer, prompt: list[int]) -> None:
    server.add(make_request("warm", prompt, 1))
    server.drain()


def test_rows_and_chunks_begin_at_the_hit():
    server = make_server(prefill_chunk_len=10)
    warm(server, PROMPT[:14])
    sequence = server.add(make_request(0, PROMPT, 3))
    plans = [server.step() for _ in range(3)]
    rows = [[(row.start, row.num_new) for row in plan.prefill_rows] for plan in plans]
    # 12 tokens in full blocks; the rest of block 3 was never published.
    assert rows[0] == [(12, 4), (16, 4), (20, 2)]
    assert rows[1] == [(22, 4), (26, 4), (30, 2)]
    assert sequence.request.num_cached_tokens == 12
    server.drain()


def test_a_partly_equal_block_is_copied_once():
    server = make_server()
    warm(server, PROMPT[:12])
    server.add(make_request(0, [*PROMPT[:6], 1, 1, 1], 3))
    plan = server.step()
    assert len(plan.copies) == 1
    assert [row.start for row in plan.prefill_rows] == [6]
    assert not server.step().copies
    server.drain()


def test_tokens_are_published_once_and_only_new_ones(monkeypatch):
    server = make_server(prefill_chunk_len=8)
    manager, calls = server.manager, []
    publish = manager.publish

    class Recorder:
        def __getattr__(self, name: str):
            return getattr(manager, name)

        def publish(self, seq_id, namespace, token_ids, *, begin=0):
            calls.append((begin, len(token_ids)))
            return publish(seq_id, namespace, token_ids, begin=begin)

    monkeypatch.setattr(server.scheduler._prefixes, "_manager", Recorder())
    sequence = server.add(make_request(0, PROMPT[:18], 15, ignore_eos=True))
    server.drain()
    num_computed = 18 + 15 - 1
    assert sum(length for _, length in calls) == num_computed // 4 * 4
    assert [begin for begin, _ in calls] == list(range(0, num_computed, 4))
    found = manager.lookup(Namespace(), [*PROMPT[:18], *sequence.output_token_ids])
    assert found.num_tokens == num_computed // 4 * 4


def test_nothing_past_a_stop_is_published():
    for min_tokens in range(6):
        free = make_server()
        whole = free.add(make_request(0, PROMPT[:6], 9))
        free.drain()
        stop = whole.output_token_ids[min_tokens]
        server = make_server()
        params = {"stop_token_ids": [stop], "min_tokens": min_tokens}
        sequence = server.add(make_request(0, PROMPT[:6], 9, **params))
        server.drain()
        num_fed = 6 + sequence.num_output - 1
        known = [*PROMPT[:6], *whole.output_token_ids]
        # The step in flight wrote the stop token too.
        assert server.manager.lookup(Namespace(), known).num_tokens == num_fed // 4 * 4


def test_a_shared_prompt_starts_where_a_cold_one_waits():
    server = make_server(num_blocks=13)
    server.add(make_request(0, PROMPT[:36], 9, ignore_eos=True))
    for _ in range(3):
        server.step()
    server.add(make_request("cold", 20, 1))
    server.step()
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (1, 1)
    assert server.scheduler.cancel("cold")
    server.add(make_request("hit", PROMPT[:34], 2, ignore_eos=True))
    server.step()
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (2, 0)
    server.drain()


def test_who_wants_its_prompts_logprobs_looks_nothing_up_but_is_found():
    server = make_server()
    for request_id, logprobs, num_cached in (("a", 0, 0), ("b", 0, 0), ("c", None, 15)):
        request = make_request(request_id, PROMPT[:16], 2, prompt_logprobs=logprobs)
        server.add(request)
        server.drain()
        assert request.num_cached_tokens == num_cached
    assert server.manager.prefix_stats().queries == 1


def test_without_the_automatic_cache_only_registered_prefixes_are_shared():
    server = make_server(prefix_cache=False)
    warm(server, PROMPT[:16])
    assert server.manager.prefix_stats().queries == 0
    prefix = make_request("prefix", PROMPT[:10], 0, is_prefix=True)
    server.add(prefix)
    while prefix.pin_id is None:
        server.step()
    requests = [make_request(i, [*PROMPT[:10], i, i, i], 3) for i in range(3)]
    for request in requests:
        server.add(request)
    server.step()
    assert [request.num_cached_tokens for request in requests] == [10] * 3
    server.drain()


def test_a_cancelled_prefix_does_not_stay():
    server = make_server(prefill_chunk_len=4)
    prefix = make_request("prefix", PROMPT[:10], 0, is_prefix=True)
    server.add(prefix)
    for _ in range(3):
        server.step()
    assert server.scheduler.cancel("prefix")
    assert (prefix.pin_id, server.manager.num_pinned) == (None, 0)
    server.drain()


def test_room_beside_a_prefix():
    server = make_server(num_blocks=11)
    with pytest.raises(
        ValueError, match=r"prefix of 40 tokens would leave 0 of 10 blocks, it must"
    ):
        server.add(make_request("all", PROMPT, 0, is_prefix=True))
    server.add(make_request("live", 8, 17))
    with pytest.raises(ValueError, match=r"leave request 'live' the 6 that it may come to hold"):
        server.add(make_request("much", PROMPT[:17], 0, is_prefix=True))
    prefix = make_request("some", PROMPT[:14], 0, is_prefix=True)
    server.add(prefix)
    while server.scheduler.has_unfinished:
        server.step()
    assert len(server.manager.pinned_blocks) == 4
    with pytest.raises(ValueError, match="the pool's 24 token slots"):
        server.add(make_request("other", 24, 1))
    # 12 of its tokens are in blocks that it shares.
    assert server.add(make_request("shares", PROMPT[:20], None)).max_tokens == 16
    server.drain()
