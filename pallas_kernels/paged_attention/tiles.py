"""How many rows and blocks the xla backend reads at a time."""

import dataclasses

TILE_BYTES = 4 * 2**20
MAX_TILE_BYTES = 8 * 2**20
MAX_ROWS = 8
MIN_TOKENS, MAX_TOKENS = 128, 512


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
    """Rows and blocks of a tile, by a rule that was best on CPU over the shapes of the bench.

    Up to `MAX_ROWS` rows share a tile (all of them wait for their longest). Of each it holds as
    many positions as keep keys, values and float32 scores near `TILE_BYTES`, between
    `MIN_TOKENS` and `MAX_TOKENS`: the whole table, or else no more than a quarter of it, as the
    last tile of a row is padded. Where that exceeds `MAX_TILE_BYTES`, first rows are given up,
    then positions.

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
    Tiles(rows=4, blocks=8)
    """
    bytes_per_token = 2 * num_kv_heads * head_dim * itemsize + 4 * num_scores
    rows = min(num_rows, MAX_ROWS)
    table = table_width * block_size
    tokens = min(MAX_TOKENS, table, TILE_BYTES // (rows * bytes_per_token))
    if tokens < table:
        tokens = min(tokens, table // 4)
    tokens = max(tokens, MIN_TOKENS, block_size)
    while rows > 1 and rows * tokens * bytes_per_token > MAX_TILE_BYTES:
        rows //= 2
    tokens = min(tokens, MAX_TILE_BYTES // (rows * bytes_per_token))
    blocks = max(1, tokens // block_size)
    if blocks > 8:
        blocks -= blocks % 8
    return Tiles(rows=rows, blocks=min(blocks, table_width))
