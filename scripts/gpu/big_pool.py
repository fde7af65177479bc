"""A pool of more than 2**31 elements whose last blocks are read, written and copied."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.api import BACKENDS as COPY
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import BACKENDS as WRITE
from pallas_kernels.paged_attention import paged_attention

from .cases import DTYPES, TOLERANCES
from .numerics import compare
from .worker import Context, Item, Prepared, Programs, lower, use

K, S, D, GROUP, ROWS, ROW_BLOCKS = 8, 16, 128, 4, 2, 12
REHEARSAL_BLOCKS = 40


def big_pool_items(context: Context) -> list[Item]:
    """One item a backend: 32-bit offsets would read the pool's start, which is NaN."""
    return [
        Item(
            item_id=f"pool over 2**31/{backend}",
            section="numerics",
            contender=backend,
            prepare=functools.partial(_prepare, context, backend),
        )
        for backend in context.backends[: 2 if context.rehearsal else None]
    ]


def _prepare(context: Context, backend: str) -> Prepared:
    heads, dim = (1, 64) if context.rehearsal else (K, D)
    block = 2 * heads * S * dim
    N = REHEARSAL_BLOCKS if context.rehearsal else 2**31 // block + 64
    pool_bytes = 2 * N * block
    used = ROWS * ROW_BLOCKS
    tables = (N - 1 - np.random.default_rng(0).permutation(used)).astype(np.int32)
    tables = tables.reshape(ROWS, ROW_BLOCKS)
    kv_lens = np.array([ROW_BLOCKS * S, ROW_BLOCKS * S - 5], np.int32)
    ones = np.ones(ROWS, np.int32)
    interpret = context.rehearsal

    def fill(tail: jax.Array) -> jax.Array:
        pool = jnp.full((N, 2, heads, S, dim), jnp.nan, jnp.bfloat16)
        return jax.lax.dynamic_update_slice(pool, tail, (N - used, 0, 0, 0, 0))

    def change(pool: jax.Array, k: jax.Array, slots: jax.Array, pairs: jax.Array) -> jax.Array:
        """Write the last slots, then copy a block of the end to another near the end."""
        write, copy = (backend if backend in table else None for table in (WRITE, COPY))
        pool = kv_write(pool, k, k, slots, jnp.asarray(ones), backend=write, interpret=interpret)
        copied = block_copy(pool[None], pairs[0], pairs[1], backend=copy, interpret=interpret)
        assert isinstance(copied, jax.Array)  # no scales were given
        return copied[0]

    def attend(q: jax.Array, pool: jax.Array, tables: jax.Array, name: str) -> Any:
        return paged_attention(
            q,
            pool,
            tables,
            jnp.asarray(kv_lens),
            jnp.asarray(ones),
            return_lse=True,
            backend=name,
            interpret=interpret,
        )

    rng = np.random.default_rng(1)

    def draw(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32).astype(DTYPES["bfloat16"])

    tail, q = draw(used, 2, heads, S, dim), draw(ROWS, 1, GROUP * heads, dim)
    k = draw(ROWS, 1, heads, dim)
    # The last token of each row is written; then the first row's first block is copied over the
    # second row's first.
    last = kv_lens - 1
    slots = (tables[[0, 1], last // S] * S + last % S)[:, None]
    pairs = tables[:, :1]
    shape = jax.ShapeDtypeStruct((N, 2, heads, S, dim), jnp.bfloat16)
    program = lower(jax.jit(functools.partial(attend, name=backend)), q, shape, tables)
    changed = lower(jax.jit(change, donate_argnums=0), shape, k, slots, pairs)

    def run(programs: Programs) -> dict[str, Any]:
        if not context.rehearsal and pool_bytes * 1.3 > free_bytes():
            reason = f"{pool_bytes} bytes do not fit in {free_bytes()}"
            return {"status": "skipped", "reason": reason}
        pool = use(programs, "change")(jax.jit(fill)(tail), k, slots, pairs)
        got = use(programs, "attend")(q, pool, tables)
        del pool
        small = jnp.asarray(tail)
        for b in range(ROWS):
            at = int(tables[b, last[b] // S]) - (N - used)
            small = small.at[at, :, :, last[b] % S].set(k[b, 0])
        first, second = (int(x) - (N - used) for x in tables[:, 0])
        small = small.at[second].set(small[first])
        wanted = attend(jnp.asarray(q), small, jnp.asarray(tables - (N - used)), "reference")
        fields = compare(jax.device_get(got), jax.device_get(wanted), TOLERANCES["bfloat16"])
        return {**fields, "elements": N * block}

    return Prepared(programs={"attend": program, "change": changed}, run=run)


def free_bytes() -> int:
    """Bytes that the device still has, or none known: then plenty."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return 2**62
    return stats["bytes_limit"] - stats["bytes_in_use"]
