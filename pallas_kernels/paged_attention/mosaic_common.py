"""What the Mosaic GPU kernels share: layouts, and differences between JAX versions."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

# A [rows, columns] value as the tensor core returns it, and vectors of one value a column or row.
MATRIX = plgpu.Layout.WGMMA
MATRIX_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
ROWS = plgpu.Layout.WGMMA.reduce(1)
# Stands in for -inf, so that differences of two of them are 0 and not NaN.
LOWEST = -1e30


def kernel_options(*, interpret: bool) -> dict[str, Any]:
    """Keyword arguments that every `plgpu.kernel` here gets."""
    options: dict[str, Any] = {"compiler_params": plgpu.CompilerParams(approx_math=True)}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    return options


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles of 8 x 64 elements that copies and the tensor core agree on.

    The last axis is a multiple of 64.
    """
    # Both classes are complete at run time; their stubs look abstract to pyright.
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore
    swizzle = plgpu.SwizzleTransform(64 * jnp.dtype(dtype).itemsize)  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def load(ref: Any, layout: Any) -> Array:
    """Read a whole ref into registers of a layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: Array) -> None:
    """Write a whole ref, also where its rows are shorter than a cache line."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11 has no plgpu.store, and its plain assignment takes any shape
        ref[...] = value


def store_transposed(ref: Any, value: Array) -> None:
    """Write a [m, n] matrix of registers to a ref [n, m] in shared memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(value, MATRIX_TRANSPOSED)


def filled(shape: tuple[int, ...], value: float, layout: Any = MATRIX) -> Array:
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_column(vector: Array, like: Array) -> Array:
    """Repeat a vector of columns over the rows of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, (1,))


def by_row(vector: Array, like: Array) -> Array:
    """Repeat a vector of rows over the columns of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, (0,))


def row_and_column(shape: tuple[int, int]) -> tuple[Array, Array]:
    """Row and column number of each element of a matrix in registers."""
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX),
        plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX),
    )


def divided(x: Array, by: int) -> Array:
    """x // by for a matrix of small numbers."""
    if by & (by - 1) == 0:
        return lax.div(x, by)
    # Of other divisors LLVM makes 16-bit products that its NVPTX backend cannot select: it aborts.
    return ((x.astype(jnp.float32) + 0.5) * (1 / by)).astype(jnp.int32)


def dot(acc: Array, a: Any, b: Any, *, mma: bool, interpret: bool) -> Array:
    """acc + a @ b of two refs in shared memory, which may be transposed views."""
    if mma and interpret:  # the interpreter knows no mma
        product = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        return acc + product
    if mma:
        dtype = a.dtype
        left = load(a, plgpu.Layout.MMA_LHS(dtype))
        right = load(b, plgpu.Layout.MMA_RHS(dtype))
        acc = plgpu.layout_cast(acc, plgpu.Layout.MMA_ACC(dtype))
        return plgpu.layout_cast(plgpu.mma(acc, left, right), MATRIX)

    def product_of(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    # A fresh accumulator and an add: one that starts from registers has no interpreter.
    return acc + pl.run_scoped(product_of, plgpu.ACC((acc.shape[0], acc.shape[1]), jnp.float32))
