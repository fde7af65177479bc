import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig, ModelSpec
from paged_jax.pool import KVPool, bytes_per_block, free_device_bytes, resolve_num_blocks

SPEC = ModelSpec(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10, max_position=64
)


def test_shape_and_bytes():
    pool = KVPool.create(SPEC, num_blocks=5, block_size=4, dtype=jnp.bfloat16)
    assert pool.blocks.shape == (3, 5, 2, 2, 4, 8)
    assert (pool.num_layers, pool.num_blocks, pool.block_size) == (3, 5, 4)
    assert pool.nbytes == 3 * 5 * 2 * 2 * 4 * 8 * 2
    assert pool.block_nbytes == bytes_per_block(SPEC, block_size=4, dtype="bfloat16")


def test_fill():
    pool = KVPool.create(SPEC, num_blocks=2, block_size=1, fill=np.nan)
    assert np.isnan(np.asarray(pool.blocks)).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_blocks": 1, "block_size": 4}, "num_blocks=1 must be >= 2"),
        ({"num_blocks": 2, "block_size": 0}, "block_size=0 must be >= 1"),
        # 2**31 rows exactly: refused before anything is allocated.
        ({"num_blocks": 2**20, "block_size": 2**10}, "must be under 2"),
    ],
)
def test_refusals(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KVPool.create(SPEC, **kwargs)


def test_sizes_by_count_bytes_share_and_default():
    block = bytes_per_block(SPEC, block_size=16, dtype="float32")
    assert resolve_num_blocks(EngineConfig(num_blocks=7), SPEC) == 7
    assert resolve_num_blocks(EngineConfig(pool_bytes=10 * block + 1), SPEC) == 10
    # 2 sequences of the model's 64 positions in blocks of 16, and the null block.
    assert resolve_num_blocks(EngineConfig(max_num_seqs=2), SPEC) == 9
    share = resolve_num_blocks(EngineConfig(memory_fraction=0.1), SPEC)
    assert 0.02 < share * block / free_device_bytes() < 0.2


def test_too_few_bytes_names_the_block_size():
    block = bytes_per_block(SPEC, block_size=16, dtype="float32")
    with pytest.raises(ValueError, match=f"pool_bytes={block} must hold two blocks of {block}"):
        resolve_num_blocks(EngineConfig(pool_bytes=block), SPEC)


def test_more_than_the_device_has_free_is_refused_before_anything_is_made():
    spec = ModelSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2**14, vocab_size=10, max_position=64
    )
    with pytest.raises(ValueError, match=r"num_blocks=60000000 asks for .* that are free"):
        resolve_num_blocks(EngineConfig(num_blocks=60_000_000, block_size=1), spec)
    with pytest.raises(ValueError, match="must be under 2"):
        resolve_num_blocks(EngineConfig(num_blocks=10**9), SPEC)
