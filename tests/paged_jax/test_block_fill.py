"""Filling blocks of a pool: exactly the named ones, scales too, in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.block_fill import ID_BUCKETS, make_block_fill, padded_ids
from paged_jax.config import ModelSpec
from paged_jax.pool import KVPool, bytes_per_block

SPEC = ModelSpec(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10, max_position=64
)


def random_pool(dtype: str) -> KVPool:
    pool = KVPool.create(SPEC, num_blocks=9, block_size=4, dtype=dtype)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(1, 9, x.shape), x.dtype), pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("ids", [[], [4], [8, 1, 3]])
def test_the_named_blocks_are_zero_and_no_others(dtype: str, ids: list[int]):
    pool = random_pool(dtype)
    before = jax.tree.map(np.asarray, pool)
    for padded in padded_ids(ids):
        pool = make_block_fill(donate=False)(pool, padded)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(pool), strict=True):
        expected = old.copy()
        expected[:, ids] = 0
        # Nothing depends on the null block.
        np.testing.assert_array_equal(np.asarray(new)[:, 1:], expected[:, 1:])


def test_the_form_for_gpus_does_the_same():
    """Where the loop of the CPU is one scatter instead."""
    pool, ids = random_pool("int8"), next(padded_ids([7, 2]))
    fill: Any = make_block_fill(donate=False, value=3)
    expected = fill(pool, ids)
    assert "scatter" in fill.trace(pool, ids).lower(lowering_platforms=("cuda",)).as_text()
    scattered = jax.tree.map(lambda x: x.at[:, ids].set(jnp.asarray(3, x.dtype)), pool)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(scattered), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[:, 1:], np.asarray(other)[:, 1:])


def test_ids_are_padded_to_few_sizes():
    for count in (0, 1, 8, 9, 64, 65, 200):
        ids = list(range(1, count + 1))
        arrays = list(padded_ids(ids))
        assert {len(array) for array in arrays} <= set(ID_BUCKETS)
        assert all(array.dtype == np.int32 for array in arrays)
        assert [i for array in arrays for i in array.tolist() if i] == ids
        assert len(arrays) == -(-count // ID_BUCKETS[-1])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_ids", ID_BUCKETS)
def test_a_large_pool_is_filled_in_place(dtype: str, num_ids: int):
    block = bytes_per_block(SPEC, block_size=16, dtype=dtype)
    make = functools.partial(
        KVPool.create, SPEC, num_blocks=2**30 // block, block_size=16, dtype=dtype
    )
    pool = jax.eval_shape(make)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    fill: Any = make_block_fill(donate=True)
    memory = fill.lower(pool, ids).compile().memory_analysis()
    assert pool.nbytes > 0.99 * 2**30
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.01 * pool.nbytes
