import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import row_state
from paged_jax.sampling.noise import base_key


def ints(*values):
    return jnp.array(values, jnp.int32)


def test_create_has_a_dummy_entry():
    state = row_state.create(3)
    assert state.num_rows == 3
    assert state.last_token.shape == state.output_len.shape == (4,)
    assert state.base_key.shape == (4, 2)
    assert state.base_key.dtype == jnp.uint32
    assert state.prompt_seen is None
    assert state.output_counts is None
    with pytest.raises(ValueError, match=r"num_rows=0 must be positive"):
        row_state.create(0)


def test_start_and_record_touch_only_their_entries():
    keys = jnp.asarray(np.stack([base_key(1, 0), base_key(2, 1), base_key(3, 0)]))
    state = row_state.create(3)
    # Padding names R; -1 and beyond R must not wrap or clamp onto a sequence either.
    state = row_state.start_rows(state, ints(1, 3, -1), ints(7, 8, 9), ints(4, 5, 6), keys)
    assert state.last_token[:3].tolist() == [0, 7, 0]
    assert state.output_len[:3].tolist() == [0, 4, 0]
    assert state.base_key[1].tolist() == keys[0].tolist()
    assert not state.base_key[jnp.array([0, 2])].any()
    state = row_state.record(state, ints(0, 1, 3, -1, 99), ints(5, 6, 7, 8, 9))
    assert state.last_token[:3].tolist() == [5, 6, 0]
    assert state.output_len[:3].tolist() == [1, 5, 0]


def test_a_run_of_tokens_is_recorded_up_to_its_count():
    state = row_state.with_penalties(row_state.create(2), 9)
    state = row_state.record(state, ints(0, 1), ints(3, 3))
    counts = state.output_counts
    tokens = jnp.array([[5, 6, 7], [4, 8, 8], [2, 2, 2]], jnp.int32)
    state = row_state.record_run(state, ints(1, 0, 2), tokens, ints(2, 1, 3))
    assert state.last_token[:2].tolist() == [4, 6]
    assert state.output_len[:2].tolist() == [2, 3]
    assert state.output_counts is counts


def test_counts_come_and_go():
    state = row_state.with_penalties(row_state.create(2), 6)
    assert state.prompt_seen.shape == state.output_counts.shape == (3, 6)
    state = row_state.record(state, ints(1, 2), ints(4, 4))
    state = row_state.record(state, ints(1, 0), ints(4, 2))
    assert state.output_counts[:2].tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 2, 0]]
    assert row_state.without_penalties(state).output_counts is None


def test_load_counts_replaces_a_row_and_counts_no_padding():
    state = row_state.with_penalties(row_state.create(2), 6)
    state = row_state.record(state, ints(0, 1), ints(1, 1))
    load = jax.jit(row_state.load_counts)
    for padding in (0, -1, 5, 77):
        tokens = ints(3, 3, 5, 2, 2, padding, padding)
        loaded = load(state, jnp.int32(1), tokens, jnp.int32(3), jnp.int32(5))
        assert loaded.prompt_seen.tolist()[1] == [False, False, False, True, False, True]
        assert loaded.output_counts.tolist()[1] == [0, 0, 2, 0, 0, 0]
        assert loaded.output_counts.tolist()[0] == [0, 1, 0, 0, 0, 0]
        assert not loaded.prompt_seen[0].any()
    assert load._cache_size() == 1
    with pytest.raises(ValueError, match=r"state.output_counts=None must be present"):
        row_state.load_counts(
            row_state.create(2), jnp.int32(0), ints(1), jnp.int32(1), jnp.int32(1)
        )


def test_a_donated_state_is_updated_in_place():
    state = row_state.with_penalties(row_state.create(64), 1024)
    record = jax.jit(row_state.record, donate_argnums=0)
    memory = record.lower(state, ints(0, 1), ints(3, 4)).compile().memory_analysis()
    num_bytes = sum(field.nbytes for field in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 10
