import pytest

from pallas_kernels.paged_attention.tiles import MAX_ROWS, MAX_TILE_BYTES, MAX_TOKENS, pick_tiles


@pytest.mark.parametrize("num_rows", [1, 3, 32])
@pytest.mark.parametrize("block_size", [1, 16, 4096])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (32, 256)])
@pytest.mark.parametrize("num_scores", [9, 32 * 512])
def test_tiles_fit(num_rows, block_size, heads, dim, num_scores):
    tiles = pick_tiles(
        num_rows=num_rows,
        table_width=64,
        block_size=block_size,
        num_kv_heads=heads,
        head_dim=dim,
        num_scores=num_scores,
        itemsize=4,
    )
    assert 1 <= tiles.rows <= min(num_rows, MAX_ROWS)
    assert 1 <= tiles.blocks <= 64
    assert tiles.blocks * block_size <= max(MAX_TOKENS, block_size)
    tile_bytes = tiles.rows * tiles.blocks * block_size * (8 * heads * dim + 4 * num_scores)
    assert tile_bytes <= MAX_TILE_BYTES or (tiles.rows, tiles.blocks) == (1, 1)
