import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.xla import _write_loop, _write_scatter


def expected(pool, k, v, slots, q_lens):
    pool = pool.copy()
    S = pool.shape[3]
    for b, t in np.ndindex(slots.shape):
        if t < q_lens[b]:
            block, offset = slots[b, t] // S, slots[b, t] % S
            pool[block, 0, :, offset], pool[block, 1, :, offset] = k[b, t], v[b, t]
    return pool


def arrays(*, S=4, B=3, T=5, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    N, K, D = 3 + B * T // S + 1, 2, 8
    pool = rng.normal(size=(N, 2, K, S, D)).astype(dtype)
    k, v = rng.normal(size=(2, B, T, K, D)).astype(np.float32)
    slots = (rng.permutation((N - 1) * S)[: B * T] + S).reshape(B, T).astype(np.int32)
    q_lens = np.int32([T, 0, T - 2])
    slots = np.where(np.arange(T) < q_lens[:, None], slots, rng.choice([-1, 2**30, 7], (B, T)))
    return pool, k, v, slots.astype(np.int32), q_lens


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("S", [1, 3, 16])
def test_writes_new_tokens_and_nothing_else(backend, S, dtype):
    args = arrays(S=S, dtype=dtype)
    out = np.asarray(kv_write(*args, backend=backend))
    assert out.dtype == dtype
    want = expected(*args)
    np.testing.assert_array_equal(out[1:], want[1:])
    np.testing.assert_array_equal(out[0, :, :, 1:], want[0, :, :, 1:])


def test_the_two_forms_of_xla_agree():
    pool, k, v, slots, _ = arrays()
    kv = jnp.stack([k, v], 2).reshape(-1, 2, *k.shape[2:])
    slots = jnp.asarray(np.arange(slots.size, dtype=np.int32) + 4)
    np.testing.assert_array_equal(
        _write_loop(pool, kv, slots), _write_scatter(jnp.asarray(pool), kv, slots)
    )


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_slots_outside_the_pool_are_padding_inside_jit(backend):
    pool, k, v, _, _ = arrays()
    slots = np.full((3, 5), -1, np.int32)
    slots[1] = pool.shape[0] * pool.shape[3]
    write = jax.jit(kv_write, static_argnames="backend")
    out = np.asarray(write(pool, k, v, slots, np.int32([5, 5, 5]), backend=backend))
    np.testing.assert_array_equal(out[1:], pool[1:])


@pytest.mark.parametrize("write_shape", [(32, 1), (16, 32)])
def test_in_place_when_donated(write_shape):
    shape = jax.ShapeDtypeStruct
    B, T = write_shape
    L, P, K, S, D = 30, 1400, 3, 16, 64

    def layers(pool, k, slots, q_lens):
        def layer(pool, index):
            return kv_write(pool, k, k, slots + index * (P * S), q_lens, backend="xla"), None

        return jax.lax.scan(layer, pool, jnp.arange(L, dtype=jnp.int32))[0]

    memory = (
        jax.jit(layers, donate_argnums=0)
        .lower(
            shape((L * P, 2, K, S, D), jnp.float32),
            shape((B, T, K, D), jnp.float32),
            shape((B, T), jnp.int32),
            shape((B,), jnp.int32),
        )
        .compile()
        .memory_analysis()
    )
    pool_bytes = L * P * 2 * K * S * D * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 0.005 * pool_bytes


def test_refusals():
    pool, k, v, slots, q_lens = arrays()
    with pytest.raises(ValueError, match=r"k has shape .*; must be \[B, T, 2, 8\]"):
        kv_write(pool, k[..., :4], v, slots, q_lens)
    with pytest.raises(ValueError, match="v has shape"):
        kv_write(pool, k, v[:, :4], slots, q_lens)
    with pytest.raises(ValueError, match="v has dtype int32"):
        kv_write(pool, k, v.astype(np.int32), slots, q_lens)
    with pytest.raises(ValueError, match="slot_mapping has dtype int64"):
        kv_write(pool, k, v, slots.astype(np.int64), q_lens)
    with pytest.raises(ValueError, match=r"q_lens has values 0\.\.6; must be within 0\.\.T=5"):
        kv_write(pool, k, v, slots, np.int32([6, 0, 1]))
    with pytest.raises(ValueError, match=r"slot_mapping has values -1\.\..*; must be within 0"):
        kv_write(pool, k, v, np.full_like(slots, -1), q_lens)
    with pytest.raises(ValueError, match="slot_mapping names slot 9 8 times; must be once"):
        kv_write(pool, k, v, np.full_like(slots, 9), q_lens)
