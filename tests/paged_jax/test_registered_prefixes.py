"""Prefixes that stay resident, and what is never found again: resets and new weights; exact."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from suites import hash_model
from suites.engine_runs import (
    assert_idle,
    check_greedy,
    drive,
    greedy,
    make_engine,
    num_cached,
    random_prompts,
)

from paged_jax import Engine, PrefixHandle

SIZE = 4


def test_a_registered_prefix_survives_what_evicts_everything_else():
    engine = make_engine()
    (prefix,) = random_prompts(20, [10])
    handle = engine.register_prefix(prefix)
    assert (handle.token_ids, handle.cache_salt) == (tuple(prefix), None)
    assert engine.num_used_blocks == 3
    assert engine.block_manager.num_sequences == 0
    for seed in range(5):
        engine.generate(random_prompts(seed, [40, 20]), greedy(9))
    engine.scheduler.check_integrity()
    (tail,) = random_prompts(21, [5])
    outputs = engine.generate([prefix + tail, prefix + tail[:1], prefix], greedy(12))
    check_greedy(outputs, [greedy(12)] * 3)
    # Its partly filled last block is shared by copying.
    assert [output.num_cached_tokens for output in outputs] == [10, 10, 9]
    engine.unregister_prefix(handle)
    assert num_cached(engine, prefix) == 10
    assert_idle(engine)
    with pytest.raises(ValueError, match="not yet unregistered"):
        engine.unregister_prefix(handle)


def test_registered_prefixes_are_shared_without_the_automatic_cache():
    engine = make_engine(prefix_cache=False)
    prefix, other = random_prompts(22, [9, 12])
    handle = engine.register_prefix(prefix, cache_salt="a")
    for _ in range(2):
        hit, salted_otherwise = (
            engine.generate(prefix + other, greedy(), cache_salt=salt)[0] for salt in ("a", "b")
        )
        assert (hit.num_cached_tokens, salted_otherwise.num_cached_tokens) == (9, 0)
        check_greedy([hit, salted_otherwise], [greedy()] * 2)
    engine.unregister_prefix(handle)


def test_prefixes_may_contain_each_other_and_be_asked_for_twice():
    engine = make_engine()
    (long,) = random_prompts(23, [22])
    handles = [engine.register_prefix(long[:length]) for length in (9, 22, 9, 8)]
    assert engine.num_used_blocks == 6 + 1  # the third of 9 tokens is not the third of 22
    for handle in handles[::-1]:
        engine.unregister_prefix(handle)
        (output,) = engine.generate(long, greedy(3))
        check_greedy([output], [greedy(3)])
        assert output.num_cached_tokens == 21
        engine.scheduler.check_integrity()
    assert_idle(engine)


def test_a_prefix_is_registered_while_others_run():
    engine = make_engine()
    prompts = random_prompts(24, [9, 6])
    ids = engine.add_requests(prompts, greedy(12))
    engine.step()
    handle = engine.register_prefix([5, 6, 7])
    final = {out.request_id: out for out in engine.run(ids) if out.finished}
    check_greedy([final[request_id] for request_id in ids], [greedy(12)] * 2)
    assert engine.num_used_blocks == 1
    engine.unregister_prefix(handle)


def test_a_prefix_that_leaves_no_room_is_refused():
    engine = make_engine()  # 16 blocks of 4
    with pytest.raises(ValueError, match=r"prefix of 61 tokens would leave 0 of 16 blocks"):
        engine.register_prefix([1] * 61)
    with pytest.raises(ValueError, match="must leave room for itself"):
        engine.register_prefix([1] * 65)
    with pytest.raises(ValueError, match="at least one token"):
        engine.register_prefix([])
    request_id = engine.add_request([1] * 20, greedy(21))
    with pytest.raises(ValueError, match=r"leave request 'request-\d' the 10 that it may"):
        engine.register_prefix([2] * 28)
    assert engine.cancel(request_id)
    handle = engine.register_prefix([2] * 26)  # 7 blocks, 9 are left
    with pytest.raises(ValueError, match=r"the pool's 36 token slots"):
        engine.add_request([1] * 36, greedy(1))
    # Who begins with it shares its 6 full blocks.
    assert run_capped(engine, [2] * 27, 60) == 15 * SIZE - 27
    assert run_capped(engine, [1] * 27, 60) == 9 * SIZE - 27
    engine.unregister_prefix(handle)
    assert run_capped(engine, [1] * 27, 60) == 64 - 27


def run_capped(engine: Engine, prompt: list[int], max_tokens: int) -> int:
    """Generate beside a neighbour that wants room too; returns how many tokens came."""
    outputs = engine.generate([prompt, [9] * 5], greedy(max_tokens, ignore_eos=True))
    for output in outputs:
        expected = hash_model.expected_greedy(output.prompt_token_ids, len(output.token_ids))
        assert list(output.token_ids) == expected
    return len(outputs[0].token_ids)


def test_handles_are_their_engines():
    engines = [make_engine(), make_engine()]
    handles = [engine.register_prefix([1, 2, 3]) for engine in engines]
    for handle in (handles[0], "prefix-1", None):
        with pytest.raises(ValueError, match="must be one that register_prefix of this engine"):
            engines[1].unregister_prefix(handle)
    assert isinstance(handles[1], PrefixHandle)
    engines[1].unregister_prefix(handles[1])


# --- what no longer holds


def test_reset_and_new_weights_need_an_idle_engine_without_prefixes():
    engine = make_engine()
    handle = engine.register_prefix([1, 2, 3])
    with pytest.raises(ValueError, match=r"1 prefixes are registered: unregister_prefix must"):
        engine.reset_prefix_cache()
    with pytest.raises(ValueError, match="1 prefixes are registered"):
        engine.set_params({"salt": jnp.uint32(1)})
    engine.unregister_prefix(handle)
    request_id = engine.add_request([1, 2, 3], greedy())
    with pytest.raises(ValueError, match="must wait: 1 requests live, 0 outputs"):
        engine.set_params({"salt": jnp.uint32(1)})
    assert engine.cancel(request_id)
    drive(engine)
    for params in ({}, {"salt": jnp.float32(1)}, {"salt": jnp.ones(2, jnp.uint32)}):
        with pytest.raises(ValueError, match="params must have the tree, shapes and dtypes"):
            engine.set_params(params)


def test_who_runs_during_a_reset_keeps_its_own():
    engine = make_engine()
    (prompt,) = random_prompts(30, [20])
    ids = [engine.add_request(prompt, greedy(12))]

    def act(index: int) -> None:
        if index == 3:
            engine.reset_prefix_cache()
            ids.append(engine.add_request(prompt, greedy(3)))

    outputs = drive(engine, before_step=act)
    last = [outputs[request_id][-1] for request_id in ids]
    check_greedy(last, [greedy(12), greedy(3)])
    assert last[1].num_cached_tokens == 0
