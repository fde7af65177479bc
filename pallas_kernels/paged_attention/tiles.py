"""How many rows and blocks the xla backend reads at a time."""

import dataclasses

TILE_BYTES = 4 * 2**20
MAX_ROWS = 8
MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """One turn of the loop reads `blocks` blocks of each of `rows` rows."""

    rows: int
    blocks: int


def pick_tiles(
    *,
    num_rows: int,
    table_width: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_scores: int,
    itemsize: int,
) -> Tiles:
    """Tiles whose keys, values and float32 scores together take about `TILE_BYTES`.

    That is what stays near the cores between the gather that fills a tile and the products that
    read it. Within it, up to `MAX_ROWS` rows share a turn (all of them wait for their longest),
    and up to `MAX_TOKENS` positions of each (a row's last turn is padded to that many).

    Args:
        num_rows: rows of the call (B).
        table_width: blocks a row may have (M).
        block_size: token positions a block (S).
        num_kv_heads: key/value heads (K).
        head_dim: channels a head (D).
        num_scores: scores a context position has in a row (T * H).
        itemsize: bytes of a pool element.

    >>> pick_tiles(num_rows=32, table_width=64, block_size=16, num_kv_heads=3, head_dim=64,
    ...            num_scores=9, itemsize=4)
    Tiles(rows=8, blocks=16)
    >>> pick_tiles(num_rows=32, table_width=64, block_size=16, num_kv_heads=8, head_dim=128,
    ...            num_scores=32, itemsize=4)
    Tiles(rows=3, blocks=8)
    """
    bytes_per_block = block_size * (2 * num_kv_heads * head_dim * itemsize + 4 * num_scores)
    blocks_in_tile = max(1, TILE_BYTES // bytes_per_block)
    blocks = min(table_width, max(1, MAX_TOKENS // block_size))
    rows = min(num_rows, MAX_ROWS)
    while rows > 1 and rows * blocks > blocks_in_tile:
        # Halve the longer side, so that few rows get long tiles and many rows short ones.
        if blocks * block_size > 128:
            blocks = -(-blocks // 2)
        else:
            rows //= 2
    return Tiles(rows=rows, blocks=min(blocks, blocks_in_tile))
