"""What is static of a call of `kv_write`: backends decide on it."""

import dataclasses
from typing import Any, Self

from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteCall:
    """Shapes and dtypes of one call; the letters are those of docs/design.md.

    Attributes:
        num_rows: rows (B).
        num_new: padded new tokens a row (T).
        num_kv_heads: key/value heads (K).
        head_dim: channels a head in the pool (D).
        new_head_dim: channels a head of the new keys and values, at most D.
        block_size: token positions a block (S).
        num_blocks: blocks of the pool (N).
        new_dtype: dtype name of the new keys and values.
        kv_dtype: dtype name of the pool's elements.
    """

    num_rows: int
    num_new: int
    num_kv_heads: int
    head_dim: int
    new_head_dim: int
    block_size: int
    num_blocks: int
    new_dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, kv_blocks: Any, k: Any) -> Self:
        """Describe a call by its (checked) arguments."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_blocks.shape
        return cls(
            num_rows=k.shape[0],
            num_new=k.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            new_head_dim=k.shape[3],
            block_size=block_size,
            num_blocks=num_blocks,
            new_dtype=str(k.dtype),
            kv_dtype=str(kv_blocks.dtype),
        )

    @property
    def is_quantized(self) -> bool:
        """Whether the pool holds 8-bit elements with scales."""
        return self.kv_dtype in QUANTIZED_DTYPES

    @property
    def num_elements(self) -> int:
        """Elements of the pool."""
        return self.num_blocks * 2 * self.num_kv_heads * self.block_size * self.head_dim
