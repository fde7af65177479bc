"""Faults that users of similar systems met (tests/data/field_reports.json): shared prefixes.

Each test bears the number of its report and runs its input through the engine, exactly; tests of
the same report in other files look at the block manager alone.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import (
    check_greedy,
    check_logprobs,
    drive,
    fill_pool,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)

SIZE = 4
EIGHT_AT_ONCE = {"num_blocks": 21, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def cached_nodes_hold_what_they_say(engine) -> None:
    """Each cached block's slots are the model's own values for its tokens, read from the pool."""
    blocks = np.asarray(engine.executor.pool.blocks)
    for node in engine.block_manager._cache.nodes():
        path, tokens = node, []
        while path.parent is not None:
            tokens[:0] = path.tokens
            path = path.parent
        with np.errstate(over="ignore"):
            state = hash_model.mix(np.asarray(tokens).astype(np.uint32))
            values = hash_model.channel_values(np, state, np.arange(len(tokens)))
        first = len(tokens) - len(node.tokens)
        held = blocks[0, node.block, 1].swapaxes(0, 1)[: len(node.tokens)]
        np.testing.assert_array_equal(held, values[first:])


def test_b01_a_reused_block_is_not_served_for_its_old_tokens():
    engine = make_engine(num_blocks=5)
    fill_pool(engine, np.nan)
    first, other = random_prompts(1, [8, 15])
    hits = []
    for prompt in (first, other, first):
        (output,) = run_all(engine, [prompt], greedy(1))
        check_greedy([output], [greedy(1)])
        cached_nodes_hold_what_they_say(engine)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0]


def test_b03_a_waiting_request_is_looked_up_when_it_starts():
    """It waits behind one that evicts what it would have found when it came."""
    engine = make_engine(max_num_seqs=1)
    donor, other = random_prompts(3, [9, 55])
    run_all(engine, [donor], greedy(1))
    prompts = [other, [*donor, 5, 6]]
    outputs = run_all(engine, prompts, greedy(9))
    check_greedy(outputs, [greedy(9)] * 2)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert engine.block_manager.prefix_stats().evictions > 0


@pytest.mark.parametrize("num_chunks", [1, 3, "preempted"])
def test_b04_a_prompt_that_ends_early_leaves_only_whole_blocks(num_chunks):
    """10 blocks in chunks of 2, then the same prompt once, and twice in one step."""
    engine = make_engine(prefill_chunk_len=8)
    fill_pool(engine, np.nan)
    prompt, neighbour = random_prompts(4, [40, 14])
    if num_chunks == "preempted":
        outputs = run_all(engine, [neighbour, prompt], greedy(20))
        check_greedy(outputs, [greedy(20)] * 2)
        assert outputs[1].num_preemptions > 0
    else:
        request_id = engine.add_request(prompt, greedy(4))
        for _ in range(num_chunks):
            engine.step()
        assert engine.cancel(request_id)
        drive(engine)
        # The last chunk was in flight.
        found = engine.block_manager.lookup(engine._namespace(None), prompt)
        assert found.num_tokens == 8 * (num_chunks - 1)
    cached_nodes_hold_what_they_say(engine)
    check_greedy(run_all(engine, [prompt], greedy(4)), [greedy(4)])
    outputs = run_all(engine, [prompt] * 2, greedy(4))
    check_greedy(outputs, [greedy(4)] * 2)
    assert [output.num_cached_tokens for output in outputs] == [39, 39]


def test_b06_new_weights_are_not_answered_from_the_old_ones_cache():
    engine = make_engine()
    (prompt,) = random_prompts(6, [18])
    run_all(engine, [prompt], greedy())
    for salt in (5, 0):
        engine.set_params({"salt": jnp.uint32(salt)})
        for num_cached in (0, 17):
            (output,) = run_all(engine, [prompt], greedy())
            assert list(output.token_ids) == hash_model.expected_greedy(prompt, 8, salt=salt)
            assert output.num_cached_tokens == num_cached
    assert engine.model.params["salt"] == 0


def test_b08_a_block_belongs_to_all_tokens_before_it():
    """Blocks of one token, few tokens: equal blocks in many places, after many beginnings."""
    engine = make_engine(block_size=1, num_blocks=241, max_model_len=120)
    a, b, c, d = 1, 2, 3, 4
    outputs = [run_all(engine, [prompt], greedy(5))[0] for prompt in ([a, b, c], [d, b, c])]
    check_greedy(outputs, [greedy(5)] * 2)
    assert outputs[1].num_cached_tokens == 0
    rng = np.random.default_rng(8)
    prompts = [rng.choice([a, b, c, d], 12).tolist() for _ in range(20)]
    check_greedy(run_all(engine, prompts, greedy(5)), [greedy(5)] * 20)
    cached_nodes_hold_what_they_say(engine)


def test_b09_a_hit_beside_a_miss_and_a_decode_in_a_fragmented_pool():
    engine = make_engine()
    fill_pool(engine, np.nan)
    # The pool was full, so the next one's blocks are what was evicted, one here and one there.
    run_all(engine, random_prompts(90, [15, 9, 14]), [greedy(12), greedy(3), greedy(9)])
    prompt, decoding, missing = random_prompts(9, [3 * SIZE + 3, 6, 11])
    params = greedy(6, logprobs=2)
    run_all(engine, [prompt], params)
    table = engine.block_manager.lookup(engine._namespace(None), prompt).blocks
    assert not (np.diff(table) == 1).any()
    ids = [engine.add_request(decoding, params)]

    def act(index: int) -> None:
        if index == 3:
            ids.extend(engine.add_requests([prompt, missing], params))

    outputs = drive(engine, before_step=act)
    last = [outputs[request_id][-1] for request_id in ids]
    assert [output.num_cached_tokens for output in last] == [0, 3 * SIZE + 2, 0]
    check_greedy(last, [params] * 3)
    for output in last:
        check_logprobs(output, params)


@pytest.mark.parametrize("length", [4, 8, 7, 9])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_b11_a_fully_cached_prompt_recomputes_its_last_token(length, max_tokens):
    engine = make_engine()
    (prompt,) = random_prompts(11 + length, [length])
    params = greedy(max_tokens)
    # Full blocks are found, those of the prompt with the output's beginning too.
    for num_cached in (0, min(length - 1, (length + max_tokens - 1) // SIZE * SIZE)):
        engine.stats.reset()
        (output,) = run_all(engine, [prompt], params)
        check_greedy([output], [params])
        assert output.num_cached_tokens == num_cached
        assert engine.stats.num_prompt_tokens == length - num_cached
        cached_nodes_hold_what_they_say(engine)
    check_greedy(run_all(engine, [prompt] * 3, params), [params] * 3)
    cached_nodes_hold_what_they_say(engine)


def test_b27_counts_never_exceed_the_pool():
    """Prompts that part inside a block and at its edge; idle and busy (``drive`` checks each)."""
    engine = make_engine()
    common, *tails = random_prompts(27, [10, 6, 6, 6])
    inside = [common + tail for tail in tails[:2]]
    at_edge = [common[:8] + tail for tail in tails]
    for prompts in (inside, at_edge, inside + at_edge):
        outputs = run_all(engine, prompts, greedy(3))
        check_greedy(outputs, [greedy(3)] * len(prompts))
        stats = engine.block_manager.stats()
        pool = engine.block_manager._pool
        assert (stats.used, stats.free, stats.total) == (0, 16, 16)
        assert stats.cached + pool.num_free == 16


def test_b29_children_share_only_their_own_prompts_blocks():
    """Three prompts times two, the prompts cached and of lengths 0, 1 and 3 modulo the block."""
    engine = make_engine(**EIGHT_AT_ONCE)
    prompts = random_prompts(29, [8, 9, 11])
    run_all(engine, prompts, greedy(1))
    ids = engine.add_requests(prompts, greedy(2, n=2))
    engine.stats.reset()
    manager = engine.block_manager
    copies, tables = [], {}

    def act(index: int) -> None:
        copies.append(engine.stats.num_copied_blocks)
        if index == 1:
            for request_id in ids:
                live = [c.sequence.seq_id for c in engine._by_id[request_id].completions]
                one, two = (manager.table_array(seq_id).tolist() for seq_id in live)
                assert one == two
                tables[request_id] = set(one)

    drive(engine, before_step=act)
    assert len(set.union(*tables.values())) == sum(len(table) for table in tables.values())
    # Of 8 cached tokens 7 are used, so the second block is a copy; later the first writers of 9 and
    # of 11 copy what both branches hold, and those of 8 begin a block.
    assert copies[1:4] == [1, 1 + 2, 1 + 2]


def test_b48_eight_requests_share_ten_blocks():
    """20 blocks hold tables with 88 entries."""
    engine = make_engine(**EIGHT_AT_ONCE)
    common, *tails = random_prompts(48, [40, *[2] * 8])
    run_all(engine, [common], greedy(1))
    prompts = [common + tail for tail in tails]
    most = []
    outputs = run_all(
        engine, prompts, greedy(2), before_step=lambda _: most.append(engine.scheduler.num_running)
    )
    check_greedy(outputs, [greedy(2)] * 8)
    assert [output.num_cached_tokens for output in outputs] == [40] * 8
    assert engine.stats.num_preemptions == 0
    assert max(most) == 8
    assert engine.stats.peak_used_blocks == 18
