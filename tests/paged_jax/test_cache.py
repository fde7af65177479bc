"""Paged and dense caches give a layer the same attention, whatever the options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from paged_jax.cache import DenseKVCache, PagedKVCache
from paged_jax.config import ModelSpec
from paged_jax.pool import KVPool
from pallas_kernels.devices import H100

SPEC = ModelSpec(
    num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=10, max_position=64
)
BLOCK_SIZE, CAPACITY = 4, 24


def random_qkv(rng, batch_size, num_new):
    shapes = [(batch_size, num_new, heads, 8) for heads in (6, 2, 2)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def decay(score, row, head, q_pos, k_pos):
    return score - 0.1 * (1 + head) * (q_pos - k_pos)


each_option = pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"window": 3},
        {"soft_cap": 2.0},
        {"sinks": np.linspace(-1, 1, 6, dtype=np.float32)},
        {"score_fn": decay},
    ],
    ids=lambda options: next(iter(options), "plain"),
)


@each_option
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_equals_dense_over_three_steps(options, backend):
    rng = np.random.default_rng(0)
    batch_size, width = 3, CAPACITY // BLOCK_SIZE
    # NaN everywhere: only what was written may count.
    pool = KVPool.create(
        SPEC, num_blocks=batch_size * width + 1, block_size=BLOCK_SIZE, fill=np.nan
    )
    tables = (rng.permutation(batch_size * width) + 1).astype(np.int32).reshape(batch_size, width)
    dense = DenseKVCache.create(SPEC, batch_size=batch_size, capacity=CAPACITY, fill=np.nan)
    starts = np.zeros(batch_size, np.int32)
    for q_lens in ([5, 0, 3], [1, 4, 5], [1, 1, 0]):
        q_lens = np.array(q_lens, np.int32)
        paged = PagedKVCache.from_tables(pool, tables, starts, q_lens, num_new=5, backend=backend)
        dense = dense.at(starts, q_lens)
        for layer in range(SPEC.num_layers):
            q, k, v = random_qkv(rng, batch_size, 5)
            paged_out, paged = paged.attend(layer, q, k, v, **options)
            dense_out, dense = dense.attend(layer, q, k, v, **options)
            np.testing.assert_allclose(paged_out, dense_out, atol=2e-6)
            padding = np.arange(5) >= q_lens[:, None]
            assert (np.asarray(paged_out)[padding] == 0).all()
            assert (np.asarray(dense_out)[padding] == 0).all()
        pool, starts = paged.pool, starts + q_lens


@each_option
def test_dense_attention_is_the_same_in_slices(options, monkeypatch):
    """Rows end inside a slice, between two, and in the last one, which overlaps its neighbour."""
    rng = np.random.default_rng(0)
    starts, q_lens = np.array([4, 0, 19, 8], np.int32), np.array([3, 0, 5, 2], np.int32)
    q, k, v = random_qkv(rng, 4, 5)
    kv = rng.normal(size=(2, 4, 2, 2, CAPACITY, 8)).astype(np.float32)
    for row, start in enumerate(starts):
        kv[:, row, :, :, start:] = np.nan
    outs = []
    for width in (CAPACITY, 5, 1):
        monkeypatch.setattr("paged_jax.dense_attention.DENSE_SLICE", width)
        cache = DenseKVCache(jnp.asarray(kv), jnp.asarray(starts), jnp.asarray(q_lens))
        outs.append(cache.attend(1, q, k, v, **options)[0])
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-6)
    np.testing.assert_allclose(outs[2], outs[0], atol=2e-6)


def test_slots_follow_the_table_and_padding_goes_to_the_null_block():
    pool = KVPool.create(SPEC, num_blocks=8, block_size=4)
    tables = jnp.array([[7, 2, 0], [5, 0, 0]], jnp.int32)
    cache = PagedKVCache.from_tables(pool, tables, jnp.array([3, 0]), jnp.array([3, 0]), num_new=4)
    np.testing.assert_array_equal(cache.slot_mapping[0], [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 0])
    np.testing.assert_array_equal(cache.slot_mapping[1], [0, 0, 0, 0])
    np.testing.assert_array_equal(cache.kv_lens, [6, 0])


def test_dense_padding_never_wraps_to_the_last_position():
    cache = DenseKVCache.create(SPEC, batch_size=1, capacity=4)
    cache = cache.at(jnp.array([0]), jnp.array([1]))
    q, k, v = (jnp.ones((1, 3, heads, 8)) for heads in (6, 2, 2))
    _, cache = cache.attend(0, q, k, v)
    written = np.asarray(cache.kv[0, 0, 0, 0, :, 0])
    np.testing.assert_array_equal(written, [1, 0, 0, 0])


def test_caches_are_pytrees_that_jit_takes():
    pool = KVPool.create(SPEC, num_blocks=3, block_size=4)
    cache = PagedKVCache.from_tables(
        pool, jnp.ones((1, 2), jnp.int32), jnp.array([0]), jnp.array([1]), num_new=1
    )
    same = jax.jit(lambda tree: tree)(cache)
    assert isinstance(same, PagedKVCache)
    assert same.backend == cache.backend


def test_layers_of_a_gpu_step_share_one_plan():
    """Planned before the scan over layers, not in it: no sort in the loop's body."""
    spec = ModelSpec(
        num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=10, max_position=64
    )
    shape = jax.ShapeDtypeStruct
    pool = jax.eval_shape(
        lambda: KVPool.create(spec, num_blocks=9, block_size=16, dtype=jnp.bfloat16)
    )
    x = shape((4, 1, 8, 64), jnp.bfloat16)
    lens, tables = shape((4,), jnp.int32), shape((4, 4), jnp.int32)

    def step(pool, x, tables, starts, q_lens, *, num_heads):
        cache = PagedKVCache.from_tables(
            pool, tables, starts, q_lens, num_new=1, num_heads=num_heads
        )

        def layer(carry, index):
            cache, x = carry
            x, cache = cache.attend(index, x, x[:, :, :2], x[:, :, :2])
            return (cache, x), None

        (cache, x), _ = jax.lax.scan(layer, (cache, x), jnp.arange(3, dtype=jnp.int32))
        return cache.pool, x

    device = AbstractDevice(device_kind=H100.kind, num_cores=H100.num_sms, platform="cuda")
    bodies = []
    for num_heads in (8, None):
        with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            traced = jax.jit(functools.partial(step, num_heads=num_heads)).trace(
                pool, x, tables, lens, lens
            )
        (scan,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
        bodies.append(str(scan.params["jaxpr"]))
    planned, unplanned = bodies
    assert "sort" not in planned
    assert "sort" in unplanned
