"""The kernel of Mosaic decode: partial results of the work list's items.

One warpgroup only issues copies, into a ring that does not drain between items; the other one
computes. `full[slot]` says that a tile has arrived, `free[slot]` that it may be overwritten;
`q_full` and `q_free` say the same of two buffers of queries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_common import (
    COLUMNS,
    LOWEST,
    MATRIX,
    ROWS,
    by_column,
    by_row,
    divided,
    filled,
    kernel_options,
    load,
    row_and_column,
    store,
    store_transposed,
    swizzled,
)
from pallas_kernels.paged_attention.mosaic_config import TILE_ROWS
from pallas_kernels.paged_attention.mosaic_decode_types import (
    Inputs,
    Item,
    Partials,
    Scratch,
    Static,
)

# Weights times the scales of an 8-bit pool are float16: kept well above its smallest numbers.
VALUE_BOOST = 256.0


def launch(inputs: Inputs, static: Static) -> Partials:
    """Run the kernel: one partial result an item."""
    geometry, stages = static.geometry, static.config.stages
    columns, D = geometry.columns, static.D
    num_items, num_ctas = inputs.items.shape[0], inputs.cta_ptr.shape[0] - 1
    copies = 1 if geometry.blocks_per_tile == 1 else 2 * geometry.blocks_per_tile
    operands = [operand for operand in inputs if operand is not None]
    scratch_types = [
        swizzled((2, columns, D), static.dtype),
        swizzled((stages, 2, TILE_ROWS, D), static.pool_dtype),
        swizzled((columns, TILE_ROWS), static.dtype),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=copies * (2 if static.is_quantized else 1), num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
    ]
    if static.is_quantized:
        scratch_types.append(plgpu.SMEM((stages, 2, TILE_ROWS), jnp.float32))
        scratch_types.append(swizzled((TILE_ROWS, D), static.dtype))

    def paged_decode(*refs):
        num_inputs, num_outputs = len(operands), len(Partials._fields)
        inputs = Inputs(*refs[:num_inputs])
        partials = Partials(*refs[num_inputs : num_inputs + num_outputs])
        scratch = Scratch(*refs[num_inputs + num_outputs :])
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        begin, end = inputs.cta_ptr[cta], inputs.cta_ptr[cta + 1]
        pl.when(warpgroup == 0)(lambda: _consume(begin, end, inputs, partials, scratch, static))
        pl.when(warpgroup == 1)(lambda: _produce(begin, end, inputs, scratch, static))

    partials = plgpu.kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((num_items, D, columns), jnp.float32),
            jax.ShapeDtypeStruct((num_items, columns), jnp.float32),
            jax.ShapeDtypeStruct((num_items, columns), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        **kernel_options(interpret=static.interpret),
    )(*operands)
    return Partials(*partials)


def _read_item(index: Array, inputs: Inputs, static: Static) -> Item:
    row, group, lo, hi = (inputs.items[index, field] for field in range(4))
    kv_len = inputs.kv_lens[row]
    q_len = inputs.q_lens[row] if static.T > 1 else jnp.int32(1)
    first = window = jnp.int32(0)
    if static.has_window:  # the list may have been planned without it
        window = inputs.window[0]
        first = jnp.maximum(kv_len - q_len - window + 1, 0)
        lo = jnp.minimum(jnp.maximum(lo, lax.div(first, static.geometry.tile_tokens)), hi)
    return Item(row, group, lo, hi, kv_len, q_len, first, window)


def _produce(begin: Array, end: Array, inputs: Inputs, scratch: Scratch, static: Static):
    """Copy the queries of each item, and its tiles through the block table."""
    stages = static.config.stages

    def produce_item(index, issued):  # issued: tiles so far, over all items
        item = _read_item(index, inputs, static)
        buffer = lax.rem(index, 2)
        pl.when(index - begin >= 2)(lambda: plgpu.barrier_wait(scratch.q_free.at[buffer]))
        plgpu.copy_gmem_to_smem(
            inputs.q.at[item.row, item.group], scratch.q.at[buffer], scratch.q_full.at[buffer]
        )

        def produce_tile(tile, issued):
            slot = lax.rem(issued, stages)
            ids = _block_ids(tile, item, inputs, static)  # before the wait, which hides them
            pl.when(issued >= stages)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
            _copy_tile(tile, ids, slot, item, inputs, scratch, static)
            return issued + 1

        return lax.fori_loop(item.lo, item.hi, produce_tile, issued)

    issued = lax.fori_loop(begin, end, produce_item, jnp.int32(0))
    # Barriers end with nothing left to observe: the interpreter of JAX 0.11 insists.
    for back in range(stages):
        slot = lax.rem(issued - 1 - back, stages)
        pl.when(issued > back)(functools.partial(plgpu.barrier_wait, scratch.free.at[slot]))
    for back in range(2):
        buffer = lax.rem(end - 1 - back, 2)
        pl.when(end - begin > back)(
            functools.partial(plgpu.barrier_wait, scratch.q_free.at[buffer])
        )


def _block_ids(tile: Array, item: Item, inputs: Inputs, static: Static) -> list[Array]:
    """Ids of a tile's blocks; beyond the readable ones, those again: never an unused entry."""
    S, count = static.S, static.geometry.blocks_per_tile
    first, last = lax.div(item.first, S), lax.div(item.kv_len - 1, S)
    if S > TILE_ROWS:
        columns = [lax.div(tile, S // TILE_ROWS)]
    else:
        columns = [tile * count + j for j in range(count)]
    columns = [jnp.minimum(column, last) for column in columns]
    if static.has_window:
        columns = [jnp.maximum(column, first) for column in columns]
    ids = [inputs.tables[item.row, column] for column in columns]
    return [jnp.clip(block, 0, static.N - 1) for block in ids]


def _copy_tile(tile, ids, slot, item: Item, inputs: Inputs, scratch: Scratch, static: Static):
    """Issue the bulk copies of a tile into a slot of the ring."""
    rows, full = static.geometry.block_rows, scratch.full.at[slot]
    start = item.group * (static.S * static.geometry.pack)
    if static.S > TILE_ROWS:
        start += lax.rem(tile, static.S // TILE_ROWS) * TILE_ROWS
    source = pl.ds(start, rows)
    if len(ids) == 1:  # K and V of a block in one copy
        both = pl.ds(2 * ids[0], 2)
        plgpu.copy_gmem_to_smem(inputs.kv.at[both, source], scratch.kv.at[slot], full)
        if static.is_quantized:
            plgpu.copy_gmem_to_smem(inputs.scales.at[both, source], scratch.scales.at[slot], full)
        return
    for j, block in enumerate(ids):
        for which in range(2):
            here, there = (2 * block + which, source), (slot, which, pl.ds(j * rows, rows))
            plgpu.copy_gmem_to_smem(inputs.kv.at[*here], scratch.kv.at[*there], full)
            if static.is_quantized:
                plgpu.copy_gmem_to_smem(inputs.scales.at[*here], scratch.scales.at[*there], full)


def _consume(
    begin: Array, end: Array, inputs: Inputs, partials: Partials, scratch: Scratch, static
):
    """Attend to the tiles of each item and write its partial result."""
    columns = static.geometry.columns
    factors = inputs.factors[0], inputs.factors[1]

    def consume_item(index, taken):  # taken: tiles so far, over all items
        item = _read_item(index, inputs, static)
        buffer = lax.rem(index, 2)
        plgpu.barrier_wait(scratch.q_full.at[buffer])

        def consume_tile(tile, sums):
            slot = lax.rem(taken + tile - item.lo, static.config.stages)
            plgpu.barrier_wait(scratch.full.at[slot])
            product = static.dot(
                filled((TILE_ROWS, columns), 0.0),
                _operand(slot, 0, scratch, static),
                scratch.q.at[buffer].transpose((1, 0)),
            )
            if static.is_quantized:
                product *= by_row(load(scratch.scales.at[slot, 0], ROWS), product)
            scores = _scores(product, tile, item, factors, static)
            sums = _accumulate(sums, scores, tile, slot, item, scratch, static)
            plgpu.barrier_arrive(scratch.free.at[slot])
            return sums

        empty = (
            filled((static.D, columns), 0.0),
            filled((TILE_ROWS, columns), 0.0),
            filled((columns,), LOWEST, COLUMNS),
        )
        values, weights, tops = lax.fori_loop(item.lo, item.hi, consume_tile, empty)
        plgpu.barrier_arrive(scratch.q_free.at[buffer])
        if static.is_quantized:
            values *= 1 / VALUE_BOOST
        store(partials.values.at[index], values)
        store(partials.sums.at[index], weights.sum(axis=0))
        store(partials.tops.at[index], tops)
        return taken + item.hi - item.lo

    lax.fori_loop(begin, end, consume_item, jnp.int32(0))


def _scores(product, tile, item: Item, factors, static: Static) -> Array:
    """Scaled, capped and masked scores in base 2, [R, columns]."""
    geometry = static.geometry
    scores = product * factors[0]
    if static.has_soft_cap:
        scores = jnp.tanh(scores) * factors[1]
    row, column = row_and_column((TILE_ROWS, geometry.columns))
    ahead = _token_of_row(row, static)  # of the key, less that of the query
    if static.T > 1:
        head = divided(column, geometry.head_columns) if geometry.pack > 1 else 0
        ahead -= divided(column - head * geometry.head_columns, static.G)
    bound = item.kv_len - item.q_len - tile * geometry.tile_tokens
    seen = ahead <= bound
    if static.has_window:
        seen &= ahead > bound - item.window
    if geometry.pack > 1:
        row_head = lax.rem(lax.div(row, geometry.block_tokens), geometry.pack)
        seen &= row_head == divided(column, geometry.head_columns)
    return jnp.where(seen, scores, LOWEST)


def _token_of_row(row: Array, static: Static) -> Array:
    """Token of a tile that a row holds: rows are by block, then by head, then by token."""
    geometry = static.geometry
    if geometry.pack == 1:
        return row
    tokens = geometry.block_tokens
    return lax.div(row, geometry.block_rows) * tokens + lax.rem(row, tokens)


def _operand(slot, which: int, scratch: Scratch, static: Static) -> Any:
    """K (0) or V (1) of a tile as the tensor core takes it: [R, D] of 16 bits."""
    ref = scratch.kv.at[slot, which]
    if not static.is_quantized:
        return ref
    for start in range(0, static.D, 64):  # in parts, to need fewer registers
        part = pl.ds(start, 64)
        value = load(ref.at[:, part], plgpu.Layout.WGMMA_UPCAST_4X)
        scratch.wide[:, part] = value.astype(static.dtype)
    plgpu.commit_smem()
    return scratch.wide


def _accumulate(sums, scores, tile, slot, item: Item, scratch: Scratch, static: Static):
    """One turn of the online softmax: values [D, columns], weights [R, columns], tops [columns].

    The weights are summed over rows once an item; only the maximum is reduced every tile.
    """
    values, weights, tops = sums
    new_tops = jnp.maximum(tops, scores.max(axis=0))
    decay = jnp.exp2(tops - new_tops)
    p = jnp.exp2(scores - by_column(new_tops, scores))
    weights = weights * by_column(decay, weights) + p
    if static.is_quantized:
        token = _token_of_row(
            plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROWS), static
        )
        scales = load(scratch.scales.at[slot, 1], ROWS) * VALUE_BOOST
        p *= by_row(jnp.where(_readable(token, tile, item, static), scales, 0.0), p)
    store_transposed(scratch.p, p.astype(static.dtype))
    plgpu.commit_smem()
    v_ref = _operand(slot, 1, scratch, static)
    _zero_unreadable(v_ref, tile, item, static)
    values = static.dot(
        values * by_column(decay, values),
        v_ref.transpose((1, 0)),
        scratch.p.transpose((1, 0)),
    )
    if static.config.mma:  # threads have read what a copy, of another proxy, writes next
        plgpu.commit_smem()
    return values, weights, new_tops


def _readable(token, tile, item: Item, static: Static) -> Array:
    """Whether tokens of a tile lie within the row's context and not before its window."""
    token += tile * static.geometry.tile_tokens
    readable = token < item.kv_len
    if static.has_window:
        readable &= token >= item.first
    return readable


def _zero_unreadable(v_ref, tile, item: Item, static: Static) -> None:
    """Zero V where nothing may be read: it may hold NaN, and 0 * NaN is NaN."""
    begin = tile * static.geometry.tile_tokens
    partial = begin + static.geometry.tile_tokens > item.kv_len
    if static.has_window:
        partial |= begin < item.first

    @pl.when(partial)
    def _():
        row, _ = row_and_column((TILE_ROWS, 64))
        readable = _readable(_token_of_row(row, static), tile, item, static)
        for start in range(0, static.D, 64):
            part = v_ref.at[:, pl.ds(start, 64)]
            value = plgpu.layout_cast(part[...], MATRIX)
            part[...] = jnp.where(readable, value, jnp.zeros((), static.dtype))
        plgpu.commit_smem()
