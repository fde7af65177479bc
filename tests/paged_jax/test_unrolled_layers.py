"""A model that calls its layers in a Python loop, as most do: its step is in place too."""

import jax
import jax.numpy as jnp
import pytest

from paged_jax import KVPool, ModelSpec
from paged_jax.batch import BatchLayout
from paged_jax.row_state import create
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.step import make_step

GIGABYTE = 10**9
NUM_HEADS, HEAD_DIM, VOCAB_SIZE, WIDTH = 4, 16, 32, 64


def make_apply(num_layers, num_kv_heads):
    def apply(params, tokens, positions, cache, /, *, logits_at):
        x = params["embedding"][tokens]
        for layer in range(num_layers):
            q = x.reshape(*tokens.shape, NUM_HEADS, HEAD_DIM)
            k = (x @ params["k"]).reshape(*tokens.shape, num_kv_heads, HEAD_DIM)
            out, cache = cache.attend(layer, q, k, k)
            x = x + out.reshape(x.shape)
        x = jnp.take_along_axis(x, logits_at[..., None], axis=1)
        return x @ params["embedding"].T, cache

    return apply


@pytest.mark.parametrize("num_new", [1, 32], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "block_size"),
    [(3, 2, 16), (3, 1, 16), (3, 2, 1), (1, 1, 16)],
    ids=["grouped", "multi_query", "blocks_of_one", "one_layer"],
)
def test_a_step_on_a_gigabyte_of_pool_updates_it_in_place(
    num_layers, num_kv_heads, block_size, num_new
):
    spec = ModelSpec(
        num_layers=num_layers,
        num_heads=NUM_HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position=1024,
    )
    num_blocks = GIGABYTE // (spec.kv_values_per_token * block_size * 4)
    shape = (num_layers, num_blocks, 2, num_kv_heads, block_size, HEAD_DIM)
    pool = KVPool(jax.ShapeDtypeStruct(shape, jnp.float32))
    layout = BatchLayout(
        num_rows=8,
        num_new=num_new,
        table_width=64,
        vocab_size=VOCAB_SIZE,
        is_decode=num_new == 1,
        flags=SamplerFlags(),
    )
    shapes = {"embedding": (VOCAB_SIZE, WIDTH), "k": (WIDTH, num_kv_heads * HEAD_DIM)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    state = jax.eval_shape(lambda: create(8))
    packed = jax.ShapeDtypeStruct((layout.num_rows, layout.num_columns), jnp.int32)
    step = make_step(make_apply(num_layers, num_kv_heads), backend=None, donate=True)
    memory = step.lower(params, pool, state, packed, layout=layout).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.05 * pool.nbytes
