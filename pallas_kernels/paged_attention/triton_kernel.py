"""The body of the Pallas Triton attention kernel; triton.py has the op and the algorithm."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.triton_config import TritonConfig, next_power_of_two

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What the kernel is compiled for; letters as in docs/design.md."""

    num_new: int  # T
    group: int  # G
    num_kv_heads: int  # K
    block_size: int  # S
    head_dim: int  # D
    dtype: Any  # of the products' operands
    interpret: bool
    config: TritonConfig

    @property
    def padded_dim(self) -> int:
        """Channels of a loaded tile."""
        return next_power_of_two(self.head_dim)

    @property
    def defers_sum(self) -> bool:
        """Whether weights are summed over positions once, at the end, not across warps a tile."""
        return self.config.rows <= 16


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Sums:
    """Online softmax so far, in base 2: weights are exp2(score - top). R rows of a tile."""

    top: Array  # [R]
    weight: Array  # [R], or [R, tokens] (see Static.defers_sum)
    value: Array  # [R, D]


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Queries:
    """The query rows of a program; row r of a KV head is new token r // G, head r % G."""

    batch_row: Array
    kv_head: Array
    q: Array  # [R, D]
    pos: Array  # [R], position in the context
    inside: Array  # [R], whether the row exists
    valid: Array  # [R], and holds a query
    head_row: Array  # [R], row in the output [B*T*H, D]
    head: Array  # [R]


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Span:
    """Tiles of a program; `start <= position < stop` is what any of its queries sees."""

    start: Array
    stop: Array
    first: Array  # its first tile, of the two loops together
    num_front: Array  # masked tiles before the whole ones
    num_whole: Array
    num_back: Array  # and after


def attend(
    q_ref,  # [B*T*H, D]
    kv_ref,  # [N*2*K*S, D]
    scales_ref,  # [N*2*K*S] or None
    tables_ref,  # [B, M]
    kv_lens_ref,  # [B]
    q_lens_ref,  # [B]
    scale_ref,  # [1]
    window_ref,  # [1] or None
    soft_cap_ref,  # [1] or None
    sinks_ref,  # [H] or None
    out_ref,  # [splits*B*T*H, D]
    lse_ref,  # [splits*B*T*H]
    *,
    static: Static,
) -> None:
    """One program: a tile of query rows against its split's share of the context."""
    window = None if window_ref is None else window_ref[0]
    queries = _load_queries(q_ref, kv_lens_ref, q_lens_ref, static)
    span = _span(kv_lens_ref, q_lens_ref, window, static)
    score = functools.partial(
        _scores,
        scale=scale_ref[0],
        soft_cap=None if soft_cap_ref is None else soft_cap_ref[0],
        queries=queries,
        static=static,
    )

    def attend_tile(tile, sums: Sums, masked: bool) -> Sums:
        pos = tile * static.config.tokens + jnp.arange(static.config.tokens, dtype=jnp.int32)
        blocks = functools.partial(_blocks, tables_ref, queries.batch_row, tile, static)
        row = _pool_rows(blocks(span if masked else None), queries.kv_head, tile, static)
        readable = (pos >= span.start) & (pos < span.stop) if masked else None
        value_row = row + static.num_kv_heads * static.block_size
        k = _load_tile(kv_ref, row, None, static)
        v = _load_values(kv_ref, value_row, readable, static)
        s = score(k, _load_scales(scales_ref, row, None))
        if readable is not None:
            seen = readable[None, :] & (pos[None, :] <= queries.pos[:, None])  # [R, tokens]
            if window is not None:
                seen &= pos[None, :] > queries.pos[:, None] - window
            s = jnp.where(seen, s, -jnp.inf)
        v_scale = _load_scales(scales_ref, value_row, readable)
        return _accumulate(sums, s, v, v_scale, static)

    def attend_edge(i, sums: Sums) -> Sums:
        tile = span.first + i + jnp.where(i < span.num_front, 0, span.num_whole)
        return attend_tile(tile, sums, masked=True)

    R, D = static.config.rows, static.padded_dim
    sums = Sums(
        jnp.full((R,), LOWEST, jnp.float32),
        jnp.zeros((R, static.config.tokens) if static.defers_sum else (R,), jnp.float32),
        jnp.zeros((R, D), jnp.float32),
    )
    whole = span.first + span.num_front
    sums = lax.fori_loop(
        whole, whole + span.num_whole, functools.partial(attend_tile, masked=False), sums
    )
    sums = lax.fori_loop(0, span.num_front + span.num_back, attend_edge, sums)
    _store(out_ref, lse_ref, sinks_ref, sums, queries, static)


def _load_queries(q_ref, kv_lens_ref, q_lens_ref, static: Static) -> Queries:
    R, G, K = static.config.rows, static.group, static.num_kv_heads
    b, kv_head = pl.program_id(1), lax.rem(pl.program_id(0), jnp.int32(K))
    r = _row_tile(static) * R + jnp.arange(R, dtype=jnp.int32)
    t, head = lax.div(r, jnp.int32(G)), kv_head * G + lax.rem(r, jnp.int32(G))
    inside = t < static.num_new
    head_row = (b * static.num_new + t) * (G * K) + head
    kv_len, q_len = kv_lens_ref[b], q_lens_ref[b]
    return Queries(
        batch_row=b,
        kv_head=kv_head,
        q=_load_tile(q_ref, head_row, inside, static).astype(static.dtype),
        pos=kv_len - q_len + t,
        inside=inside,
        valid=t < q_len,
        head_row=head_row,
        head=head,
    )


def _row_tile(static: Static) -> Array:
    """Programs of one KV head come one after another, as they read the same blocks."""
    return lax.div(pl.program_id(0), jnp.int32(static.num_kv_heads))


def _span(kv_lens_ref, q_lens_ref, window, static: Static) -> Span:
    b, split = pl.program_id(1), pl.program_id(2)
    tokens, splits = static.config.tokens, static.config.splits
    kv_len, q_len = kv_lens_ref[b], q_lens_ref[b]
    first_row = _row_tile(static) * static.config.rows
    first_t = lax.div(first_row, jnp.int32(static.group))
    last_t = lax.div(first_row + static.config.rows - 1, jnp.int32(static.group))
    first_pos = kv_len - q_len + first_t
    last_pos = kv_len - q_len + jnp.minimum(last_t, q_len - 1)

    # In tiles: begin <= lo <= hi <= end, whole to every query between lo and hi.
    start = jnp.int32(0) if window is None else jnp.maximum(first_pos - window + 1, 0)
    start = jnp.where(first_t < q_len, start, 0)
    stop = jnp.where(first_t < q_len, last_pos + 1, 0)
    begin, end = lax.div(start, jnp.int32(tokens)), _cdiv(stop, tokens)
    lo = begin if window is None else _cdiv(jnp.maximum(last_pos - window + 1, 0), tokens)
    hi = lax.div(first_pos + 1, jnp.int32(tokens))
    share = end - begin
    end = begin + lax.div(share * (split + 1), jnp.int32(splits))
    begin = begin + lax.div(share * split, jnp.int32(splits))
    lo = jnp.clip(lo, begin, end)
    hi = jnp.clip(hi, lo, end)
    return Span(start, stop, begin, num_front=lo - begin, num_whole=hi - lo, num_back=end - hi)


def _cdiv(x: Array, n: int) -> Array:
    return lax.div(x + (n - 1), jnp.int32(n))


def _blocks(tables_ref, batch_row, tile, static: Static, span: Span | None) -> Array:
    """The tile's block ids, of blocks in use only: others are replaced by their neighbours."""
    S, tokens = static.block_size, static.config.tokens
    if tokens <= S:
        return tables_ref[batch_row, lax.div(tile * tokens, jnp.int32(S))]
    n = tokens // S
    column = tile * n + jnp.arange(n, dtype=jnp.int32)
    if span is None:
        return tables_ref[batch_row, column]
    first, last = lax.div(span.start, jnp.int32(S)), lax.div(span.stop - 1, jnp.int32(S))
    return tables_ref[batch_row, jnp.clip(column, first, last)]


def _pool_rows(blocks: Array, kv_head: Array, tile: Array, static: Static) -> Array:
    """The pool's rows [tokens] with the tile's keys; values are K * S rows further on."""
    K, S, tokens = static.num_kv_heads, static.block_size, static.config.tokens
    row = blocks * (2 * K * S) + kv_head * S
    if tokens <= S:
        slot = lax.rem(tile * tokens, jnp.int32(S))
        return row + slot + jnp.arange(tokens, dtype=jnp.int32)
    return (row[:, None] + jnp.arange(S, dtype=jnp.int32)).reshape(tokens)


def _load_tile(ref, row: Array, mask: Array | None, static: Static) -> Array:
    """Rows of `[rows, D]`, padded to a power of two; zeros where masked or padded."""
    D, padded = static.head_dim, static.padded_dim
    if padded == D and mask is None:
        return ref[row]
    shape = (*row.shape, padded)
    channel = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), shape)
    wanted = channel < D
    if mask is not None:
        inside = jnp.broadcast_to(mask[..., None], shape)
        wanted = inside if padded == D else wanted & inside
    row = jnp.broadcast_to(row[..., None], shape)
    return plgpu.load(ref.at[row, channel], mask=wanted, other=jnp.zeros((), ref.dtype))


def _load_values(ref, row: Array, mask: Array | None, static: Static) -> Array:
    """As `_load_tile`. 8-bit values come in halves: as one array the compiler would lay them out
    for the product they enter later, as 16-bit numbers, and copy them 4 bytes at a time.
    """
    if ref.dtype.itemsize > 1:
        return _load_tile(ref, row, mask, static)
    halves = (2, row.shape[0] // 2)
    row = row.reshape(halves)  # [2, tokens / 2]
    mask = None if mask is None else mask.reshape(halves)
    v = _load_tile(ref, row, mask, static)  # [2, tokens / 2, D]
    return v.reshape(-1, static.padded_dim)  # [tokens, D]


def _load_scales(ref, row: Array, mask: Array | None) -> Array | None:
    if ref is None or mask is None:
        return None if ref is None else ref[row]
    return plgpu.load(ref.at[row], mask=mask, other=0.0)


def _scores(k, k_scale, *, scale, soft_cap, queries: Queries, static: Static) -> Array:
    """Scores [R, tokens], in base 2."""
    s = _dot(queries.q, k.astype(static.dtype), static, trans_b=True)
    if k_scale is not None:
        s = s * k_scale[None, :]
    if soft_cap is None:
        return s * (scale * LOG2_E)
    return jnp.tanh(s * (scale / soft_cap)) * (soft_cap * LOG2_E)


def _accumulate(sums: Sums, s, v, v_scale, static: Static) -> Sums:
    """One step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867)."""
    top = jnp.maximum(sums.top, s.max(axis=1))
    weight = _exp2(s - top[:, None], static)  # [R, tokens]
    decay = _exp2(sums.top - top, static)
    if static.defers_sum:
        total = sums.weight * decay[:, None] + weight
    else:
        total = sums.weight * decay + weight.sum(axis=1)
    if v_scale is not None:
        weight = weight * v_scale[None, :]
    value = _dot(weight.astype(static.dtype), v.astype(static.dtype), static)
    return Sums(top, total, sums.value * decay[:, None] + value)


def _dot(a: Array, b: Array, static: Static, *, trans_b: bool = False) -> Array:
    precision = None
    if static.interpret:
        precision = lax.Precision.HIGHEST
    elif static.dtype == jnp.float32:
        # Three products need both halves of a in registers, which hold 128 channels of them.
        tf32 = lax.DotAlgorithmPreset
        precision = tf32.TF32_TF32_F32_X3 if static.padded_dim <= 128 else tf32.TF32_TF32_F32
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def _exp2(x: Array, static: Static) -> Array:
    """exp2 of the multifunction unit; `jnp.exp2` adds three instructions for subnormal results."""
    if static.interpret:
        return jnp.exp2(x)
    [y] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def _store(out_ref, lse_ref, sinks_ref, sums: Sums, queries: Queries, static: Static) -> None:
    """Write the tile's output and natural-log lse; zeros and -inf for padded queries."""
    total = sums.weight.sum(axis=1) if static.defers_sum else sums.weight
    attended = queries.valid & ~(total <= 0)  # NaN is to stay visible
    lse = jnp.where(attended, (sums.top + jnp.log2(total)) * LN_2, -jnp.inf)
    if sinks_ref is not None:
        sink = plgpu.load(sinks_ref.at[queries.head], mask=queries.inside, other=0.0)
        total = total + _exp2(sink * LOG2_E - sums.top, static)
    share = jnp.where(attended, 1.0 / jnp.where(attended, total, 1.0), 0.0)
    out = jnp.where(attended[:, None], sums.value * share[:, None], 0.0)
    num_rows = pl.num_programs(1) * static.num_new * static.group * static.num_kv_heads
    row = pl.program_id(2) * num_rows + queries.head_row
    plgpu.store(lse_ref.at[row], lse, mask=queries.inside)
    shape = (static.config.rows, static.padded_dim)
    channel = jnp.broadcast_to(jnp.arange(static.padded_dim, dtype=jnp.int32), shape)
    inside = queries.inside[:, None] & (channel < static.head_dim)
    row = jnp.broadcast_to(row[:, None], shape)
    plgpu.store(out_ref.at[row, channel], out.astype(out_ref.dtype), mask=inside)
