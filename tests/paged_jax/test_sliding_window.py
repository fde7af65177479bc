"""Models with a window in every layer: blocks behind it are freed, and nobody notices; exact."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import drive, fill_pool, greedy, make_engine, random_prompts, run_all

from paged_jax import Engine, EngineConfig, RequestOutput, SamplingParams
from paged_jax.pool import KVPool
from paged_jax.scheduling.window import first_needed, most_blocks

BLOCK_SIZE = 4
WINDOWS = (9, 6)
MOST = 3  # blocks that 9 positions can touch
# Few pool sizes and one context: few programs.
SMALL = {"num_blocks": 1 + 3 * MOST, "max_model_len": 200}
LARGE = {"num_blocks": 250, "max_model_len": 200}

window_model = functools.cache(hash_model.make_window_model)


def window_engine(windows=WINDOWS, *, is_known: bool = True, **config) -> Engine:
    engine = make_engine(window_model(windows, is_known=is_known), **config)
    fill_pool(engine, np.nan)
    return engine


def poison(engine: Engine) -> None:
    """NaN in every block that nobody holds and that is not cached, the null block too."""
    pool = engine.block_manager._pool
    free = [
        block
        for block in range(engine.num_blocks)
        if pool.ref_counts[block] == 0 and not pool.is_kept(block)
    ]
    blocks = np.array(engine.executor.pool.blocks)
    blocks[:, free] = np.nan
    engine.executor.pool = KVPool(jax.device_put(blocks))


def check_windows(engine: Engine) -> None:
    """No sequence holds what it needs no longer, but for the step that was just planned."""
    manager, window = engine.block_manager, engine.model.spec.window
    for sequence in engine.scheduler.running:
        table = manager.table_array(sequence.seq_id)
        needed = first_needed(sequence.num_computed, window) // BLOCK_SIZE
        assert (table[needed:] > 0).all()
        if sequence.num_computed > sequence.num_prefill:
            assert manager.num_held_blocks(sequence.seq_id) <= most_blocks(
                sequence.num_computed, window, BLOCK_SIZE
            )


def run_poisoned(engine: Engine, prompts, params) -> list[RequestOutput]:
    def before_step(index: int) -> None:
        poison(engine)
        check_windows(engine)

    return run_all(engine, prompts, params, before_step=before_step)


def check_greedy(outputs: list[RequestOutput], windows=WINDOWS) -> None:
    for output in outputs:
        tokens = list(output.token_ids)
        expected = hash_model.expected_greedy(output.prompt_token_ids, len(tokens), windows=windows)
        assert tokens == expected


def test_the_reference_sees_exactly_the_windows():
    """One position more or less would give other tokens."""
    (prompt,) = random_prompts(0, [20])
    outputs = {
        tuple(hash_model.expected_greedy(prompt, 4, windows=windows))
        for windows in [(9, 6), (8, 6), (10, 6), (9, 5), (9, 7), (None, None)]
    }
    assert len(outputs) == 6
    # Two layers see (9 - 1) + (6 - 1) positions back.
    other = [*random_prompts(1, [6])[0], *prompt[6:]]
    assert hash_model.expected_greedy(other, 4, windows=WINDOWS) in map(list, outputs)
    other = [*random_prompts(1, [7])[0], *prompt[7:]]
    assert hash_model.expected_greedy(other, 4, windows=WINDOWS) not in map(list, outputs)


def test_long_generation_in_a_pool_of_three_blocks():
    engine = window_engine(num_blocks=1 + MOST, max_model_len=400)
    assert engine.max_model_len == 400
    prompts = random_prompts(1, [3, 150])
    outputs = run_poisoned(engine, prompts, [greedy(200), greedy(None)])
    check_greedy(outputs)
    assert [len(output.token_ids) for output in outputs] == [200, 250]
    assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert engine.stats.peak_used_blocks == MOST


@pytest.mark.parametrize("size", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_b89_exactly_so_many_keys_in_prefill_and_decode(size):
    windows = (size, size)
    engine = window_engine(windows, **SMALL)
    prompts = random_prompts(size, [1, BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 30])
    outputs = run_poisoned(engine, prompts, greedy(4 * BLOCK_SIZE + 1))
    check_greedy(outputs, windows)


@pytest.mark.parametrize("chunk_len", [1, 5, None])
def test_preempted_and_resumed(chunk_len):
    """Four at a time come to hold three blocks each, of nine."""
    engine = window_engine(prefill_chunk_len=chunk_len, **SMALL)
    prompts = random_prompts(2, [1, 3, 2, 4, 30, 40])
    params = [greedy(limit) for limit in (60, 50, 40, 30, 50, 60)]
    outputs = run_poisoned(engine, prompts, params)
    check_greedy(outputs)
    assert [len(output.token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert engine.stats.num_preemptions > 0


def hot(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=4.0, max_tokens=max_tokens, **fields)


@pytest.mark.parametrize("prompt_len", [pytest.param(3, marks=pytest.mark.long), 70])
def test_parallel_samples_equal_those_that_keep_their_blocks(prompt_len):
    """Beside others, preempted, in a pool for one of them; the other engine frees no block."""
    prompts = random_prompts(prompt_len, [prompt_len, 3, prompt_len])
    params = [hot(50, n=2, seed=1), hot(40, n=2, seed=2), hot(60, n=3, seed=3)]
    small = window_engine(**SMALL)
    large = window_engine(is_known=False, **LARGE)
    outputs = run_poisoned(small, prompts, params)
    for output, other in zip(outputs, run_all(large, prompts, params), strict=True):
        tokens = [completion.token_ids for completion in output.outputs]
        assert tokens == [completion.token_ids for completion in other.outputs]
        assert len(set(tokens)) == len(tokens)
        assert all(len(sample) > BLOCK_SIZE * MOST for sample in tokens)
    assert small.stats.num_preemptions > 0
    assert small.stats.peak_used_blocks <= 3 * MOST


def test_samples_that_fork_share_what_is_left_of_the_prompt():
    engine = window_engine(**SMALL)
    (prompt,) = random_prompts(3, [41])
    engine.add_request(prompt, hot(30, n=3, seed=1))
    saved = []
    drive(engine, before_step=lambda index: saved.append(engine.block_manager.stats().saved))
    # The prompt's last chunk began at 32, so blocks 6 .. 10 were there. Then positions from 33 on
    # are needed, 8 and 9 are shared, and each has its own block 10.
    assert saved[3:6] == [2 * 5, 2 * 2, 2 * 2]
    assert saved[-1] == 0


def test_b24_windowed_tables_that_were_forked_release_each_reference_once():
    """n = 4, a window of two blocks, six blocks of output, and the same without a window."""
    for windows in ((8, 8), (None, None)):
        engine = window_engine(windows, **LARGE)
        manager = engine.block_manager
        (prompt,) = random_prompts(24, [11])
        engine.add_request(prompt, hot(6 * BLOCK_SIZE, n=4, seed=24))

        def check(index: int, engine=engine, manager=manager) -> None:
            tables = [manager.table_array(s.seq_id).tolist() for s in engine.scheduler.running]
            for block in range(1, engine.num_blocks):
                holders = sum(block in table for table in tables)
                assert manager.ref_count(block) >= holders
                assert sum(table.count(block) for table in tables) == holders

        drive(engine, before_step=check)
        assert manager.num_free == manager.num_usable


def test_one_layer_that_sees_everything_keeps_all_blocks():
    engine = window_engine((6, None), **SMALL)
    assert engine.model.spec.window is None
    assert engine.max_model_len == 3 * MOST * BLOCK_SIZE
    (prompt,) = random_prompts(5, [7])
    outputs = run_all(engine, [prompt], greedy(3 * MOST * BLOCK_SIZE - 7))
    check_greedy(outputs, (6, None))
    assert engine.stats.peak_used_blocks == 3 * MOST


def test_pool_below_the_window_limits_the_context():
    engine = window_engine(num_blocks=MOST, max_model_len=400)
    assert engine.max_model_len == (MOST - 1) * BLOCK_SIZE
    with pytest.raises(ValueError, match="must leave room for one new token"):
        engine.add_request([1] * (MOST - 1) * BLOCK_SIZE)


def test_several_sequences_must_fit_with_their_windows():
    engine = window_engine(**SMALL)
    prompt = [1] * 40
    request_id = engine.add_request(prompt, hot(160, n=3))
    assert engine._by_id[request_id].sequence.max_tokens == 160
    with pytest.raises(ValueError, match=r"pool's 36 token slots for each of its 4 sequences"):
        engine.add_request(prompt, hot(160, n=4))


def test_cancelled_at_any_step():
    engine = window_engine(**SMALL)
    for seed in range(3):
        rng = random.Random(seed)
        prompts = random_prompts(seed, [rng.randrange(1, 60) for _ in range(4)])
        params = [dataclasses.replace(hot(40), n=rng.choice([1, 2, 3])) for _ in prompts]
        ids = engine.add_requests(prompts, params)
        when = {rng.randrange(30): request_id for request_id in ids[:3]}

        def cancel(index: int, when=when) -> None:
            poison(engine)
            if index in when:
                engine.cancel(when[index])

        drive(engine, before_step=cancel)


def plain_window_model(size: int | None, *, spec_window: int):
    def apply(params, tokens, positions, cache, *, logits_at):
        x = params[tokens][:, :, None]
        out, cache = cache.attend(0, x, x, x, window=size)
        return jax.numpy.take_along_axis(out[:, :, 0], logits_at[..., None], axis=1), cache

    model = hash_model.make_model()
    spec = dataclasses.replace(
        model.spec, num_layers=1, num_heads=1, num_kv_heads=1, vocab_size=8, window=spec_window
    )
    return dataclasses.replace(model, apply=apply, params=jax.numpy.eye(8), spec=spec)


@pytest.mark.parametrize("size", [None, 7])
def test_layer_that_sees_more_than_the_spec_says_is_named(size):
    engine = Engine(plain_window_model(size, spec_window=6), config=EngineConfig(num_blocks=9))
    message = rf"window={size} must be at most ModelSpec.window=6: what is behind"
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2, 3]], greedy(3))


def test_layer_that_sees_as_much_as_the_spec_says_runs():
    engine = Engine(plain_window_model(6, spec_window=6), config=EngineConfig(num_blocks=9))
    (output,) = engine.generate([[1, 2, 3]], greedy(3))
    assert len(output.token_ids) == 3
