"""Moves of whole blocks in Pallas Triton: all blocks, layers and scales in one launch.

A block of a layer is contiguous, so a program moves a piece of it, 16 bytes a thread at a time,
and the first program of a block moves its scales. Programs of padding do nothing.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.block_copy.blocks import Blocks
from pallas_kernels.block_copy.call import CopyCall
from pallas_kernels.devices import Device

PIECE_BYTES = 8192  # four warps, each thread 64 bytes


def unsupported(call: CopyCall, device: Device) -> str | None:
    """Why the kernel cannot take a call on a device, or None if it can."""
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return f"needs compute capability 8.0 or later (here: {capability})"
    itemsize = jnp.dtype(call.dtype).itemsize
    if call.dtype == "float8_e4m3fn" and capability < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9 or later (here: {capability})"
    if itemsize == 1 and 2**31 <= call.num_elements <= 2**32:
        return "8-bit pools of 2**31 to 2**32 elements: Pallas Triton gives them 32-bit offsets"
    if piece_elements(call.block_elements, itemsize) * itemsize < 16:
        return f"a block of {call.block_elements} {call.dtype} elements has no 16-byte pieces"
    return None


def piece_elements(block_elements: int, itemsize: int) -> int:
    """Elements that a program moves: a power of two that divides the block.

    >>> piece_elements(2 * 8 * 16 * 128, 2), piece_elements(2 * 3 * 8 * 80, 2)
    (4096, 256)
    """
    return math.gcd(block_elements, PIECE_BYTES // itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What a program knows when it is compiled.

    Attributes:
        num_layers: layers (L).
        source_blocks: blocks a layer of the source.
        target_blocks: blocks a layer of the target.
        pieces: programs a block.
        piece: elements a program moves.
        num_scales: scales of a block, 0 where it has none.
        skips_null: the target's block 0 is not written.
    """

    num_layers: int
    source_blocks: int
    target_blocks: int
    pieces: int
    piece: int
    num_scales: int
    skips_null: bool


def move_blocks_triton(
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
    block_shape, itemsize = like.kv.shape[2:], like.kv.dtype.itemsize
    piece = piece_elements(math.prod(block_shape), itemsize)
    target_blocks = src.shape[0] if target is None else target.kv.shape[1]
    static = Static(
        num_layers=L,
        source_blocks=target_blocks if source is None else source.kv.shape[1],
        target_blocks=target_blocks,
        pieces=math.prod(block_shape) // piece,
        piece=piece,
        num_scales=0 if like.scales is None else math.prod(block_shape[:-1]),
        skips_null=target is not None,
    )
    arrays = [(like.kv, static.piece)]
    if like.scales is not None:
        arrays.append((like.scales, static.num_scales))
    out_shape = [
        jax.ShapeDtypeStruct((math.prod(x.shape[2:]) * L * target_blocks // width, width), x.dtype)
        for x, width in arrays
    ]
    inputs = _flat(source, static) + _flat(target, static)
    first = 2 + len(inputs) - len(arrays)  # of the target among the operands
    aliases = {} if target is None else {first + i: i for i in range(len(arrays))}
    moved = pl.pallas_call(
        functools.partial(_move_piece, static=static, has_source=source is not None),
        grid=(src.shape[0] * L, static.pieces),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=min(4, max(1, piece * itemsize // 512)), num_stages=1
        ),
        interpret=interpret,
        name="block_copy_triton",
    )(src, dst, *inputs)
    shape = (L, target_blocks, *block_shape)
    scales = moved[1].reshape(shape[:-1]) if static.num_scales else None
    return Blocks(moved[0].reshape(shape), scales)


def _flat(blocks: Blocks | None, static: Static) -> list[Array]:
    """The arrays of blocks as rows of a piece, and as rows of a block's scales."""
    if blocks is None:
        return []
    flat = [blocks.kv.reshape(-1, static.piece)]
    return flat if blocks.scales is None else [*flat, blocks.scales.reshape(-1, static.num_scales)]


def _move_piece(
    src_ref: Any,  # [C]
    dst_ref: Any,  # [C]
    *refs: Any,  # source, target and outputs: [L*P*pieces, piece], and [L*P, 2*K*S] of scales
    static: Static,
    has_source: bool,
) -> None:
    num_outputs = 2 if static.num_scales else 1
    outputs = refs[-num_outputs:]
    sources = refs[:num_outputs] if has_source else outputs
    num_layers = jnp.int32(static.num_layers)
    move, layer = (
        jax.lax.div(pl.program_id(0), num_layers),
        jax.lax.rem(pl.program_id(0), num_layers),
    )
    piece = pl.program_id(1)
    dst = dst_ref[move]
    source_row = layer * static.source_blocks + src_ref[move]
    target_row = layer * static.target_blocks + dst

    @pl.when((dst != 0) | (not static.skips_null))
    def _():
        outputs[0][target_row * static.pieces + piece, :] = sources[0][
            source_row * static.pieces + piece, :
        ]

    if static.num_scales:

        @pl.when((piece == 0) & ((dst != 0) | (not static.skips_null)))
        def _():
            at = jnp.arange(pl.next_power_of_2(static.num_scales), dtype=jnp.int32)
            mask = at < static.num_scales
            scales = plgpu.load(sources[1].at[source_row, at], mask=mask, other=0.0)
            plgpu.store(outputs[1].at[target_row, at], scales, mask=mask)
