"""Random weights; those of GGUF files are tested in test_loading.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.llama import LlamaConfig, param_shapes, random_params


@pytest.mark.parametrize("tie", [True, False])
def test_random_params_have_the_stated_shapes(tie):
    config = LlamaConfig.tiny(tie_embeddings=tie)
    params = random_params(config, 0, dtype=jnp.bfloat16)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == param_shapes(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_random_params_follow_the_seed():
    config = LlamaConfig.tiny()
    first, again, other = (random_params(config, seed)["embedding"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_smollm2_has_135_million_weights():
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    shapes = jax.tree.leaves(param_shapes(LlamaConfig.smollm2_135m()), is_leaf=is_shape)
    assert sum(int(np.prod(shape)) for shape in shapes) == 134_515_008
