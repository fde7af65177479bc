"""Moves of whole blocks, obviously right: one after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.block_copy.blocks import Blocks


def move_blocks_reference(
    source: Blocks | None, target: Blocks | None, src: Int[Array, "C"], dst: Int[Array, "C"]
) -> Blocks:
    """The semantics of `block_copy`, `block_gather` and `block_scatter` (see `Blocks`)."""
    if target is None:
        target = jax.tree.map(
            lambda x: jnp.zeros((x.shape[0], src.shape[0], *x.shape[2:]), x.dtype), source
        )
    assert target is not None

    def move(i, target):
        return jax.tree.map(
            lambda from_, to: to.at[:, dst[i]].set(from_[:, src[i]]),
            target if source is None else source,
            target,
        )

    return jax.lax.fori_loop(0, src.shape[0], move, target)
