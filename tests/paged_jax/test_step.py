"""The jitted step: in place, and nothing but its own rows' slots changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import hash_model
from suites.engine_runs import drive, greedy, make_engine, random_prompts

from models.llama import LlamaConfig, as_model, param_shapes
from paged_jax import KVPool, Model
from paged_jax.batch import BatchLayout
from paged_jax.row_state import create
from paged_jax.sampling.inputs import SamplerFlags
from paged_jax.step import make_block_copy, make_step

GIGABYTE = 10**9


def llama_shapes(num_layers: int) -> Model:
    """A llama without weights: shapes are enough to compile."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=2048,
    )
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        param_shapes(config),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    return as_model(config, shapes)


def pool_shapes(model: Model, nbytes: int, *, block_size: int = 16) -> KVPool:
    """A pool of about so many bytes, without its memory."""
    spec = model.spec
    num_blocks = nbytes // (spec.kv_values_per_token * block_size * 4)
    shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
    return KVPool(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(
    ("name", "kind"), [("hash", "decode"), ("llama", "decode"), ("llama", "prefill")]
)
def test_b86_a_step_on_a_gigabyte_of_pool_updates_it_in_place(name, kind):
    model = hash_model.make_model() if name == "hash" else llama_shapes(num_layers=4)
    pool = pool_shapes(model, GIGABYTE)
    assert 0.99 * GIGABYTE < pool.nbytes <= GIGABYTE
    is_decode = kind == "decode"
    layout = BatchLayout(
        num_rows=32 if is_decode else 16,
        num_new=1 if is_decode else 32,
        table_width=64,
        vocab_size=model.spec.vocab_size,
        is_decode=is_decode,
        flags=SamplerFlags(),
    )
    step = make_step(model.apply, backend=None, donate=True)
    state = jax.eval_shape(lambda: create(32))
    packed = jax.ShapeDtypeStruct((layout.num_rows, layout.num_columns), jnp.int32)
    lowered = step.lower(model.params, pool, state, packed, layout=layout)
    memory = lowered.compile().memory_analysis()
    print(f"{name} {kind}: alias {memory.alias_size_in_bytes}, temp {memory.temp_size_in_bytes}")
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.05 * pool.nbytes


def test_block_copies_on_a_gigabyte_of_pool_are_in_place():
    pool = pool_shapes(hash_model.make_model(), GIGABYTE)
    copy = make_block_copy(donate=True)
    pairs = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    memory = copy.lower(pool, pairs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < 0.05 * pool.nbytes


def test_b86_the_pool_stays_where_it_is_over_many_steps():
    engine = make_engine()
    before = engine.executor.pool.blocks
    pointer = before.unsafe_buffer_pointer()
    seen = set()
    engine.add_requests(random_prompts(0, [20, 3, 30, 9]), greedy(16))
    drive(
        engine,
        before_step=lambda _: seen.add(engine.executor.pool.blocks.unsafe_buffer_pointer()),
    )
    assert seen == {pointer}
    assert before.is_deleted()


def test_without_donation_the_old_pool_stays_usable():
    engine = make_engine(donate=False, max_num_seqs=1, max_num_batched_tokens=8)
    prompts = random_prompts(0, [20, 3])
    before, contents = engine.executor.pool.blocks, np.array(engine.executor.pool.blocks)
    outputs = engine.generate(prompts, greedy(16))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == hash_model.expected_greedy(prompt, 16)
    assert not before.is_deleted()
    np.testing.assert_array_equal(before, contents)


def test_a_step_writes_the_slots_of_its_own_rows_only():
    """Padding rows and padded positions change no slot outside the null block."""
    engine = make_engine()
    rng = np.random.default_rng(0)
    shape = engine.executor.pool.blocks.shape
    engine.executor.pool = KVPool(jnp.asarray(rng.normal(size=shape).astype(np.float32)))
    engine.add_requests(random_prompts(1, [11, 5, 2]), greedy(6))
    for _ in range(4):
        before = np.array(engine.executor.pool.blocks)
        lens = {s.seq_id: s.num_computed for s in engine.scheduler.running}
        engine.step()
        written = np.zeros((shape[1], shape[4]), bool)
        for sequence in engine.scheduler.running:
            table = engine.block_manager.table_array(sequence.seq_id)
            for position in range(lens.get(sequence.seq_id, 0), sequence.num_computed):
                written[table[position // 4], position % 4] = True
        assert written.any()
        changed = (np.array(engine.executor.pool.blocks) != before).any(axis=(0, 2, 3, 5))
        assert not (changed & ~written)[1:].any()  # the null block may change
    while engine.has_unfinished:
        engine.step()
