"""Pools that are stored otherwise than the model computes: in 8 bits, or with padded heads."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import (
    STANDARD,
    check_greedy,
    greedy,
    make_engine,
    random_prompts,
    run_all,
)
from suites.fixed_batch import FixedBatch

from models.llama import LlamaConfig, as_model, random_params
from paged_jax import Engine, EngineConfig, KVPool
from paged_jax.cache import PagedKVCache
from paged_jax.config import ModelSpec
from paged_jax.pool import bytes_per_block, resolve_num_blocks
from paged_jax.scheduling.plan import Plan
from paged_jax.step import make_block_copy

SPEC = ModelSpec(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10, max_position=64
)
KV_DTYPES = ("int8", "float8_e4m3fn")
CONFIG = LlamaConfig.tiny(num_layers=3)


@pytest.fixture(scope="module")
def tiny():
    return as_model(CONFIG, random_params(CONFIG, seed=0))


def prompts_of(seed, lens):
    """Prompts within the tiny model's vocabulary."""
    return [[token % 96 for token in prompt] for prompt in random_prompts(seed, lens)]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_scales_are_counted(dtype):
    pool = KVPool.create(SPEC, num_blocks=5, block_size=4, dtype=dtype, head_dim=16)
    assert pool.blocks.shape == (3, 5, 2, 2, 4, 16)
    assert pool.scales is not None
    assert (pool.scales.shape, pool.scales.dtype) == ((3, 5, 2, 2, 4), "float32")
    assert pool.nbytes == 3 * 5 * 2 * 2 * 4 * (16 + 4)
    block = bytes_per_block(SPEC, block_size=4, dtype=dtype, head_dim=16)
    assert pool.block_nbytes == block == pool.nbytes // 5
    config = EngineConfig(kv_dtype=dtype, block_size=4, pool_head_dim=16, pool_bytes=7 * block + 1)
    assert resolve_num_blocks(config, SPEC) == 7


def test_fill_is_what_the_elements_stand_for():
    for dtype in KV_DTYPES:
        pool = KVPool.create(SPEC, num_blocks=2, block_size=1, dtype=dtype, fill=np.nan)
        assert np.isnan(np.asarray(pool.blocks).astype(np.float32) * pool.scales[..., None]).all()


def test_float_pools_have_no_scales():
    assert KVPool.create(SPEC, num_blocks=2, block_size=1).scales is None


def test_a_pool_head_dim_under_the_models_is_refused():
    message = "pool_head_dim=4 must be at least the model's head_dim=8"
    with pytest.raises(ValueError, match=message):
        KVPool.create(SPEC, num_blocks=5, block_size=4, head_dim=4)
    with pytest.raises(ValueError, match=message):
        resolve_num_blocks(EngineConfig(pool_head_dim=4), SPEC)


def test_copies_take_the_scales_along():
    rng = np.random.default_rng(0)
    blocks = rng.integers(-127, 128, size=(3, 9, 2, 2, 4, 8)).astype(np.int8)
    scales = rng.normal(size=blocks.shape[:5]).astype(np.float32)
    pool = KVPool(jnp.asarray(blocks), jnp.asarray(scales))
    copied = make_block_copy(donate=False)(pool, np.int32([[3, 3, 0], [5, 6, 0]]))
    blocks[:, [5, 6]], scales[:, [5, 6]] = blocks[:, [3, 3]], scales[:, [3, 3]]
    np.testing.assert_array_equal(copied.blocks, blocks)
    np.testing.assert_array_equal(copied.scales, scales)


def test_the_executor_runs_copies_of_8_bit_pools(tiny):
    engine = make_engine(tiny, kv_dtype="int8")
    run_all(engine, prompts_of(3, [9]), greedy(3))
    before = np.array(engine.executor.pool.scales)
    engine.executor.execute(Plan(step=99, copies=[(1, 5)]))
    before[:, 5] = before[:, 1]
    np.testing.assert_array_equal(engine.executor.pool.scales, before)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_an_engine_decodes_from_8_bits_as_a_fixed_batch_does(tiny, dtype):
    """What differs is at most a stored value at a tie, which other batch shapes round otherwise."""
    prompts = prompts_of(5, [3, 9, 17, 6, 12])
    engine = make_engine(tiny, kv_dtype=dtype, num_blocks=33)
    pool = engine.executor.pool
    assert pool.scales is not None
    engine.executor.pool = KVPool(pool.blocks, jnp.full_like(pool.scales, jnp.nan))
    outputs = run_all(engine, prompts, greedy(8))

    batch = FixedBatch(tiny, "paged", num_rows=5, capacity=32, block_size=4)
    batch.store = KVPool.create(
        tiny.spec, num_blocks=batch.store.num_blocks, block_size=4, dtype=dtype, fill=np.nan
    )
    wanted = batch.decode_greedy(batch.prefill(prompts, chunk=8), 8)
    pairs = zip(outputs, wanted, strict=True)
    equal = [list(output.token_ids) == row.tolist() for output, row in pairs]
    assert sum(equal) >= 4, equal


def test_a_padded_pool_gives_exactly_the_same_tokens():
    engine = make_engine(pool_head_dim=16)
    pool = engine.executor.pool
    assert pool.blocks.shape[-1] == 16
    engine.executor.pool = KVPool(jnp.full_like(pool.blocks, jnp.nan))
    lens = [5, 17, 30, 2]
    check_greedy(run_all(engine, random_prompts(6, lens), greedy(9)), [greedy(9)] * len(lens))


def test_a_padded_8_bit_pool(tiny):
    prompts = prompts_of(7, [3, 9])
    plain, padded = (
        run_all(make_engine(tiny, kv_dtype="int8", pool_head_dim=dim), prompts, greedy(6))
        for dim in (None, 12)
    )
    assert [out.token_ids for out in plain] == [out.token_ids for out in padded]


def test_engines_name_the_size_that_does_not_fit(tiny):
    with pytest.raises(ValueError, match="pool_head_dim=4 must be at least the model's"):
        Engine(tiny, config=EngineConfig(pool_head_dim=4))


@pytest.mark.long
@pytest.mark.parametrize(("backend", "kv_dtype"), [("triton", "float32"), ("triton", "bfloat16")])
def test_an_engine_runs_a_gpu_backend_in_its_interpreter(backend, kv_dtype):
    """Writes, copies and attention; values of the hash model are exact in bfloat16 too."""
    settings = {
        **STANDARD,
        "block_size": 8,
        "num_blocks": 9,
        "max_num_seqs": 2,
        "kv_dtype": kv_dtype,
        "pool_head_dim": 64,
        "attention_backend": backend,
        "kernel_interpreter": True,
    }
    engine = Engine(hash_model.make_model(), config=EngineConfig(**settings))
    outputs = run_all(engine, random_prompts(8, [9, 3]), greedy(3))
    check_greedy(outputs, [greedy(3)] * 2)
    before = np.array(engine.executor.pool.blocks)
    engine.executor.execute(Plan(step=99, copies=[(1, 5)]))
    np.testing.assert_array_equal(engine.executor.pool.blocks[:, 5], before[:, 1])


@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_a_backend_that_cannot_attend_is_named(backend):
    settings = {**STANDARD, "attention_backend": backend, "kernel_interpreter": True}
    engine = Engine(hash_model.make_model(), config=EngineConfig(**settings))
    with pytest.raises(NotImplementedError, match=f"backend of paged_attention: {backend}: "):
        run_all(engine, random_prompts(8, [9]), greedy(3))


def test_a_write_that_the_attentions_backend_lacks_is_anothers():
    """Mosaic writes no 8-bit pools, so with it the Triton kernel does."""
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.normal(size=(2, 1, 2, 8)).astype(np.float32))
    pool = KVPool.create(SPEC, num_blocks=5, block_size=8, dtype="int8")
    flat = KVPool(pool.blocks[0], None if pool.scales is None else pool.scales[0])
    tables, one = jnp.int32([[1, 2], [4, 3]]), jnp.int32([1, 1])
    starts = jnp.int32([9, 3])
    make = functools.partial(PagedKVCache.from_tables, pool, tables, starts, one, num_new=1)
    written, wanted = (
        cache._write(flat, new, new, cache.slot_mapping)
        for cache in (make(backend="mosaic", interpret=True), make(backend="xla"))
    )
    np.testing.assert_array_equal(written.blocks[1:], wanted.blocks[1:])
    np.testing.assert_array_equal(written.scales[1:], wanted.scales[1:])
