"""What a consumer warpgroup of the Mosaic prefill kernel does with one tile of K and V."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

MATRIX = plgpu.Layout.WGMMA  # registers of a [64, columns] operand or result of a WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # what a transposed view of shared memory can hold
ROWS = plgpu.Layout.WGMMA.reduce(1)  # registers of a vector with one entry a row of it


def by_row(vector: Array, like: Array) -> Array:
    """Repeat a vector of rows over the columns of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, (0,))


def read_generic(*refs: Any) -> list[Array]:
    """Read refs by plain loads, done before any later bulk copy into them.

    For the interpreter, whose race detector does not see what a WGMMA reads.
    """
    values = [ref[...] for ref in refs]
    plgpu.commit_smem()
    return values


def scores(q_ref: Any, k_ref: Any, *, once_issued: Callable[[], None], interpret: bool) -> Array:
    """q @ k^T, f32[64, tile_tokens]; `once_issued` runs while the tensor cores work."""
    if interpret:
        read_generic(q_ref, k_ref)

    def product(acc_ref: Any) -> Array:
        plgpu.wgmma(acc_ref, q_ref, k_ref.transpose((1, 0)))
        once_issued()
        return acc_ref[...]

    shape = (q_ref.shape[0], k_ref.shape[0])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: Any, p: Array, v_ref: Any, *, interpret: bool) -> Any:
    """acc + p @ v, f32[64, D], with p and acc in registers."""
    if interpret:  # it knows neither operands in registers nor accumulators that start from some
        (v,) = read_generic(v_ref)
        return acc + jnp.dot(p, v, preferred_element_type=jnp.float32)

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, p, v_ref)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def cap_scores(s: Array, *, factor: Array, cap: Array) -> Array:
    """cap * tanh(x), where the score times `factor` is 2x in base 2.

    By the exponential: the device's own tanh has 11 bits, which a cap of 50 makes 0.02.
    """
    return cap - 2 * cap / (1 + jnp.exp2(s * factor))


def mask_scores(s: Array, *, tile_start: Array, positions: Array, window: Array | None) -> Array:
    """-inf where the query at `positions[row]` does not see the key."""
    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
    distance = by_row(positions - tile_start, s) - column
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return jnp.where(seen, s, -jnp.inf)


def zero_unread(v_ref: Any, *, tile_start: Array, start: Array, stop: Array) -> None:
    """Zero V outside start..stop-1: it may hold NaN there, and 0 * NaN is NaN."""
    for first_column in range(0, v_ref.shape[1], 64):
        part = v_ref.at[:, pl.ds(first_column, 64)].transpose((1, 0))  # [64, tokens]
        v = plgpu.load(part, layout=TRANSPOSED)
        position = tile_start + plgpu.broadcasted_iota(jnp.int32, v.shape, 1, layout=TRANSPOSED)
        may_read = (position >= start) & (position < stop)
        part[...] = jnp.where(may_read, v, jnp.zeros((), v.dtype))
    plgpu.commit_smem()
