"""The function of each case, and the shapes of its arguments."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax_scripts.aot.cases import (
    CONTEXT,
    NUM_COPIES,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_ROWS,
    PREFILL_ROWS,
    THEIRS,
    Case,
    Program,
)
from paged_jax_scripts.aot.jax_kernel import jax_program
from pallas_kernels.block_copy import block_copy, block_gather, block_scatter
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import plan_attention
from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES


def program(case: Case) -> Program:
    """The function of a case and the shapes of its arguments.

    Raises:
        ValueError: JAX's own kernel has no such case.
    """
    if case.backend in THEIRS:
        return jax_program(case)
    return _PROGRAMS[case.kind if not case.is_attention else "attention"](case)


def _shape(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _pool(case: Case, *leading: int) -> tuple[Any, Any]:
    """Blocks, and scales or None."""
    shape = (*leading, 2, NUM_KV_HEADS, case.block_size)
    blocks = _shape(*shape, case.head_dim, dtype=case.kv_dtype)
    scales = _shape(*shape, dtype="float32") if case.kv_dtype in QUANTIZED_DTYPES else None
    return blocks, scales


def _bytes(*arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays if x is not None)


def _rows(case: Case) -> tuple[int, int, int]:
    """B, T and the table's width M."""
    rows = PREFILL_ROWS if case.new_tokens > 8 else NUM_ROWS
    return rows, case.new_tokens, CONTEXT // case.block_size


def _attention(case: Case) -> Program:
    B, T, M = _rows(case)
    heads, dim = NUM_KV_HEADS * case.group, case.query_dim or case.head_dim
    blocks, scales = _pool(case, case.num_blocks)

    def run(q, blocks, scales, tables, kv_lens, q_lens):
        return paged_attention(
            q, blocks, tables, kv_lens, q_lens, kv_scales=scales, backend=case.backend
        )

    q = _shape(B, T, heads, dim, dtype=case.q_dtype)
    return Program(run=run, args=(q, blocks, scales, _shape(B, M), _shape(B), _shape(B)))


def _or_best(op, backend: str) -> Any:
    """The op by the named backend; where that has none, by the best one, as the cache does."""
    try:
        return op(backend)
    except NotImplementedError:
        return op(None)


def _write(blocks, scales, k, v, slots, q_lens, *, backend):
    if scales is None:
        return kv_write(blocks, k, v, slots, q_lens, backend=backend), None
    return kv_write(blocks, k, v, slots, q_lens, kv_scales=scales, backend=backend)


def _kv_write(case: Case) -> Program:
    B, T, _ = _rows(case)
    blocks, scales = _pool(case, case.num_blocks)
    new = _shape(B, T, NUM_KV_HEADS, case.head_dim, dtype=case.q_dtype)
    return Program(
        run=functools.partial(_write, backend=case.backend),
        args=(blocks, scales, new, new, _shape(B, T), _shape(B)),
        donated=(0, 1),
        pool_bytes=_bytes(blocks, scales),
    )


def _block_copy(case: Case) -> Program:
    blocks, scales = _pool(case, NUM_LAYERS, case.num_blocks)

    def run(blocks, scales, src, dst):
        return _copy(blocks, scales, src, dst, backend=case.backend)

    return Program(
        run=run,
        args=(blocks, scales, _shape(NUM_COPIES), _shape(NUM_COPIES)),
        donated=(0, 1),
        pool_bytes=_bytes(blocks, scales),
    )


def _swap_out(case: Case) -> Program:
    blocks, scales = _pool(case, NUM_LAYERS, case.num_blocks)

    def run(blocks, scales, ids):
        return block_gather(blocks, ids, kv_scales=scales, backend=case.backend)

    return Program(run=run, args=(blocks, scales, _shape(NUM_COPIES)))


def _swap_in(case: Case) -> Program:
    blocks, scales = _pool(case, NUM_LAYERS, case.num_blocks)
    buffer, buffer_scales = _pool(case, NUM_LAYERS, NUM_COPIES)

    def run(blocks, scales, ids, buffer, buffer_scales):
        given = {"kv_scales": scales, "block_scales": buffer_scales}
        return block_scatter(blocks, ids, buffer, **given, backend=case.backend)

    return Program(
        run=run,
        args=(blocks, scales, _shape(NUM_COPIES), buffer, buffer_scales),
        donated=(0, 1),
        pool_bytes=_bytes(blocks, scales),
    )


def _copy(blocks, scales, src, dst, *, backend):
    if scales is None:
        return block_copy(blocks, src, dst, backend=backend), None
    return block_copy(blocks, src, dst, kv_scales=scales, backend=backend)


def _step(case: Case) -> Program:
    """A step's copies, then every layer's write and attention, the pool in the carry."""
    B, T, M = _rows(case)
    L, P = NUM_LAYERS, case.num_blocks
    blocks, scales = _pool(case, L, P)

    def run(blocks, scales, q, k, v, src, dst, tables, slots, kv_lens, q_lens):
        blocks, scales = _or_best(
            lambda backend: _copy(blocks, scales, src, dst, backend=backend), case.backend
        )
        pool = (blocks, scales)
        # A free reshape: layers are folded into the block ids.
        flat, flat_scales = jax.tree.map(
            lambda x: x.reshape(L * P, *x.shape[2:]),  # [L*P, 2, K, S, ...]
            pool,
        )
        lens = (kv_lens, q_lens)
        num_heads = NUM_KV_HEADS * case.group
        work = plan_attention(
            flat,
            *lens,
            num_heads=num_heads,
            num_new=T,
            table_width=tables.shape[1],
            backend=case.backend,
        )

        def layer(carry, xs):
            (flat, flat_scales), (q, k, v, index) = carry, xs
            slots_here = slots + index * P * case.block_size
            flat, flat_scales = _or_best(
                lambda backend: _write(
                    flat, flat_scales, k, v, slots_here, q_lens, backend=backend
                ),
                case.backend,
            )
            out = paged_attention(
                q,
                flat,
                tables + index * P,
                *lens,
                kv_scales=flat_scales,
                work=work,
                backend=case.backend,
            )
            return (flat, flat_scales), out

        xs = (q, k, v, jnp.arange(L, dtype=jnp.int32))
        carry, outs = jax.lax.scan(layer, (flat, flat_scales), xs)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), carry, pool), outs

    q = _shape(L, B, T, NUM_KV_HEADS * case.group, case.head_dim, dtype=case.q_dtype)
    new = _shape(L, B, T, NUM_KV_HEADS, case.head_dim, dtype=case.q_dtype)
    ids, lens = _shape(NUM_COPIES), _shape(B)
    return Program(
        run=run,
        args=(blocks, scales, q, new, new, ids, ids, _shape(B, M), _shape(B, T), lens, lens),
        donated=(0, 1),
        pool_bytes=_bytes(blocks, scales),
    )


_PROGRAMS = {
    "attention": _attention,
    "kv_write": _kv_write,
    "block_copy": _block_copy,
    "swap_out": _swap_out,
    "swap_in": _swap_in,
    "step": _step,
}
