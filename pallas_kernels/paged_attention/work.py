"""The flat work list of Mosaic decode: equal runs of tiles for the thread blocks, once a step.

A *unit* is one row and one group of adjacent key/value heads. A unit's context is cut in tiles.
The tiles of all units, laid end to end, are cut in as many equal runs as there are thread blocks
(CTAs), so ragged lengths leave no tail and no split count has to be guessed. A run is a list of
*items*, each a range of tiles of one unit; an item's partial result is merged with those of its
unit afterwards. This is the fixed-split-free form of flash decoding that stream-K gave matrix
products (arXiv 2301.03598).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.devices import Device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import decode_config, decode_geometry


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["items", "cta_ptr", "unit_ptr"],
    meta_fields=["num_groups", "tile_tokens", "has_window"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Who reads which tiles. U units (row-major, then head groups), C thread blocks.

    Attributes:
        items: row, head group, first tile, tile after the last; those of a CTA and those of a
            unit are adjacent; some are empty.
        cta_ptr: CTA c has items `cta_ptr[c] .. cta_ptr[c + 1] - 1`.
        unit_ptr: unit u has items `unit_ptr[u] .. unit_ptr[u + 1] - 1`.
        num_groups: head groups a row.
        tile_tokens: token positions a tile.
        has_window: tiles before a window were left out: the list serves that window only.
    """

    items: Int[Array, "C+U 4"]
    cta_ptr: Int[Array, "C+1"]
    unit_ptr: Int[Array, "U+1"]
    num_groups: int
    tile_tokens: int
    has_window: bool

    @property
    def num_ctas(self) -> int:
        """Thread blocks the list was made for (C)."""
        return self.cta_ptr.shape[0] - 1


def plan_work(
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    num_groups: int,
    tile_tokens: int,
    num_ctas: int,
    window: int | Array | None = None,
) -> Work:
    """Cut the tiles of all rows in `num_ctas` runs whose lengths differ by at most one.

    Plain jax.numpy, for use inside `jit`. The list made without a window is right for layers
    with one too (the kernel leaves out the tiles before it), only less even.

    Args:
        kv_lens: positions of context of each row.
        q_lens: new tokens of each row; a row without any has no tiles.
        num_groups: head groups a row.
        tile_tokens: token positions a tile.
        num_ctas: runs to cut.
        window: leave out tiles that lie wholly before the row's first window.
    """
    kv_lens = jnp.where(q_lens > 0, jnp.maximum(kv_lens, 0), 0)
    row_first = jnp.zeros_like(kv_lens)
    if window is not None:
        first_key = kv_lens - q_lens - jnp.asarray(window, jnp.int32) + 1
        row_first = jnp.clip(first_key, 0, kv_lens) // tile_tokens
    row_tiles = -(-kv_lens // tile_tokens) - row_first  # [B]
    tiles = jnp.repeat(row_tiles, num_groups, total_repeat_length=kv_lens.shape[0] * num_groups)
    end = jnp.cumsum(tiles)  # [U]
    start, total = end - tiles, end[-1]

    cta = jnp.arange(num_ctas, dtype=jnp.int32)
    share, rest = total // num_ctas, total % num_ctas
    cuts = cta * share + cta * rest // num_ctas
    points = jnp.sort(jnp.concatenate([cuts, start]))  # [C+U], where an item begins
    length = jnp.append(points[1:], total) - points
    unit = jnp.clip(_count(start, points, side="right") - 1, 0)
    row, group = unit // num_groups, unit % num_groups
    first = points - start[unit] + row_first[row]
    units = jnp.arange(tiles.shape[0] + 1, dtype=jnp.int32)
    return Work(
        items=jnp.stack([row, group, first, first + length], axis=1).astype(jnp.int32),
        cta_ptr=jnp.append(_count(points, cuts), jnp.int32(points.shape[0])),
        unit_ptr=_count(unit, units),
        num_groups=num_groups,
        tile_tokens=tile_tokens,
        has_window=window is not None,
    )


def plan_decode_work(
    call: AttentionCall,
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    device: Device,
    window: int | Array | None = None,
) -> Work:
    """The work list that `paged_attention_mosaic_decode` would make, for all layers of a step.

    Args:
        call: a layer's call.
        kv_lens: positions of context of each row.
        q_lens: new tokens of each row.
        device: the GPU the step runs on.
        window: as in `plan_work`; give it where all layers share one.
    """
    config = decode_config(call, device)
    geometry = decode_geometry(call, config)
    return plan_work(
        kv_lens,
        q_lens,
        num_groups=geometry.num_groups,
        tile_tokens=geometry.tile_tokens,
        num_ctas=config.num_ctas,
        window=window,
    )


def _count(values: Array, at: Array, *, side: str = "left") -> Array:
    """How many of the sorted `values` are below each of `at` (or equal, with side="right")."""
    # All pairs at once: the default of searchsorted is a loop of XLA, a kernel launch a turn.
    return jnp.searchsorted(values, at, side=side, method="compare_all").astype(jnp.int32)
