"""What a freed block held never reaches anybody: poisoned pools, and blocks zeroed when freed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from suites.engine_runs import (
    fill_pool,
    greedy,
    make_engine,
    random_mix,
    random_prompts,
    run_all,
)
from suites.small_models import scripted_model

from models.llama import LlamaConfig, as_model, random_params
from paged_jax.block_fill import make_block_fill
from paged_jax.blocks.block_manager import BlockManager
from paged_jax.blocks.block_moves import FreedBlocks
from paged_jax.engine import Engine
from paged_jax.metrics import count_compilations
from paged_jax.model import Model

POISONS = [float("nan"), 3e38]


@functools.cache
def tiny_llama() -> Model:
    config = LlamaConfig.tiny(num_layers=2)
    return as_model(config, random_params(config, seed=0))


@functools.cache
def poison_of(value: float) -> Callable[..., Any]:
    return make_block_fill(donate=True, value=value)


def poisoned_engine(model: Model | None, poison: float, **config: Any) -> Engine:
    """Every block is overwritten on the device right after it is freed, and at the beginning."""
    engine = make_engine(model, zero_on_free=True, **config)
    engine.executor._fill = poison_of(poison)
    fill_pool(engine, poison)
    return engine


def tokens_of(outputs: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        request_id: [(one.token_ids, one.finish_reason) for one in some[-1].outputs]
        for request_id, some in outputs.items()
    }


@functools.cache
def undisturbed(name: str, seed: int) -> dict[str, Any]:
    engine = make_engine(tiny_llama() if name == "llama" else None)
    outputs = tokens_of(random_mix(engine, seed))
    assert engine.stats.num_preemptions > 3
    assert engine.stats.num_copied_blocks > 3
    assert any(reason == "cancelled" for some in outputs.values() for _, reason in some)
    return outputs


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["hash", "llama"])
def test_a_poisoned_pool_changes_no_output(name: str, poison: float):
    seed = 1
    engine = poisoned_engine(tiny_llama() if name == "llama" else None, poison)
    assert tokens_of(random_mix(engine, seed)) == undisturbed(name, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 40))
def test_a_poisoned_pool_changes_no_output_of_many_mixes(seed: int):
    for poison in POISONS:
        engine = poisoned_engine(None, poison)
        reference = make_engine()
        assert tokens_of(random_mix(engine, seed)) == tokens_of(random_mix(reference, seed))


def stale_table(manager: BlockManager, seq_id: int) -> np.ndarray:
    """A table whose first block is somebody's old one."""
    table = manager._tables[seq_id].array.copy()
    free = manager._pool._free
    if len(table) > 1 and free:
        table[0] = free[0]
    return table


def test_a_stale_table_entry_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """So the tests above can fail."""
    right = undisturbed("hash", 1)  # kept for other tests: not to be made by a broken manager
    monkeypatch.setattr(BlockManager, "table_array", stale_table)
    engine = poisoned_engine(None, 1.0)
    assert tokens_of(random_mix(engine, 1)) != right


def test_clearing_a_block_in_use_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    take_freed = BlockManager.take_freed

    def one_too_many(manager: BlockManager) -> FreedBlocks:
        freed = take_freed(manager)
        held = [block for block, count in enumerate(manager._pool.ref_counts) if count]
        return FreedBlocks(freed.device + held[:1], freed.host)

    right = undisturbed("hash", 1)
    monkeypatch.setattr(BlockManager, "take_freed", one_too_many)
    engine = make_engine(zero_on_free=True)
    assert tokens_of(random_mix(engine, 1)) != right


def dirty_blocks(engine: Engine) -> set[int]:
    """Free blocks with anything but zeros in them."""
    free = engine.block_manager._pool._free
    content = np.asarray(engine.executor.pool.blocks)[:, free]  # [L, free, 2, K, S, D]
    is_dirty = (content != 0).any(axis=(0, 2, 3, 4, 5))
    return set(np.array(free)[is_dirty].tolist())


def test_with_zero_on_free_no_free_block_holds_anything_after_any_step():
    engine = make_engine(zero_on_free=True)
    num_checked = 0

    def check() -> None:
        nonlocal num_checked
        # A cancel between steps is due in the next one.
        if not engine.block_manager._pool._freed:
            assert not dirty_blocks(engine)
            num_checked += 1

    outputs = tokens_of(random_mix(engine, 1, after_step=check))
    assert num_checked > 50
    assert outputs == undisturbed("hash", 1)


def test_without_it_free_blocks_do_hold_something():
    engine = make_engine(prefix_cache=False)
    run_all(engine, random_prompts(0, [9, 9]), greedy(4))
    assert dirty_blocks(engine)


def test_an_idle_engine_has_cleared_everything():
    """Everything that is free, that is: a prefix cache would keep what it may use again."""
    engine = make_engine(zero_on_free=True, prefix_cache=False)
    engine.generate(random_prompts(0, [9, 12, 3]), greedy(6))
    assert np.asarray(engine.executor.pool.blocks)[:, 1:].any() == np.False_
    # Cancelled between steps: with the next one, also when that has nothing else to do.
    name = engine.add_request([1] * 9, greedy(20))
    engine.step()
    engine.step()
    engine.cancel(name)
    assert dirty_blocks(engine)
    while engine.has_unfinished:
        engine.step()
    assert not dirty_blocks(engine)


def test_a_step_clears_all_in_one_launch_and_nothing_is_launched_for_nothing():
    engine = make_engine(zero_on_free=True, prefix_cache=False, num_blocks=17)
    launched: list[int] = []
    fill = engine.executor._fill

    def counted(pool: Any, ids: np.ndarray) -> Any:
        launched.append(int(np.count_nonzero(ids)))
        return fill(pool, ids)

    engine.executor._fill = counted
    run_all(engine, random_prompts(0, [8, 8]), greedy(5))
    # Both end in one step, with three blocks each.
    assert launched == [6]


def test_programs_are_few():
    model = scripted_model([1, 2, 3, 4, 5], vocab_size=7)
    engine = make_engine(model, zero_on_free=True)
    with count_compilations() as counted:
        for num in (1, 4):
            engine.generate(random_prompts_of(7, num), greedy(3))
    assert 0 < counted.count <= engine.executor.max_plain_programs


def random_prompts_of(vocab_size: int, num: int) -> list[list[int]]:
    prompts = random_prompts(num, [3 * i + 1 for i in range(num)])
    return [[token % vocab_size for token in prompt] for prompt in prompts]
