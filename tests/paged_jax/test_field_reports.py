"""Faults that users of similar systems met (tests/data/field_reports.json): pool and page shapes.

Each test bears the number of its report and runs its input through the engine or the step; tests of
the same report in other files look at the op, the block manager or the scheduler alone.
"""

import itertools
import json
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import (
    assert_idle,
    check_greedy,
    check_step,
    drive,
    fill_pool,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)

from paged_jax import Engine, EngineConfig, ModelSpec, PagedKVCache, RequestOutput
from paged_jax.baselines import run_static_batch

TESTS = pathlib.Path(__file__).parents[1]
ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def slot_bytes(engine: Engine, request_id: str, num_tokens: int) -> np.ndarray:
    """What the pool holds of a request's first tokens: [L, num_tokens, 2, K, D]."""
    sequence = engine._by_id[request_id].sequence
    table = engine.block_manager.table_array(sequence.seq_id)
    positions = np.arange(num_tokens)
    blocks = np.array(engine.executor.pool.blocks)
    return blocks[:, table[positions // 4], :, :, positions % 4].swapaxes(0, 1)


def test_every_report_has_a_test():
    reports = json.loads((TESTS / "data/field_reports.json").read_text(encoding="utf-8"))
    assert len({report["id"] for report in reports}) == len(reports) == 59
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    tested = {number.upper() for number in re.findall(r"^def test_(b\d\d)_", sources, re.MULTILINE)}
    missing = {report["id"] for report in reports} - tested
    assert not missing
    assert all(all(report[key] for key in ("kind", "symptom", "try_this")) for report in reports)


# --- padding or invalid index clobbers a live slot


def test_b13_padding_rows_leave_a_full_pool_as_it_is():
    """All 16 blocks are live, the last one too; three rows are padded to four."""
    engine = make_engine()
    params = [greedy(5), greedy(4), greedy(2)]
    ids = engine.add_requests(random_prompts(13, [16, 16, 23]), params)
    for _ in range(4):  # 16 prompt tokens a step
        engine.step()
    assert engine.block_manager.num_free == 0
    lens = [engine._by_id[request_id].sequence.num_computed for request_id in ids]
    assert lens == [19, 18, 23]
    before = [slot_bytes(engine, *held) for held in zip(ids, lens, strict=True)]
    steps = engine.stats.num_positions
    engine.step()
    assert engine.stats.num_positions - steps == 4  # three decode rows
    after = [slot_bytes(engine, *held) for held in zip(ids, lens, strict=True)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    finals: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        finals.update({output.request_id: output for output in engine.step()})
    check_greedy([finals[request_id] for request_id in ids], params)


def test_b15_pages_of_finished_rows_go_to_new_requests_while_padding_runs():
    prompts = random_prompts(15, [6, 5, 7, 3, 9, 10, 6])
    engine = make_engine()
    engine.add_request(prompts[0], greedy(40))
    engine.add_requests(prompts[1:4], greedy(3))
    for _ in range(8):
        engine.step()
    assert engine.scheduler.num_running == 1
    new = engine.add_requests(prompts[4:], greedy(8))
    for _ in range(6):
        engine.step()
    for prompt, request_id in zip(prompts[4:], new, strict=True):
        count = engine._by_id[request_id].sequence.num_computed
        assert count > len(prompt)
        alone = make_engine(**ONE_AT_A_TIME)
        (other,) = alone.add_requests(prompt, greedy(8))
        while alone._by_id[other].sequence.num_computed < count:
            alone.step()
        held = slot_bytes(engine, request_id, count)
        np.testing.assert_array_equal(slot_bytes(alone, other, count), held)


def test_b16_lengths_around_a_page_in_every_order(engine):
    prompts = random_prompts(16, [1, 4, 5, 9])
    expected = [tuple(hash_model.expected_greedy(prompt, 5)) for prompt in prompts]
    for order in itertools.permutations(range(4)):
        outputs = run_all(engine, [prompts[i] for i in order], greedy(5))
        assert [output.token_ids for output in outputs] == [expected[i] for i in order]


@pytest.mark.parametrize("poison", [2**30, -1, 17])
def test_b18_table_entries_past_the_length_are_never_followed(poison):
    engine = make_engine()
    pack = engine.executor._packer.pack

    class PoisoningPacker:
        def pack(self, rows, layout, *, branches):
            packed = pack(rows, layout, branches=branches)
            kv_lens = packed[:, 1] + packed[:, 2]  # start + num_new; 0 in padding rows
            is_unused = np.arange(layout.table_width) >= -(-kv_lens[:, None] // 4)
            packed[:, layout.table_offset :][is_unused] = poison
            return packed

    engine.executor._packer = PoisoningPacker()
    prompts = random_prompts(18, [1, 4, 5, 9, 30])
    check_greedy(run_all(engine, prompts, greedy(9)), [greedy(9)] * 5)


# --- garbage in masked or unwritten slots


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)]
)
def test_b19_garbage_in_the_pool_at_every_length_to_two_pages(dtype):
    """The hash model's values are integers below 256: exact in all three dtypes."""
    engine = make_engine(kv_dtype=dtype, **ONE_AT_A_TIME)
    prompts = random_prompts(19, range(1, 10))
    for garbage in (np.nan, np.inf, 6e4 if dtype == "float16" else 1e38):
        fill_pool(engine, garbage)
        check_greedy(run_all(engine, prompts, greedy(4)), [greedy(4)] * 9)
    assert engine.executor.pool.blocks.dtype == dtype


def test_b21_no_nan_in_a_fresh_pool_and_the_debug_check_is_on():
    engine = make_engine(check_logits=True)
    check_greedy(run_all(engine, [[7]], greedy(20)), [greedy(20)])
    # That the check finds NaN: test_engine.py, test_nan_logits_stop_the_engine_for_good.


def test_b22_a_batch_equals_batches_of_one_and_the_dense_baseline(engine):
    prompts = random_prompts(22, [3, 1, 4, 2, 7])
    together = run_all(engine, prompts, greedy(6))
    alone = [run_all(engine, [prompt], greedy(6))[0] for prompt in prompts]
    dense = run_static_batch(hash_model.make_model(), prompts, [6] * 5)
    for index in range(5):
        assert together[index].token_ids == alone[index].token_ids
        assert list(together[index].token_ids) == dense.token_ids[index]


# --- page size and page boundary


@pytest.mark.parametrize(
    "block_size", [3, 64, 256, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 32, 128))]
)
def test_b43_any_page_size(block_size):
    """1, 4, 8, 16 and 64 run in test_engine_exact.py, all of them in the op's tests."""
    num_blocks = 1 + -(-64 // block_size)
    engine = make_engine(block_size=block_size, num_blocks=num_blocks, **ONE_AT_A_TIME)
    fill_pool(engine, np.nan)
    lens = {1, 2, 3, 31, 32, 33, block_size - 1, block_size, block_size + 1}
    prompts = random_prompts(43, [length for length in sorted(lens) if 0 < length <= 50])
    check_greedy(run_all(engine, prompts, greedy(7)), [greedy(7)] * len(prompts))


def test_b43_sizes_and_dtypes_that_cannot_work_are_refused():
    for size in (0, -4, 2.0, True):
        with pytest.raises(ValueError, match=r"block_size=.* must be an integer >= 1"):
            EngineConfig(block_size=size)
    with pytest.raises(ValueError, match="kv_dtype='float8_e5m2' must be"):
        EngineConfig(kv_dtype="float8_e5m2")


def test_b45_impossible_shapes_are_refused_on_the_host(engine):
    shape = {"num_layers": 1, "num_kv_heads": 4, "head_dim": 8, "vocab_size": 9}
    with pytest.raises(ValueError, match="num_kv_heads=4 must divide num_heads=6"):
        ModelSpec(num_heads=6, max_position=16, **shape)
    with pytest.raises(ValueError, match="max_model_len=-1 must be an integer >= 1"):
        EngineConfig(max_model_len=-1)
    with pytest.raises(ValueError, match="num_blocks=1 must be an integer >= 2"):
        EngineConfig(num_blocks=1)
    # A length beyond table width x page never reaches a table.
    assert engine.max_model_len == 64
    with pytest.raises(ValueError, match="prompt of 65 tokens must leave room"):
        engine.add_request([1] * 65, greedy(1))
    assert_idle(engine)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7])
def test_b46_identical_requests_of_length_one_are_all_equal(engine, num_rows):
    outputs = run_all(engine, [[9]] * num_rows, greedy(9))
    assert {output.token_ids for output in outputs} == {tuple(hash_model.expected_greedy([9], 9))}


def test_b48_rows_that_share_pages_have_tables_longer_than_the_pool():
    """8 rows share 10 pages and own one each: 18 pages, 88 table entries, a pool of 20."""
    model = hash_model.make_model()
    engine = make_engine(num_blocks=21, max_model_len=None)
    manager = engine.block_manager
    assert manager.allocate(0, num_tokens=40)
    for child in range(1, 8):
        manager.fork(0, child)
    for sequence in range(8):
        assert manager.append(sequence, num_tokens=1) == ()
    assert manager.stats().used == 18
    tables = np.stack([manager.table_array(sequence) for sequence in range(8)])
    assert tables.shape == (8, 11)

    @jax.jit
    def step(pool, tokens, tables, starts, lens):
        cache = PagedKVCache.from_tables(pool, tables, starts, lens, num_new=tokens.shape[1])
        positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        last = (lens - 1)[:, None]
        logits, cache = model.apply(model.params, tokens, positions, cache, logits_at=last)
        return logits[:, 0], cache.pool

    (prompt,) = random_prompts(48, [40])
    row = np.array([prompt], np.int32)
    zero, forty = np.zeros(1, np.int32), np.full(1, 40, np.int32)
    _, pool = step(engine.executor.pool, row, tables[:1], zero, forty)
    own = np.arange(8, dtype=np.int32)
    starts, ones = np.full(8, 40, np.int32), np.ones(8, np.int32)
    logits, _ = step(pool, own[:, None], tables, starts, ones)
    expected = [hash_model.expected_logits([*prompt, token])[-1] for token in range(8)]
    np.testing.assert_array_equal(logits, expected)


# --- a request that can never fit


def test_b32_what_can_never_fit_is_refused_and_what_can_ends_with_length():
    engine = make_engine(num_blocks=9, max_model_len=None, max_num_batched_tokens=8)
    assert engine.max_model_len == 32
    with pytest.raises(
        ValueError, match=r"prompt of 33 tokens .*max_model_len=32 .*32 token slots"
    ):
        engine.add_request([1] * 33, greedy(1))
    prompts = random_prompts(32, [20, 3, 2, 5, 4])
    outputs = run_all(engine, prompts, [greedy(40)] + [greedy(5)] * 4)
    check_greedy(outputs, [greedy(12)] + [greedy(5)] * 4)
    assert all(output.finish_reason == "length" for output in outputs)
    assert engine.stats.num_steps < 60


def test_b34_two_requests_in_a_pool_for_one_and_a_half():
    engine = make_engine(prefill_chunk_len=5)
    params = [greedy(23), greedy(23)]
    prompts = random_prompts(34, [20, 20])
    engine.add_requests(prompts, params)
    counts, outputs = [], {}
    while engine.has_unfinished:
        outputs.update({output.request_id: output for output in engine.step()})
        check_step(engine)
        counts.append(engine.stats.num_output_tokens)
    check_greedy(list(outputs.values()), params)
    assert 1 <= engine.stats.num_preemptions <= 2
    assert engine.scheduler.preemptor.num_recomputed_tokens <= 2 * 43
    # New tokens come in any window of as many steps as the longest history has chunks.
    window = 43 // 5 + 3
    assert all(later > earlier for earlier, later in zip(counts, counts[window:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_b35_random_traffic_never_stalls(engine, seed):
    rng = random.Random(seed)
    alive: list[str] = []

    def act(index: int) -> bool:
        line = engine.scheduler.num_waiting + engine.scheduler.num_preempted
        assert engine.scheduler.num_running or not line
        if index < 60 and rng.random() < 0.7:
            prompt = random_prompts(rng.randrange(99), [rng.randint(1, 60)])[0]
            alive.append(engine.add_request(prompt, greedy(rng.randint(0, 40))))
        if alive and rng.random() < 0.1:
            engine.cancel(rng.choice(alive))
        return index < 60

    assert set(drive(engine, before_step=act)) == set(alive)
