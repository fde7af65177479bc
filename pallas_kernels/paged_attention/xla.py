"""`paged_attention` in plain XLA: online softmax over tiles of blocks, fast on CPU.

A row's context is read in two parts. The blocks at its ends (the last one, and with a window the
first one too) may hold slots that must not be read: they are gathered first, their values
masked. All blocks between them are wholly readable, so the loop over them needs no mask on the
values; where rows of a tile end earlier than others, they read a block of their own again, with
masked scores. What those blocks hold is finite as long as the row's own context is.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.paged_attention.tiles import pick_tiles
from pallas_kernels.paged_attention.validate import clamp_lens
from pallas_kernels.quantize import dequantize


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of each row; position p is readable iff start <= p < stop."""

    row: Int[Array, "B"]
    q: Float[Array, "B K G T D"]
    q_pos: Int[Array, "B T"]
    table: Int[Array, "B M"]
    start: Int[Array, "B"]
    stop: Int[Array, "B"]
    inner_start: Int[Array, "B"]  # first table column of the loop
    inner_stop: Int[Array, "B"]  # and the one after the last


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Sums:
    """Online softmax so far: weights are exp(score - top), 0 in place of an infinite top."""

    top: Float[Array, "B K G T"]
    weight: Float[Array, "B K G T"]
    value: Float[Array, "B K G T D"]


@dataclasses.dataclass(frozen=True)
class Pool:
    """The blocks that are read, with scales where they hold 8-bit elements."""

    kv_blocks: Shaped[Array, "N 2 K S D"]
    kv_scales: Float[Array, "N 2 K S"] | None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a score is made of a dot product."""

    scale: float | Array
    window: Array | None
    soft_cap: float | Array | None
    score_fn: Callable[..., Array] | None


def paged_attention_xla(
    q: Float[Array, "B T H D"],
    kv_blocks: Float[Array, "N 2 K S D"],
    block_tables: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    scale: float | Array,
    window: int | Array | None,
    soft_cap: float | Array | None,
    sinks: Float[Array, "H"] | None,
    kv_scales: Float[Array, "N 2 K S"] | None,
    score_fn: Callable[..., Array] | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there); returns the output and the lse."""
    B, T, H, D = q.shape
    K, S = kv_blocks.shape[2:4]
    M = block_tables.shape[1]
    window = None if window is None else jnp.asarray(window, jnp.int32)
    scoring = Scoring(scale, window, soft_cap, score_fn)
    kv_lens, q_lens = clamp_lens(kv_lens, q_lens, num_slots=M * S, max_new=T)
    rows = _rows(q, block_tables, kv_lens, q_lens, window=window, num_kv_heads=K, block_size=S)
    tiles = pick_tiles(
        num_rows=B,
        table_width=M,
        block_size=S,
        num_kv_heads=K,
        head_dim=D,
        num_scores=T * H,
        itemsize=kv_blocks.dtype.itemsize if kv_scales is None else 4,  # tiles are dequantised
    )
    pool = Pool(kv_blocks, kv_scales)
    sums = _attend_ends(rows, pool, scoring)
    sums = _attend_inner(rows, sums, pool, scoring, rows_in_tile=tiles.rows, n=tiles.blocks)
    out, lse = _finish(sums, sinks)
    new = (jnp.arange(T, dtype=jnp.int32) < q_lens[:, None])[:, :, None]  # [B, T, 1]
    out = jnp.where(new[..., None], _heads_last(out), 0.0).astype(q.dtype)
    return out, jnp.where(new, _heads_last(lse), -jnp.inf)


def _rows(q, block_tables, kv_lens, q_lens, *, window, num_kv_heads, block_size) -> Rows:
    B, T, H, D = q.shape
    K, S = num_kv_heads, block_size
    q_start = kv_lens - q_lens
    stop = jnp.where(q_lens > 0, kv_lens, 0)
    start = jnp.zeros_like(stop)
    if window is not None:
        start = jnp.clip(q_start - window + 1, 0, stop)
    return Rows(
        row=jnp.arange(B, dtype=jnp.int32),
        q=q.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4),  # [B, K, G, T, D]
        q_pos=q_start[:, None] + jnp.arange(T, dtype=jnp.int32),
        table=block_tables,
        start=start,
        stop=stop,
        inner_start=start if window is None else start // S + 1,
        inner_stop=jnp.maximum(stop - 1, 0) // S,
    )


def _attend_ends(rows: Rows, pool: Pool, scoring: Scoring) -> Sums:
    """Attend to each row's last block and, with a window, to its first."""
    S = pool.kv_blocks.shape[3]
    columns = rows.inner_stop[:, None]  # [B, E]
    if scoring.window is not None:
        first = (rows.start // S)[:, None]
        columns = jnp.concatenate([columns, first], axis=1)
    k, v = _gather(pool, jnp.take_along_axis(rows.table, columns, axis=1))
    k_pos = _positions(columns, S)
    readable = (k_pos >= rows.start[:, None]) & (k_pos < rows.stop[:, None])
    if scoring.window is not None:  # a first block that is also the last is read once
        once = (columns != rows.inner_stop[:, None]).at[:, 0].set(True)
        readable &= jnp.repeat(once, S, axis=1)
    v = jnp.where(readable[:, None, :, None], v, 0)
    shape = rows.q.shape[:-1]
    empty = Sums(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(rows.q.shape))
    return _attend(empty, rows, k, v, k_pos, readable, scoring)


def _attend_inner(
    rows: Rows, sums: Sums, pool: Pool, scoring: Scoring, *, rows_in_tile: int, n: int
) -> Sums:
    """Attend to the blocks between the ends, a few rows at a time, each to its longest."""
    B = rows.row.shape[0]
    R = rows_in_tile
    padding = -B % R
    if padding:
        rows, sums = jax.tree.map(
            lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), (rows, sums)
        )

    def attend_group(group, sums):
        at = group * R
        part, before = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, at, R, axis=0), (rows, sums)
        )
        after = _attend_tiles(part, before, pool, scoring, n=n)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=0), sums, after
        )

    if B <= R:
        sums = _attend_tiles(rows, sums, pool, scoring, n=n)
    else:
        sums = jax.lax.fori_loop(0, (B + padding) // R, attend_group, sums)
    return jax.tree.map(lambda x: x[:B], sums)


def _attend_tiles(rows: Rows, sums: Sums, pool: Pool, scoring: Scoring, *, n: int) -> Sums:
    S = pool.kv_blocks.shape[3]
    num_tiles = -(-jnp.max(rows.inner_stop - rows.inner_start) // n)

    def attend_tile(tile, sums):
        columns = rows.inner_start[:, None] + tile * n + jnp.arange(n, dtype=jnp.int32)
        inside = columns < rows.inner_stop[:, None]  # [B, n]
        columns = jnp.where(inside, columns, rows.inner_start[:, None])
        k, v = _gather(pool, jnp.take_along_axis(rows.table, columns, axis=1, mode="clip"))
        readable = jnp.repeat(inside, S, axis=1)
        return _attend(sums, rows, k, v, _positions(columns, S), readable, scoring)

    after = jax.lax.fori_loop(0, num_tiles, attend_tile, sums)
    # A row without inner blocks has read one that is not its own.
    own = (rows.inner_stop > rows.inner_start)[:, None, None, None, None]
    return dataclasses.replace(after, value=jnp.where(own, after.value, sums.value))


def _gather(
    pool: Pool, blocks: Int[Array, "B n"]
) -> tuple[Float[Array, "B K C D"], Float[Array, "B K C D"]]:
    """Keys and values of blocks, the ids clamped into the pool."""
    N, _, K, S, D = pool.kv_blocks.shape
    B, n = blocks.shape
    heads_of_pool = pool.kv_blocks.reshape(N * 2 * K, S * D)
    heads = jnp.arange(K, dtype=jnp.int32)[:, None]
    index = jnp.clip(blocks, 0, N - 1)[:, None] * (2 * K) + heads  # [B, K, n]
    index = index.reshape(B * K * n)  # one axis, so that it is shared out evenly among the cores
    k = heads_of_pool.at[index].get(mode="promise_in_bounds")
    v = heads_of_pool.at[index + K].get(mode="promise_in_bounds")
    # Without the barrier XLA fuses the reshape and copies D instead of S * D elements at a time.
    k, v = jax.lax.optimization_barrier((k, v))
    k, v = k.reshape(B, K, n * S, D), v.reshape(B, K, n * S, D)
    if pool.kv_scales is None:
        return k, v
    scales = pool.kv_scales.reshape(N * 2 * K, S)
    k_scale = scales.at[index].get(mode="promise_in_bounds").reshape(B, K, n * S)
    v_scale = scales.at[index + K].get(mode="promise_in_bounds").reshape(B, K, n * S)
    return dequantize(k, k_scale, jnp.float32), dequantize(v, v_scale, jnp.float32)


def _positions(columns: Int[Array, "B n"], block_size: int) -> Int[Array, "B C"]:
    slots = jnp.arange(block_size, dtype=jnp.int32)
    return (columns[:, :, None] * block_size + slots).reshape(columns.shape[0], -1)


def _attend(
    sums: Sums,
    rows: Rows,
    k: Float[Array, "B K C D"],
    v: Float[Array, "B K C D"],
    k_pos: Int[Array, "B C"],
    readable: Bool[Array, "B C"],
    scoring: Scoring,
) -> Sums:
    """One step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867)."""
    q = rows.q
    if q.dtype != k.dtype:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    B, K, G, T, D = q.shape
    C = k.shape[2]
    # One batch axis and one of queries: the form of product that XLA's CPU library does best.
    q, k, v = q.reshape(B * K, G * T, D), k.reshape(B * K, C, D), v.reshape(B * K, C, D)
    score = _dot("bqd,bcd->bqc", q, k).reshape(B, K, G, T, C)
    score = jnp.where(
        _mask(rows, k_pos, readable, scoring), _score(score, rows, k_pos, scoring), -jnp.inf
    )
    top = jnp.maximum(sums.top, score.max(axis=-1))
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(score - shift[..., None])
    decay = jnp.exp(sums.top - shift)
    value = _dot("bqc,bcd->bqd", weight.astype(v.dtype).reshape(B * K, G * T, C), v)
    return Sums(
        top=top,
        weight=sums.weight * decay + weight.sum(axis=-1),
        value=sums.value * decay[..., None] + value.reshape(B, K, G, T, D),
    )


def _dot(spec: str, x: Array, y: Array) -> Array:
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def _score(score: Float[Array, "B K G T C"], rows: Rows, k_pos: Array, scoring: Scoring) -> Array:
    score = score * jnp.asarray(scoring.scale, jnp.float32)
    if scoring.soft_cap is not None:
        cap = jnp.asarray(scoring.soft_cap, jnp.float32)
        score = cap * jnp.tanh(score / cap)
    if scoring.score_fn is not None:
        K, G = score.shape[1:3]
        head = jnp.arange(K * G, dtype=jnp.int32).reshape(K, G, 1, 1)
        score = scoring.score_fn(
            score,
            rows.row[:, None, None, None, None],
            head,
            rows.q_pos[:, None, None, :, None],
            k_pos[:, None, None, None, :],
        )
    return score


def _mask(rows: Rows, k_pos: Array, readable: Array, scoring: Scoring) -> Bool[Array, "B 1 1 T C"]:
    mask = readable[:, None]  # [B, T, C]
    if rows.q_pos.shape[1] > 1:  # a single query sees all that is readable
        q_pos = rows.q_pos[:, :, None]
        mask &= k_pos[:, None] <= q_pos
        if scoring.window is not None:
            mask &= k_pos[:, None] > q_pos - scoring.window
    return mask[:, None, None]


def _finish(
    sums: Sums, sinks: Float[Array, "H"] | None
) -> tuple[Float[Array, "B K G T D"], Float[Array, "B K G T"]]:
    """Output and lse; zeros and -inf where nothing was attended."""
    attended = sums.weight != 0  # NaN is to stay visible
    lse = jnp.where(attended, jnp.log(jnp.where(attended, sums.weight, 1.0)) + sums.top, -jnp.inf)
    weight, decay = sums.weight, 1.0
    if sinks is not None:
        K, G = sums.top.shape[1:3]
        sink = sinks.astype(jnp.float32).reshape(K, G, 1)
        top = jnp.maximum(sums.top, sink)
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        decay = jnp.exp(sums.top - shift)
        weight = weight * decay + jnp.exp(sink - shift)
        decay = decay[..., None]
    weight = jnp.where(attended, weight, 1.0)[..., None]
    return sums.value * decay / weight, lse


def _heads_last(x: Array) -> Array:
    """[B, K, G, T, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
