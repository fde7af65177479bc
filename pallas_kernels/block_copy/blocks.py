"""A pool, or a buffer of its blocks, with scales beside 8-bit elements."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Shaped


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Blocks:
    """What whole blocks are moved from or to.

    All three ops are one operation on every backend, `target[:, dst[i]] = source[:, src[i]]`:
    `block_copy` moves within the pool (the backend gets no source), `block_gather` out of it into
    a new buffer (no target), `block_scatter` from a buffer into it. Where there is a target,
    nothing depends on its block 0 (the null block), so padding need not be written.
    """

    kv: Shaped[Array, "L P 2 K S D"]
    scales: Float[Array, "L P 2 K S"] | None
