"""JAX's own deprecated GPU paged attention at the same shapes, for comparison."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax_scripts.aot.cases import CONTEXT, NUM_KV_HEADS, NUM_ROWS, Case, Program
from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES

TILE_TOKENS = 128  # its default: 8 pages, of 16 tokens here
# Eight warps are its default. With four a thread has more registers, but more thread blocks are
# resident: more bytes in flight, and fewer instructions in all.
NUM_WARPS = {"jax": 4, "jax8": 8}
NUM_STAGES = 2
NUM_SPLITS = 8


def jax_program(case: Case) -> Program:
    """Its decode attention.

    Raises:
        ValueError: anything but decode.
    """
    if case.kind != "decode":
        raise ValueError(f"kind is {case.kind!r}; JAX's own kernel has only decode")
    with warnings.catch_warnings():
        # Its module warns that it is deprecated, and so does the Triton backend that it imports.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def run(q, k, v, tables, lengths, k_scales, v_scales):
        return paged_attention(
            q,
            k,
            v,
            tables,
            lengths,
            k_scales,
            v_scales,
            block_h=16,
            pages_per_compute_block=max(1, TILE_TOKENS // case.block_size),
            k_splits=NUM_SPLITS,
            num_warps=NUM_WARPS[case.backend],
            num_stages=NUM_STAGES,
        )

    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    pages = (NUM_KV_HEADS, case.num_blocks, case.block_size)
    pool = shape(*pages, case.head_dim, dtype=jnp.dtype(case.kv_dtype))
    scales = shape(*pages, dtype=jnp.float32) if case.kv_dtype in QUANTIZED_DTYPES else None
    heads = NUM_KV_HEADS * case.group
    q = shape(NUM_ROWS, heads, case.head_dim, dtype=jnp.dtype(case.q_dtype))
    tables = shape(NUM_ROWS, CONTEXT // case.block_size)
    return Program(run=run, args=(q, pool, pool, tables, shape(NUM_ROWS), scales, scales))
