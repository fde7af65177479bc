"""What logits in float32 do not show."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.gemma2 import Gemma2, Gemma2Config


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 3072**0.5), ("bfloat16", 55.5)])
def test_the_factor_of_embeddings_is_rounded_to_their_type(dtype, factor):
    config = Gemma2Config(
        vocab_size=48,
        hidden_size=3072,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=128,
    )
    ones = jnp.ones((1, 1, 2), dtype)
    scaled = Gemma2(config, jnp.dtype(dtype)).scaled(ones)
    assert scaled.dtype == dtype
    np.testing.assert_array_equal(scaled, np.full((1, 1, 2), factor, np.float32))
