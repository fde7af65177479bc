import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from paged_jax.sampling import noise


def test_bits_are_those_of_jax_random():
    key = noise.base_key(seed=7, sample_index=3)
    folded = jax.random.fold_in(jax.random.key(7), 3)
    np.testing.assert_array_equal(key, jax.random.key_data(folded))

    position_key = noise.position_keys(jnp.asarray(key)[None], jnp.array([11], jnp.int32))
    folded = jax.random.fold_in(folded, 11)
    np.testing.assert_array_equal(position_key[0], jax.random.key_data(folded))

    ids = jnp.arange(1000, dtype=jnp.int32)
    with jax.threefry_partitionable(True):
        bits = np.asarray(jax.random.bits(folded, (1000,)))
    uniform = np.minimum((bits.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    drawn = noise.exponential(position_key, ids[None])[0]
    np.testing.assert_allclose(drawn, -np.log1p(-uniform), rtol=2e-5)


def test_all_64_bits_of_the_seed_count():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    keys = {tuple(noise.base_key(seed, i).tolist()) for seed in seeds for i in range(4)}
    assert len(keys) == len(seeds) * 4


def test_draws_of_some_ids_equal_those_of_all():
    keys = jnp.asarray(np.stack([noise.base_key(i, 0) for i in range(5)]))
    every = noise.exponential(keys, jnp.arange(300, dtype=jnp.int32)[None])
    some = jnp.array([[299, 0, 7, 131]] * 5, jnp.int32)
    np.testing.assert_allclose(noise.exponential(keys, some), every[:, some[0]], rtol=1e-6)


def test_draws_are_exponential_positive_and_finite():
    keys = jnp.asarray(np.stack([noise.base_key(i, 0) for i in range(4)]))
    drawn = np.asarray(noise.exponential(keys, jnp.arange(50_000, dtype=jnp.int32)[None]))
    assert np.isfinite(drawn).all()
    assert (drawn > 0).all()
    assert stats.kstest(drawn.ravel(), "expon").pvalue > 1e-3
    # The smallest decide a flat vocabulary's draw: they must not be on a coarse grid.
    smallest = np.sort(drawn.ravel())[:2000]
    assert len(np.unique(smallest)) > 1990


def test_extreme_bits_stay_inside(monkeypatch):
    for word in (0, 2**32 - 1):
        bits = jnp.full((1, 1), word, jnp.uint32)
        monkeypatch.setattr(noise, "threefry2x32", lambda *_, bits=bits: (bits, bits * 0))
        drawn = float(
            noise.exponential(jnp.zeros((1, 2), jnp.uint32), jnp.zeros((1, 1), int))[0, 0]
        )
        assert 0 < drawn < 20
