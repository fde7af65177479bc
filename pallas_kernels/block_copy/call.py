"""What is static of a call of `block_copy` and its gathers: backends decide on it."""

import dataclasses
import math
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCall:
    """Shapes and dtypes of one call; the letters are those of docs/design.md.

    Attributes:
        num_layers: layers (L).
        num_blocks: blocks a layer (P).
        block_shape: one block of one layer, `(2, K, S, D)`.
        num_pairs: blocks to move, padding included (C).
        dtype: dtype name of the pool's elements.
        has_scales: the pool's scales are moved with it.
    """

    num_layers: int
    num_blocks: int
    block_shape: tuple[int, ...]
    num_pairs: int
    dtype: str
    has_scales: bool

    @classmethod
    def of(cls, kv_blocks: Any, ids: Any, *, kv_scales: Any) -> Self:
        """Describe a call by its (checked) arguments."""
        return cls(
            num_layers=kv_blocks.shape[0],
            num_blocks=kv_blocks.shape[1],
            block_shape=tuple(kv_blocks.shape[2:]),
            num_pairs=ids.shape[0],
            dtype=str(kv_blocks.dtype),
            has_scales=kv_scales is not None,
        )

    @property
    def block_size(self) -> int:
        """Token positions a block (S)."""
        return self.block_shape[2]

    @property
    def block_elements(self) -> int:
        """Elements of one block of one layer; they are contiguous."""
        return math.prod(self.block_shape)

    @property
    def num_elements(self) -> int:
        """Elements of the pool."""
        return self.num_layers * self.num_blocks * self.block_elements
