"""Moves of whole blocks in Pallas Mosaic GPU: bulk copies through shared memory, one launch.

A block of a layer is contiguous; a thread block moves a piece of it with one bulk copy in and one
out, and the first one of a block moves its scales too. Several fit on a multiprocessor, which
keeps copies in flight. Thread blocks of padding do nothing.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.block_copy.blocks import Blocks
from pallas_kernels.block_copy.call import CopyCall
from pallas_kernels.devices import Device

MAX_BOX = 256  # elements of an axis that one bulk copy moves
PIECE_BYTES = 32 * 1024


def unsupported(call: CopyCall, device: Device) -> str | None:
    """Why the kernel cannot take a call on a device, or None if it can."""
    capability = device.compute_capability
    if capability is None or capability < (9, 0):
        return f"needs compute capability 9.0 or later (here: {capability})"
    if rows_of_pieces(call.block_elements, jnp.dtype(call.dtype).itemsize) is None:
        return f"a block of {call.block_elements} {call.dtype} elements has no 16-byte rows"
    num_scales = call.block_elements // call.block_shape[-1]
    if call.has_scales and rows_of_pieces(num_scales, 4) is None:
        return f"{num_scales} scales of a block have no 16-byte rows"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """How a block is cut: `num` pieces of `rows` rows of `columns` elements."""

    num: int
    rows: int
    columns: int


def rows_of_pieces(num_elements: int, itemsize: int) -> Pieces | None:
    """Cut a block into equal boxes of at most `PIECE_BYTES`, or None where rows are too short.

    >>> rows_of_pieces(2 * 8 * 16 * 128, 2)
    Pieces(num=2, rows=64, columns=256)
    >>> rows_of_pieces(2 * 3 * 8 * 80, 1)
    Pieces(num=1, rows=15, columns=256)
    >>> rows_of_pieces(6, 4) is None
    True
    """
    columns = math.gcd(num_elements, MAX_BOX)
    if columns * itemsize % 16:
        return None
    rows = num_elements // columns
    most = min(MAX_BOX, PIECE_BYTES // (columns * itemsize))
    rows_of_piece = max(n for n in range(1, most + 1) if rows % n == 0)
    return Pieces(num=rows // rows_of_piece, rows=rows_of_piece, columns=columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What a thread block knows when it is compiled.

    Attributes:
        num_layers: layers (L).
        source_blocks: blocks a layer of the source.
        target_blocks: blocks a layer of the target.
        skips_null: the target's block 0 is not written.
    """

    num_layers: int
    source_blocks: int
    target_blocks: int
    skips_null: bool


def move_blocks_mosaic(
    source: Blocks | None,
    target: Blocks | None,
    src: Int[Array, "C"],
    dst: Int[Array, "C"],
    *,
    interpret: bool = False,
) -> Blocks:
    """The semantics of `block_copy`, `block_gather` and `block_scatter` (see `Blocks`)."""
    like = source if target is None else target
    assert like is not None
    L = like.kv.shape[0]
    target_blocks = src.shape[0] if target is None else target.kv.shape[1]
    static = Static(
        num_layers=L,
        source_blocks=target_blocks if source is None else source.kv.shape[1],
        target_blocks=target_blocks,
        skips_null=target is not None,
    )
    cuts = [_cut(x) for x in jax.tree.leaves(like)]  # of elements and, in 8 bits, of scales
    views = [
        jax.ShapeDtypeStruct((L * target_blocks, cut.num * cut.rows, cut.columns), x.dtype)
        for cut, x in zip(cuts, jax.tree.leaves(like), strict=True)
    ]
    sources = [] if source is None else _views(source, cuts)
    targets = [] if target is None else [jax.new_ref(x) for x in _views(target, cuts)]
    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)

    def block_copy(src_ref, dst_ref, *refs):  # the kernel's name
        n = len(cuts)
        to, buffers, barriers = refs[-3 * n : -2 * n], refs[-2 * n : -n], refs[-n:]
        from_ = refs[:n] if sources else to
        ids = src_ref, dst_ref
        _move_piece(*ids, from_, to, buffers, barriers, cuts=cuts, static=static)

    moved = plgpu.kernel(
        block_copy,
        out_type=() if targets else tuple(views),
        grid=(src.shape[0] * L, cuts[0].num),
        grid_names=("move", "piece"),
        scratch_types=[
            *(
                plgpu.SMEM((cut.rows, cut.columns), view.dtype)
                for cut, view in zip(cuts, views, strict=True)
            ),
            *(plgpu.Barrier() for _ in cuts),
        ],
        **options,
    )(src, dst, *sources, *targets)
    if targets:
        moved = [jax.freeze(ref) for ref in targets]
    shape = (L, target_blocks, *like.kv.shape[2:])
    scales = None if like.scales is None else moved[1].reshape(shape[:-1])
    return Blocks(moved[0].reshape(shape), scales)


def _cut(x: Array) -> Pieces:
    cut = rows_of_pieces(math.prod(x.shape[2:]), x.dtype.itemsize)
    assert cut is not None, "see unsupported()"
    return cut


def _views(blocks: Blocks, cuts: list[Pieces]) -> list[Array]:
    """The arrays of blocks as boxes of whole rows."""
    return [
        x.reshape(-1, cut.num * cut.rows, cut.columns)  # [L*P, rows, columns]
        for cut, x in zip(cuts, jax.tree.leaves(blocks), strict=True)
    ]


def _move_piece(
    src_ref: Any,  # [C]
    dst_ref: Any,  # [C]
    sources: Any,  # [L*P, rows, columns] of elements and, in 8 bits, of scales
    targets: Any,  # likewise
    buffers: Any,  # [rows of a piece, columns] in shared memory
    barriers: Any,
    *,
    cuts: list[Pieces],
    static: Static,
) -> None:
    index, piece = jax.lax.axis_index("move"), jax.lax.axis_index("piece")
    move = jax.lax.div(index, jnp.int32(static.num_layers))
    layer = index - move * static.num_layers
    dst = dst_ref[move]
    source_row = layer * static.source_blocks + src_ref[move]
    target_row = layer * static.target_blocks + dst

    def move_box(i: int, piece: Any) -> None:
        box = pl.ds(piece * cuts[i].rows, cuts[i].rows)
        plgpu.copy_gmem_to_smem(sources[i].at[source_row, box], buffers[i], barriers[i])
        plgpu.barrier_wait(barriers[i])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers[i], targets[i].at[target_row, box])

    @pl.when((dst != 0) | (not static.skips_null))
    def _():
        move_box(0, piece)
        if len(cuts) > 1:

            @pl.when(piece == 0)
            def _():
                for scales_piece in range(cuts[1].num):
                    move_box(1, scales_piece)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        plgpu.wait_smem_to_gmem(0)
