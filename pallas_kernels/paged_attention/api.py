"""`paged_attention`: attention of new tokens over a paged KV pool, on any backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import Backend, gpu_backend, pick_backend
from pallas_kernels.broadcasting import broadcasts
from pallas_kernels.devices import current_device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.validate import check_paged_attention
from pallas_kernels.paged_attention.xla import paged_attention_xla

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.work import Work


PACKAGE = "pallas_kernels.paged_attention"

BACKENDS = {
    "mosaic": lambda: gpu_backend(f"{PACKAGE}.mosaic", "paged_attention_mosaic"),
    "triton": lambda: gpu_backend(f"{PACKAGE}.triton", "paged_attention_triton"),
    "xla": lambda: Backend(run=paged_attention_xla),
    "reference": lambda: Backend(run=paged_attention_reference),
}


@broadcasts
def paged_attention(
    q: Float[Array, "B T H D"],
    kv_blocks: Float[Array, "N 2 K S D"],
    block_tables: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    scale: float | Array | None = None,
    window: int | Array | None = None,
    soft_cap: float | Array | None = None,
    sinks: Float[Array, "H"] | None = None,
    kv_scales: Float[Array, "N 2 K S"] | None = None,
    score_fn: Callable[..., Array] | None = None,
    return_lse: bool = False,
    work: Work | None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Causal attention of each row's new tokens over its context, read through block tables.

    Row b's queries are the last `q_lens[b]` of its `kv_lens[b]` positions. In words of a loop::

        for b, t, h in rows, range(q_lens[b]), heads:
            q_pos = kv_lens[b] - q_lens[b] + t
            for k_pos in range(max(0, q_pos - window + 1), q_pos + 1):
                block, slot = block_tables[b, k_pos // S], k_pos % S
                k, v = kv_blocks[block, :, h // (H // K), slot]
                score = dot(q[b, t, h], k) * scale
                score = soft_cap * tanh(score / soft_cap)
                score = score_fn(score, b, h, q_pos, k_pos)
            out[b, t, h] = sum(exp(score) * v) / (sum(exp(score)) + exp(sinks[h]))
            lse[b, t, h] = log(sum(exp(score)))

    Nothing else is read: positions past `kv_lens[b]`, before the window, and table entries past
    `ceil(kv_lens[b] / S)` may hold anything (NaN, -1). Padded queries (`t >= q_lens[b]`) and rows
    of length 0 return zeros and an lse of -inf. Scores and sums are float32 on every backend.

    Outside `jit` the values are checked. Inside it nothing is: lengths are clamped to
    `0 <= kv_lens <= M*S` and `0 <= q_lens <= min(T, kv_lens)`, table entries in use to `0..N-1`.

    Args:
        q: new tokens' queries, float32, bfloat16 or float16. Where the pool stores D padded with
            zeros, q may have the model's own, smaller D.
        kv_blocks: the pool, K at index 0 and V at 1 of the second axis; a float dtype, or int8
            or float8_e4m3fn with `kv_scales`.
        block_tables: each row's blocks in logical order, int32.
        kv_lens: positions of context, this step's tokens included, int32.
        q_lens: new tokens in the row, int32.
        scale: factor of the scores; `D ** -0.5` by default, with q's D.
        window: keys a query sees, its own included; an integer scalar, traced or not.
        soft_cap: bound of `soft_cap * tanh(score / soft_cap)`.
        sinks: one extra logit a head, in the denominator only.
        kv_scales: float32 scales of an 8-bit pool, one a token and head: what is stored, times
            its scale, is the key or value.
        score_fn: elementwise change of the scores, `(score, row, head, q_pos, k_pos) -> score`,
            on arrays that broadcast to the score's shape; it may return -inf.
        return_lse: also return the log of the sum over attended scores, without the sink.
        work: what `plan_attention` made of the same lengths, once for all layers of a step. Only
            "mosaic" uses one, and makes its own in each call that brings none.
        backend: "mosaic" (Pallas Mosaic GPU), "triton" (Pallas Triton), "xla" (fast on CPU, runs
            anywhere), "reference" (plain, float32), or None: the best one that takes the call.
            A named backend never falls back to another.
        interpret: run "mosaic" and "triton" in Pallas's interpreter, on any device: for tests.

    Returns:
        The output in q's dtype, or `(output, lse)` with a float32 lse.

    Raises:
        ValueError: a shape, dtype or value that does not fit, or an unknown backend.
        NotImplementedError: the named backend cannot take the call here; says why.
    """
    check_paged_attention(
        q,
        kv_blocks,
        block_tables,
        kv_lens,
        q_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_scales=kv_scales,
    )
    q, kv_blocks = jnp.asarray(q), jnp.asarray(kv_blocks)
    head_dim, padded_dim = q.shape[-1], kv_blocks.shape[-1]
    call = AttentionCall.of(q, kv_blocks, block_tables, window=window, score_fn=score_fn)
    run = pick_backend("paged_attention", backend, BACKENDS, call, interpret=interpret)
    if head_dim < padded_dim:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padded_dim - head_dim)))
    if work is not None and getattr(run, "func", None) is BACKENDS["mosaic"]().run:
        run = functools.partial(run, work=work)
    out, lse = run(
        q,
        kv_blocks,
        jnp.asarray(block_tables),
        jnp.asarray(kv_lens),
        jnp.asarray(q_lens),
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else jnp.asarray(sinks),
        kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
        score_fn=score_fn,
    )
    out = out[..., :head_dim]
    return (out, lse) if return_lse else out


@broadcasts
def plan_attention(
    kv_blocks: Shaped[Array, "N 2 K S D"] | jax.ShapeDtypeStruct,
    kv_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    num_heads: int,
    num_new: int,
    table_width: int,
    window: int | Array | None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Work | None:
    """What the layers of a step can share of `paged_attention`: made once, passed as `work`.

    Args:
        kv_blocks: the pool; only its shape and dtype matter.
        kv_lens: positions of context, this step's tokens included, int32.
        q_lens: new tokens in the row, int32.
        num_heads: query heads (H).
        num_new: padded new tokens a row (T).
        table_width: blocks a row may have (M).
        window: the window of all layers; None where they have none or differ.
        backend: as in `paged_attention`.
        interpret: likewise.

    Returns:
        The work list of the mosaic decode kernel, or None where another kernel will run.
    """
    device = current_device()
    if interpret or not device.is_cuda or backend not in (None, "mosaic"):
        return None
    from pallas_kernels.paged_attention import mosaic

    num_blocks, _, num_kv_heads, block_size, head_dim = kv_blocks.shape
    call = AttentionCall(
        num_rows=kv_lens.shape[0],
        num_new=num_new,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        table_width=table_width,
        num_blocks=num_blocks,
        q_dtype=str(kv_blocks.dtype),  # see mosaic.plan
        kv_dtype=str(kv_blocks.dtype),
    )
    return mosaic.plan(call, kv_lens, q_lens, window=window, device=device)
