"""The kernel of `mosaic_prefill`: who does what in a thread block.

FlashAttention-3's division of labour (arXiv 2407.08608, section 3.1) over a paged pool. A thread
block has a tile of query rows, (token, query head) pairs of one KV head, 64 a consumer warpgroup;
so each K and V byte is read once for the whole GQA group. A producer warpgroup copies tiles of K
and V, one bulk copy a (block, K or V, head), through the block table into a ring. The consumers
take turns: the softmax of one runs beside the products of the other. Tiles that no query of the
thread block sees are never read; only border tiles are masked.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_prefill_config import (
    WARPGROUP_ROWS,
    MosaicPrefillConfig,
)
from pallas_kernels.paged_attention.mosaic_prefill_tile import (
    MATRIX,
    ROWS,
    accumulate,
    by_row,
    cap_scores,
    mask_scores,
    scores,
    zero_unread,
)

LOWEST = -1e30  # start of the running maximum: finite, so that rows without a key give no NaN
# Registers a thread of three warpgroups; 65536 / 384 on average.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What a kernel is compiled for; `num_tiles` counts the query tiles of a (row, KV head)."""

    config: MosaicPrefillConfig
    group: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_tiles: int
    has_window: bool
    has_soft_cap: bool
    has_sinks: bool
    interpret: bool

    @property
    def copy_tokens(self) -> int:
        """KV positions a bulk copy: a block, or the share of one that a tile holds."""
        return min(self.block_size, self.config.tile_tokens)

    @property
    def copies_per_tile(self) -> int:
        """Bulk copies that fill a tile of K, or of V."""
        return self.config.tile_tokens // self.copy_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """Arguments of the kernel, in order. R = num_tiles * tile_rows; row t * G + g."""

    q: Any  # [B, K, R, D]
    kv: Any  # [N * 2, K * S, D]
    tables: Any  # i32[B, M]
    kv_lens: Any  # i32[B]
    q_lens: Any  # i32[B]
    window: Any  # i32[1]
    factors: Any  # f32[2]: of the product of q and k; the cap in base 2
    sinks: Any  # f32[K, R], in base 2
    out: Any  # [B, K, R, D]
    lse: Any  # f32[B, K, R]
    q_tile: Any  # [consumers, 64, D], at the end the output's
    k_ring: Any  # [stages, tile_tokens, D]
    v_ring: Any  # [stages, tile_tokens, D]
    lse_tile: Any  # f32[consumers, 64]
    q_full: Any  # barriers [consumers]
    k_full: Any  # barriers [stages], an arrival a copy
    v_full: Any
    k_free: Any  # barriers [stages], an arrival a consumer
    v_free: Any
    turn: Any  # barrier: the consumers' turns at the tensor cores
    zeroed: Any  # barrier: each consumer has zeroed its share of a V tile


def scratch_types(st: Static, dtype: Any) -> list[Any]:
    """Shared memory and barriers, as `Refs` has them from `q_tile` on."""
    config, D = st.config, st.head_dim
    consumers, stages = config.num_consumers, config.num_stages
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=(tiling, swizzle))
    full = plgpu.Barrier(num_arrivals=st.copies_per_tile, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    return [
        smem((consumers, WARPGROUP_ROWS, D)),
        smem((stages, config.tile_tokens, D)),
        smem((stages, config.tile_tokens, D)),
        plgpu.SMEM((consumers, WARPGROUP_ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=consumers),
        full,
        full,
        free,
        free,
        plgpu.Barrier(num_arrivals=consumers),
        plgpu.Barrier(num_arrivals=consumers),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """KV positions that a run of query rows sees; `stop == start` where all rows are padding."""

    first_query: Array  # position of the first query
    last_query: Array  # position of the last query that is no padding
    start: Array  # first position that any of them sees
    stop: Array  # one past the last


def div(a: Array, b: int) -> Array:
    """a // b of numbers that are not negative, without the instructions for those that are."""
    return lax.div(a, jnp.int32(b))


def rem(a: Array, b: int) -> Array:
    """a % b of numbers that are not negative."""
    return lax.rem(a, jnp.int32(b))


def span_of(refs: Refs, st: Static, b: Array, first_row: Array, num_rows: int) -> Span:
    """What rows first_row .. first_row + num_rows - 1 of batch row b see."""
    q_len = refs.q_lens[b]
    base = refs.kv_lens[b] - q_len
    first = div(first_row, st.group)
    last = jnp.minimum(div(first_row + (num_rows - 1), st.group), q_len - 1)
    start = jnp.int32(0)
    if st.has_window:
        start = jnp.maximum(base + first - refs.window[0] + 1, 0)
    stop = jnp.where(first < q_len, base + last + 1, start)
    return Span(first_query=base + first, last_query=base + last, start=start, stop=stop)


def tiles_of(st: Static, span: Span) -> tuple[Array, Array]:
    """The first KV tile of a span, and how many it has."""
    tokens = st.config.tile_tokens
    first = div(span.start, tokens)
    count = div(span.stop + (tokens - 1), tokens) - first
    return first, jnp.where(span.stop > span.start, count, 0)


def produce(refs: Refs, st: Static, b: Array, h: Array, span: Span) -> None:
    """The producer warpgroup: copy the span's tiles through the block table into the rings."""
    stages, S, tokens = st.config.num_stages, st.block_size, st.config.tile_tokens
    first, count = tiles_of(st, span)
    # Entries before the window or past the context may hold anything.
    first_entry, last_entry = div(span.start, S), div(refs.kv_lens[b] - 1, S)

    def step(i: Array, _: None) -> None:
        slot = rem(i, stages)
        copies = []
        # All ids are read before the wait for a free slot, or their latency would follow it.
        for to in range(0, tokens, st.copy_tokens):
            position = (first + i) * tokens + to
            entry = jnp.clip(div(position, S), first_entry, last_entry)
            block = jnp.clip(refs.tables[b, entry], 0, st.num_blocks - 1)
            rows = pl.ds(h * S + rem(position, S), st.copy_tokens)
            copies.append((block, rows, pl.ds(to, st.copy_tokens)))
        k_side = (refs.k_ring, refs.k_full, refs.k_free)
        v_side = (refs.v_ring, refs.v_full, refs.v_free)
        for x, (ring, full, free) in enumerate((k_side, v_side)):
            pl.when(i >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            for block, rows, to in copies:
                source = refs.kv.at[2 * block + x, rows]
                plgpu.copy_gmem_to_smem(source, ring.at[slot, to], full.at[slot])

    lax.fori_loop(0, count, step, None)
    for x in range(stages):  # no barrier may end with a completion that nobody waited for
        slot = rem(jnp.maximum(count - 1 - x, 0), stages)
        for free in (refs.k_free, refs.v_free):
            pl.when(count > x)(functools.partial(plgpu.barrier_wait, free.at[slot]))


def consume(refs: Refs, st: Static, b: Array, h: Array, first_row: Array, span: Span) -> None:
    """A consumer warpgroup: attention of its 64 rows over the thread block's span."""
    w = lax.axis_index("warpgroup")
    first_row = first_row + w * WARPGROUP_ROWS
    mine = span_of(refs, st, b, first_row, WARPGROUP_ROWS)
    kv_len = refs.kv_lens[b]
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS)
    positions = div(row + first_row, st.group) + (kv_len - refs.q_lens[b])
    window = refs.window[0] if st.has_window else None
    factor, cap = refs.factors[0], refs.factors[1]
    first, count = tiles_of(st, span)
    tokens, stages = st.config.tile_tokens, st.config.num_stages
    in_turns = st.config.num_consumers == 2

    def take_turn() -> None:
        if in_turns:
            plgpu.barrier_arrive(refs.turn)
            plgpu.barrier_wait(refs.turn)

    @pl.when(count > 0)
    def _load_queries():
        rows = pl.ds(first_row, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(refs.q.at[b, h, rows], refs.q_tile.at[w], refs.q_full.at[w])
        plgpu.barrier_wait(refs.q_full.at[w])

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        slot = rem(i, stages)
        tile_start = (first + i) * tokens
        plgpu.barrier_wait(refs.k_full.at[slot])
        s = scores(
            refs.q_tile.at[w],
            refs.k_ring.at[slot],
            once_issued=take_turn,
            interpret=st.interpret,
        )
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if st.has_soft_cap:
            s = cap_scores(s, factor=factor, cap=cap)
        is_border = tile_start + (tokens - 1) > mine.first_query
        if window is not None:
            is_border |= tile_start <= mine.last_query - window
        mask = functools.partial(
            mask_scores, tile_start=tile_start, positions=positions, window=window
        )
        s = lax.cond(is_border, mask, lambda s: s, s)

        scale = jnp.float32(1) if st.has_soft_cap else factor
        new_top = jnp.maximum(top, s.max(axis=1) * scale)
        alpha = jnp.exp2(top - new_top)
        p = jnp.exp2(s * scale - by_row(new_top, s))
        total = total * alpha + p.sum(axis=1)
        acc = acc * by_row(alpha, acc)
        p = p.astype(refs.v_ring.dtype)
        # The softmax is done before the turn is passed on.
        acc, new_top, total, p = lax.optimization_barrier((acc, new_top, total, p))
        if in_turns:
            plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.v_full.at[slot])
        pl.when((tile_start < span.start) | (tile_start + tokens > kv_len))(
            lambda: zero_border(refs, st, slot, tile_start, start=span.start, stop=kv_len)
        )
        if in_turns:
            plgpu.barrier_wait(refs.turn)
        acc = accumulate(acc, p, refs.v_ring.at[slot], interpret=st.interpret)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, new_top, total

    zeros = jnp.zeros((WARPGROUP_ROWS, st.head_dim), jnp.float32)
    init = (
        plgpu.layout_cast(zeros, MATRIX),
        plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROWS),
    )
    pl.when(w == 1)(take_turn)
    acc, top, total = lax.fori_loop(0, count, step, init)
    pl.when(w == 0)(take_turn)
    is_padding = positions >= kv_len
    finish(refs, st, b, h, first_row, acc, top, jnp.where(is_padding, 0.0, total))


def zero_border(
    refs: Refs, st: Static, slot: Array, tile_start: Array, *, start: Array, stop: Array
) -> None:
    """Zero what must not be read of a V tile; two consumers take half of it each."""
    if st.config.num_consumers == 1:
        zero_unread(refs.v_ring.at[slot], tile_start=tile_start, start=start, stop=stop)
        return
    half = st.config.tile_tokens // 2
    offset = lax.axis_index("warpgroup") * half
    v_ref = refs.v_ring.at[slot, pl.ds(offset, half)]
    zero_unread(v_ref, tile_start=tile_start + offset, start=start, stop=stop)
    plgpu.barrier_arrive(refs.zeroed)
    plgpu.barrier_wait(refs.zeroed)


def finish(
    refs: Refs,
    st: Static,
    b: Array,
    h: Array,
    first_row: Array,
    acc: Array,
    top: Array,
    total: Array,
) -> None:
    """Normalise and store a warpgroup's rows; a total of 0 means that nothing was attended."""
    w = lax.axis_index("warpgroup")
    rows = pl.ds(first_row, WARPGROUP_ROWS)
    attended = total != 0  # a NaN of what was attended is kept
    lse = jnp.where(attended, (top + jnp.log2(total)) * math.log(2), -jnp.inf)
    if st.has_sinks:
        sinks = plgpu.load(refs.sinks.at[h, rows], layout=ROWS, optimized=False)
        total += jnp.exp2(sinks - top)
    weight = jnp.where(attended, 1 / total, 0.0)
    # Padding queries may hold NaN, which a weight of 0 would keep.
    acc = jnp.where(by_row(weight, acc) != 0, acc * by_row(weight, acc), 0.0)
    refs.q_tile.at[w][...] = acc.astype(refs.q_tile.dtype)
    refs.lse_tile.at[w][...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.q_tile.at[w], refs.out.at[b, h, rows])
    plgpu.copy_smem_to_gmem(refs.lse_tile.at[w], refs.lse.at[b, h, rows])
    plgpu.wait_smem_to_gmem(0)


def body(*args: Any, st: Static) -> None:
    """A thread block: one tile of query rows of one (row, KV head)."""
    names = (field.name for field in dataclasses.fields(Refs))
    refs = Refs(**dict(zip(names, args, strict=True)))
    b, h = lax.axis_index("row"), lax.axis_index("kv_head")
    # The last queries see the longest context: their tiles start first.
    first_row = (st.num_tiles - 1 - lax.axis_index("tile")) * st.config.tile_rows
    span = span_of(refs, st, b, first_row, st.config.tile_rows)
    consumers = st.config.num_consumers

    @pl.when(lax.axis_index("warpgroup") < consumers)
    def _():
        if consumers == 2:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(refs, st, b, h, first_row, span)

    @pl.when(lax.axis_index("warpgroup") == consumers)
    def _():
        if consumers == 2:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce(refs, st, b, h, span)
