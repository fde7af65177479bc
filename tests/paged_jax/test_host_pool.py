"""The host pool: blocks come back as they went, in place, whatever happens in between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import host_pool
from paged_jax.blocks.block_manager import BlockSwap
from paged_jax.config import EngineConfig, ModelSpec
from paged_jax.host_pool import HostPool, make_block_scatter, resolve_num_host_blocks
from paged_jax.pool import KVPool, bytes_per_block

SPEC = ModelSpec(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10, max_position=64
)
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def random_pool(dtype: str, num_blocks: int = 12, seed: int = 0) -> KVPool:
    """A pool in which no two elements that matter are alike."""
    rng = np.random.default_rng(seed)
    like = KVPool.create(SPEC, num_blocks=num_blocks, block_size=4, dtype=dtype)
    blocks = jnp.asarray(rng.normal(0, 50, like.blocks.shape), jnp.float32).astype(dtype)
    if like.scales is None:
        return KVPool(blocks)
    return KVPool(blocks, jnp.asarray(rng.normal(size=like.scales.shape), jnp.float32))


def as_arrays(pool: KVPool) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(pool)]


def wiped(pool: KVPool) -> KVPool:
    """The pool as others have overwritten it."""
    return jax.tree.map(jnp.zeros_like, pool)


@pytest.fixture
def small_buffers(monkeypatch):
    """Buffers of 4 blocks and of one."""
    monkeypatch.setattr(host_pool, "MAX_BUFFER_BLOCKS", 4)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_scales_come_back_elsewhere(dtype):
    pool = random_pool(dtype)
    before = as_arrays(pool)
    host = HostPool(pool, num_blocks=9, donate=True)
    assert host.buffer_sizes == (4, 1)
    host.store(pool, [BlockSwap(2 + i, 8 - i) for i in range(7)])
    pool = host.load(wiped(pool), [BlockSwap(9 - i, 2 + i) for i in range(7)])
    for now, then in zip(as_arrays(pool), before, strict=True):
        # Device block 2 + i went to host block 8 - i and came back to block 3 + i.
        np.testing.assert_array_equal(now[:, 3:10], then[:, 2:9])
        np.testing.assert_array_equal(now[:, [1, 2, 10, 11]], np.zeros_like(then[:, :4]))


def test_what_is_stored_is_what_was_there_then():
    """Later steps overwrite the device's blocks before anything has arrived."""
    pool = random_pool("float32")
    before = as_arrays(pool)[0]
    host = HostPool(pool, num_blocks=4)
    host.store(pool, [BlockSwap(3, 1)])
    overwrite = jax.jit(lambda pool: jax.tree.map(lambda x: x * 0 - 1, pool), donate_argnums=0)
    pool = overwrite(pool)
    pool = host.load(pool, [BlockSwap(5, 1)])
    np.testing.assert_array_equal(np.array(pool.blocks)[:, 5], before[:, 3])


def test_what_arrives_later_wins_and_a_load_keeps_what_it_read():
    one, two = random_pool("float32", seed=1), random_pool("float32", seed=2)
    first, second = as_arrays(one)[0], as_arrays(two)[0]
    host = HostPool(one, num_blocks=4)
    host.store(one, [BlockSwap(3, 1)])
    loaded = host.load(wiped(one), [BlockSwap(7, 1)])
    host.store(two, [BlockSwap(3, 1), BlockSwap(4, 2)])
    host.store(one, [BlockSwap(4, 2)])
    host.settle()
    np.testing.assert_array_equal(host.blocks[:, 1], second[:, 3])
    np.testing.assert_array_equal(host.blocks[:, 2], first[:, 4])
    np.testing.assert_array_equal(np.array(loaded.blocks)[:, 7], first[:, 3])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_zeroed_blocks_hold_nothing_even_if_they_were_on_their_way(dtype):
    pool = random_pool(dtype)
    host = HostPool(pool, num_blocks=4)
    host.store(pool, [BlockSwap(3, 1), BlockSwap(4, 2)])
    host.zero([1])
    arrays = [host.blocks] if host.scales is None else [host.blocks, host.scales]
    for mine, theirs in zip(arrays, as_arrays(pool), strict=True):
        assert not mine[:, 1].astype(np.float32).any()
        np.testing.assert_array_equal(mine[:, 2], theirs[:, 4])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_are_put_into_a_1_gb_pool_in_place(dtype):
    block = bytes_per_block(SPEC, block_size=16, dtype=dtype)
    make = functools.partial(KVPool.create, SPEC, block_size=16, dtype=dtype)
    pool = jax.eval_shape(functools.partial(make, num_blocks=2**30 // block))
    buffer = jax.eval_shape(functools.partial(make, num_blocks=64))
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    scatter = make_block_scatter(donate=True)
    memory = scatter.lower(pool, ids, buffer).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    assert pool.nbytes > 0.99 * 2**30
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.01 * pool.nbytes


def test_buffers_are_small_beside_a_large_pool():
    block = bytes_per_block(SPEC, block_size=1024, dtype="float32")
    pool = jax.eval_shape(lambda: KVPool.create(SPEC, num_blocks=2, block_size=1024))
    host = HostPool(pool, num_blocks=2)
    assert host.buffer_sizes[0] * block <= host_pool.BUFFER_BYTES
    huge = jax.eval_shape(lambda: KVPool.create(SPEC, num_blocks=2, block_size=2**18))
    assert HostPool(huge, num_blocks=2).buffer_sizes == (1,)
    assert HostPool(huge, num_blocks=2).max_programs == 2


def test_the_host_pool_is_as_large_as_the_pool_or_as_asked():
    def resolve(**config: object) -> int:
        return resolve_num_host_blocks(EngineConfig(**config), num_blocks=50, block_nbytes=1000)

    assert resolve() == 0
    assert resolve(preemption="swap") == resolve(preemption="auto") == 50
    assert resolve(preemption="swap", num_host_blocks=7) == 7
    assert resolve(preemption="auto", swap_bytes=3999) == 3
    with pytest.raises(ValueError, match="swap_bytes=1999 must hold two blocks of 1000 bytes"):
        resolve(preemption="swap", swap_bytes=1999)
