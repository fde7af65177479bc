"""What the parts of the Mosaic decode kernel hand to each other."""

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_common import dot
from pallas_kernels.paged_attention.mosaic_config import DecodeGeometry, MosaicDecodeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What the kernel is specialised on; letters as in docs/design.md.

    Attributes:
        geometry: sizes of a tile.
        config: ring and grid.
        dtype: of both products' operands.
        pool_dtype: of the pool: the same, or one of 8 bits.
        has_window: mask by, and start at, the window.
        has_soft_cap: bound the scores.
        interpret: run in Pallas's interpreter.
    """

    geometry: DecodeGeometry
    config: MosaicDecodeConfig
    T: int
    G: int
    N: int
    S: int
    D: int
    dtype: Any
    pool_dtype: Any
    has_window: bool
    has_soft_cap: bool
    interpret: bool

    @property
    def is_quantized(self) -> bool:
        """Whether the pool has scales."""
        return self.dtype != self.pool_dtype

    def dot(self, acc: Array, a: Any, b: Any) -> Array:
        """acc + a @ b, by the tensor core operation that the configuration names."""
        return dot(acc, a, b, mma=self.config.mma, interpret=self.interpret)


class Inputs(NamedTuple):
    """The kernel's arguments, in global memory. I items, C thread blocks, R rows of a tile."""

    q: Any  # [B, K/pack, columns, D]
    kv: Any  # [2N, K*S, D]
    tables: Any  # i32[B, M]
    kv_lens: Any  # i32[B], 0 where q_lens is
    q_lens: Any  # i32[B]
    window: Any  # i32[1]
    factors: Any  # f32[2]: of the product, and of the soft cap's tanh
    items: Any  # i32[I, 4]
    cta_ptr: Any  # i32[C+1]
    scales: Any = None  # f32[2N, K*S] of an 8-bit pool


class Partials(NamedTuple):
    """What each item leaves for the merge."""

    values: Any  # f32[I, D, columns]
    sums: Any  # f32[I, columns]
    tops: Any  # f32[I, columns]


class Scratch(NamedTuple):
    """Shared memory and barriers."""

    q: Any  # [2, columns, D]
    kv: Any  # [stages, 2, R, D]
    p: Any  # [columns, R]
    q_full: Any  # Barrier[2]
    q_free: Any
    full: Any  # Barrier[stages]
    free: Any
    scales: Any = None  # [stages, 2, R] of an 8-bit pool
    wide: Any = None  # [R, D], K or V of its tile at work in 16 bits


class Item(NamedTuple):
    """An item of the work list with what its row says; keys first..kv_len-1 are readable."""

    row: Array
    group: Array
    lo: Array
    hi: Array
    kv_len: Array
    q_len: Array
    first: Array
    window: Array
