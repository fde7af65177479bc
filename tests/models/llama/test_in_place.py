"""The compiled steps of a scanned model update a 1 GB pool in place, at every batch shape."""

import functools

import jax
import jax.numpy as jnp
import pytest

from models.llama import LlamaConfig, as_model, param_shapes
from paged_jax.batch import BatchLayout
from paged_jax.pool import KVPool, bytes_per_block
from paged_jax.row_state import create
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.step import make_step

CONFIG = LlamaConfig.tiny(num_layers=3)
NUM_ROWS, TABLE_WIDTH = 8, 16


def memory_of_step(num_rows, num_new, dtype):
    spec = CONFIG.spec
    block = bytes_per_block(spec, block_size=16, dtype=dtype)
    make = functools.partial(KVPool.create, spec, num_blocks=2**30 // block, block_size=16)
    pool = jax.eval_shape(lambda: make(dtype=dtype))
    dtype = "float32" if dtype == "int8" else dtype
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(CONFIG),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    layout = BatchLayout(
        num_rows=num_rows,
        num_new=num_new,
        table_width=TABLE_WIDTH,
        vocab_size=spec.vocab_size,
        is_decode=num_new == 1,
        flags=SamplerFlags(),
    )
    packed = jax.ShapeDtypeStruct((num_rows, layout.num_columns), jnp.int32)
    state = jax.eval_shape(lambda: create(NUM_ROWS))
    step = make_step(as_model(CONFIG, params, dtype=dtype).apply, backend=None, donate=True)
    compiled = step.lower(params, pool, state, packed, layout=layout).compile()
    return pool.nbytes, compiled.memory_analysis()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("num_rows", "num_new"), [(1, 1), (2, 1), (8, 1), (1, 16), (4, 16)])
def test_alias_is_the_pool_and_temp_is_small(num_rows, num_new, dtype):
    pool_bytes, memory = memory_of_step(num_rows, num_new, dtype)
    assert pool_bytes > 0.99 * 2**30
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes
