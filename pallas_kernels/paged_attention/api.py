"""`paged_attention`: attention of new tokens over a paged KV pool, on any backend."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import pick_backend
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.validate import check_paged_attention
from pallas_kernels.paged_attention.xla import paged_attention_xla

BACKENDS = {"xla": paged_attention_xla, "reference": paged_attention_reference}


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
    backend: str | None = None,
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
        q: new tokens' queries, float32, bfloat16 or float16.
        kv_blocks: the pool, K at index 0 and V at 1 of the second axis; any float dtype, any S.
        block_tables: each row's blocks in logical order, int32.
        kv_lens: positions of context, this step's tokens included, int32.
        q_lens: new tokens in the row, int32.
        scale: factor of the scores; `D ** -0.5` by default.
        window: keys a query sees, its own included; an integer scalar, traced or not.
        soft_cap: bound of `soft_cap * tanh(score / soft_cap)`.
        sinks: one extra logit a head, in the denominator only.
        kv_scales: scales of a quantised pool; on no backend so far.
        score_fn: elementwise change of the scores, `(score, row, head, q_pos, k_pos) -> score`,
            on arrays that broadcast to the score's shape; it may return -inf.
        return_lse: also return the log of the sum over attended scores, without the sink.
        backend: "reference" (plain, float32), "xla" (fast on CPU, runs anywhere), or None: the
            best one here. A named backend never falls back to another.

    Returns:
        The output in q's dtype, or `(output, lse)` with a float32 lse.

    Raises:
        ValueError: a shape, dtype or value that does not fit, or an unknown backend.
        NotImplementedError: a backend or `kv_scales` that is not available.
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
    )
    run = pick_backend("paged_attention", backend, BACKENDS)
    if kv_scales is not None:
        raise NotImplementedError("kv_scales: no backend reads quantised blocks")
    out, lse = run(
        jnp.asarray(q),
        jnp.asarray(kv_blocks),
        jnp.asarray(block_tables),
        jnp.asarray(kv_lens),
        jnp.asarray(q_lens),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else jnp.asarray(sinks),
        score_fn=score_fn,
    )
    return (out, lse) if return_lse else out
