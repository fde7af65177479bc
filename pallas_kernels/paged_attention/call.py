"""What is static of a call of `paged_attention`: backends and heuristics decide on it."""

import dataclasses
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Shapes and dtypes of one call; the letters are those of docs/design.md.

    Attributes:
        num_rows: rows (B).
        num_new: padded new tokens a row (T).
        num_heads: query heads (H).
        num_kv_heads: key/value heads (K).
        head_dim: channels a head in the pool (D).
        block_size: token positions a block (S).
        table_width: blocks a row may have (M).
        num_blocks: blocks of the pool (N).
        q_dtype: dtype name of the queries and of the output.
        kv_dtype: dtype name of the pool's elements.
        has_window: a sliding window is given, traced or not.
        has_score_fn: a score function is given.
    """

    num_rows: int
    num_new: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    table_width: int
    num_blocks: int
    q_dtype: str
    kv_dtype: str
    has_window: bool = False
    has_score_fn: bool = False

    @classmethod
    def of(
        cls, q: Any, kv_blocks: Any, block_tables: Any, *, window: Any = None, score_fn: Any = None
    ) -> Self:
        """Describe a call by its (checked) arguments."""
        num_blocks, _, num_kv_heads, block_size, head_dim = kv_blocks.shape
        return cls(
            num_rows=q.shape[0],
            num_new=q.shape[1],
            num_heads=q.shape[2],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_width=block_tables.shape[1],
            num_blocks=num_blocks,
            q_dtype=str(q.dtype),
            kv_dtype=str(kv_blocks.dtype),
            has_window=window is not None,
            has_score_fn=score_fn is not None,
        )

    @property
    def group(self) -> int:
        """Query heads a key/value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantized(self) -> bool:
        """Whether the pool holds 8-bit elements with scales."""
        return self.kv_dtype in QUANTIZED_DTYPES

    @property
    def num_elements(self) -> int:
        """Elements of the pool; from 2**31 on, offsets need 64 bits."""
        return self.num_blocks * 2 * self.num_kv_heads * self.block_size * self.head_dim


QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
