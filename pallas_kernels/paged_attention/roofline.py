"""Bytes and operations that a call cannot do without, and the least time they take on a device.

What is counted is the traffic of device memory when every byte is moved once: what a cache serves
again costs nothing, launches, latencies and softmax cost nothing. A kernel cannot be faster; how
much slower it is, only a device can tell. The roofline model is that of Williams, Waterman and
Patterson, doi:10.1145/1498765.1498785.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels.devices import Device
from pallas_kernels.paged_attention.call import AttentionCall

SCALE_BYTES = 4  # an 8-bit pool's scales, and sums and maxima of partial results, are float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call moves and computes.

    Attributes:
        kv_bytes: keys and values that the result depends on, or that are written; with scales.
        kv_block_bytes: the same in whole blocks, as kernels move them.
        io_bytes: queries, outputs, new keys and values, tables and lengths.
        partial_bytes: partial results of split contexts, written and read again.
        operations: multiplications and additions of the two matrix products.
    """

    kv_bytes: int
    kv_block_bytes: int
    io_bytes: int
    partial_bytes: int = 0
    operations: int = 0

    @property
    def least_bytes(self) -> int:
        """Bytes that no kernel can avoid: no partial results, no slots beyond the context."""
        return self.kv_bytes + self.io_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of a kernel that reads whole blocks and splits contexts."""
        return self.kv_block_bytes + self.io_bytes + self.partial_bytes

    def floor_seconds(self, device: Device) -> float:
        """The least time on a device: of `least_bytes`, or of the operations if that is more."""
        by_memory = self.least_bytes / device.memory_bandwidth
        return max(by_memory, self.operations / device.matmul_rate)


def attention_cost(
    call: AttentionCall,
    kv_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    window: int | None = None,
    num_parts: int = 0,
) -> Cost:
    """The cost of `paged_attention`, decode or prefill.

    A row reads the positions that any of its queries sees, once for all of them and for all
    heads of a group; a query and a key cost `4 * D` operations a head.

    Args:
        call: shapes and dtypes.
        kv_lens: positions of context of each row, B of them.
        q_lens: new tokens of each row; by default T, or the whole context where that is less.
        window: keys a query sees, or None for all.
        num_parts: partial results of one query and head (a split of a context), over all rows.

    Raises:
        ValueError: lengths that are not B of them, or not `0 <= q_len <= kv_len`.

    >>> call = AttentionCall(num_rows=1, num_new=1, num_heads=32, num_kv_heads=8, head_dim=128,
    ...     block_size=16, table_width=128, num_blocks=129, q_dtype="bfloat16",
    ...     kv_dtype="bfloat16")
    >>> attention_cost(call, [2000]).kv_bytes
    8192000
    """
    new = [min(call.num_new, n) for n in kv_lens] if q_lens is None else list(q_lens)
    for name, lens in (("kv_lens", kv_lens), ("q_lens", new)):
        if len(lens) != call.num_rows:
            raise ValueError(f"{name} has {len(lens)} rows; must be {call.num_rows}")
    tokens = blocks = pairs = entries = 0
    for kv_len, q_len in zip(kv_lens, new, strict=True):
        if not 0 <= q_len <= kv_len:
            raise ValueError(f"q_len is {q_len}; must be within 0..kv_len={kv_len}")
        if q_len == 0:
            continue
        first = 0 if window is None else max(0, kv_len - q_len + 1 - window)
        tokens += kv_len - first
        row_blocks = -(-kv_len // call.block_size) - first // call.block_size
        blocks, entries = blocks + row_blocks, entries + row_blocks
        pairs += _pairs(kv_len, q_len, window)
    query_bytes = sum(new) * call.num_heads * call.head_dim * jnp.dtype(call.q_dtype).itemsize
    part_bytes = (call.head_dim + 2) * SCALE_BYTES  # the sum of values, the maximum, the weight
    return Cost(
        kv_bytes=tokens * kv_bytes_per_token(call),
        kv_block_bytes=blocks * call.block_size * kv_bytes_per_token(call),
        io_bytes=2 * query_bytes + 4 * (entries + 2 * call.num_rows),
        partial_bytes=2 * num_parts * part_bytes,
        operations=4 * pairs * call.num_heads * call.head_dim,
    )


def kv_write_cost(call: AttentionCall, num_tokens: int, *, new_dtype: str | None = None) -> Cost:
    """The cost of `kv_write`: new keys and values are read, and written to their slots.

    Args:
        call: the attention call that follows, for its pool.
        num_tokens: new tokens of all rows, without padding.
        new_dtype: dtype of the new keys and values; that of the queries by default.
    """
    values = 2 * call.num_kv_heads * call.head_dim * num_tokens
    written = num_tokens * kv_bytes_per_token(call)
    return Cost(
        kv_bytes=written,
        kv_block_bytes=written,  # slots, not blocks, are written
        io_bytes=values * jnp.dtype(new_dtype or call.q_dtype).itemsize + 4 * num_tokens,
    )


def block_copy_cost(call: AttentionCall, num_pairs: int, *, num_layers: int) -> Cost:
    """The cost of `block_copy`: each pair's block is read and written in every layer.

    Args:
        call: an attention call over the pool, for the size of a block.
        num_pairs: pairs, without padding.
        num_layers: layers of the pool (L).
    """
    block = call.block_size * kv_bytes_per_token(call)
    moved = 2 * num_pairs * num_layers * block
    return Cost(kv_bytes=moved, kv_block_bytes=moved, io_bytes=8 * num_pairs)


def kv_bytes_per_token(call: AttentionCall) -> int:
    """Bytes of one position's keys and values in one layer, scales of 8-bit pools included."""
    head = call.head_dim * jnp.dtype(call.kv_dtype).itemsize
    if call.is_quantized:
        head += SCALE_BYTES
    return 2 * call.num_kv_heads * head


def _pairs(kv_len: int, q_len: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    first, last = kv_len - q_len + 1, kv_len  # keys that the first and the last query see
    if window is None or last <= window:
        return (first + last) * q_len // 2
    if first >= window:
        return window * q_len
    growing = window - first  # queries that see less than a whole window
    return (first + window - 1) * growing // 2 + window * (q_len - growing)
