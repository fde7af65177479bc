"""`paged_attention` for prefill chunks on Hopper: Pallas Mosaic GPU, WGMMA and bulk copies."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import kernel_device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_prefill_config import (
    MosaicPrefillConfig,
    pick_mosaic_prefill_config,
    unsupported_prefill,
)
from pallas_kernels.paged_attention.mosaic_prefill_kernel import Static, body, scratch_types
from pallas_kernels.paged_attention.validate import clamp_lens

__all__ = ["paged_attention_mosaic_prefill", "unsupported_prefill"]

LOG2E = math.log2(math.e)


def paged_attention_mosaic_prefill(
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
    kv_scales: None = None,
    config: MosaicPrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there); returns the output and the lse.

    The caller has asked `unsupported_prefill`. Queries, weights and the output are rounded to the
    pool's dtype, which the tensor cores multiply; scores and sums are float32.

    Args:
        q, kv_blocks, block_tables, kv_lens, q_lens: as in `paged_attention`; any T.
        scale, window, soft_cap, sinks: as in `paged_attention`; each may be traced.
        kv_scales: None; 8-bit pools are not taken.
        config: tile shapes; those of `pick_mosaic_prefill_config` by default.
        interpret: run in Pallas's interpreter, with race detection.
    """
    del kv_scales
    B, T, H, D = q.shape
    N, _, K, S, _ = kv_blocks.shape
    G = H // K
    if config is None:
        call = AttentionCall.of(q, kv_blocks, block_tables, window=window)
        config = pick_mosaic_prefill_config(call, kernel_device())
    num_tiles = -(-T * G // config.tile_rows)
    R = num_tiles * config.tile_rows  # query rows of a KV head, padding included
    st = Static(
        config=config,
        group=G,
        head_dim=D,
        block_size=S,
        num_blocks=N,
        num_tiles=num_tiles,
        has_window=window is not None,
        has_soft_cap=soft_cap is not None,
        has_sinks=sinks is not None,
        interpret=interpret,
    )
    factors, sign = _factors(scale, soft_cap)
    kv_lens, q_lens = clamp_lens(kv_lens, q_lens, num_slots=block_tables.shape[1] * S, max_new=T)
    out, lse = _kernel(st, num_rows=B, num_kv_heads=K, dtype=kv_blocks.dtype)(
        _rows_of(q * sign.astype(q.dtype), K, R).astype(kv_blocks.dtype),
        kv_blocks.reshape(N * 2, K * S, D),
        block_tables,
        kv_lens,
        q_lens,
        jnp.asarray(0 if window is None else window, jnp.int32).reshape(1),
        factors,
        _sinks_of_rows(sinks, K, R),
    )
    out = out[:, :, : T * G].reshape(B, K, T, G, D).swapaxes(1, 2).reshape(B, T, H, D)
    lse = lse[:, :, : T * G].reshape(B, K, T, G).swapaxes(1, 2).reshape(B, T, H)
    return out.astype(q.dtype), lse


def _kernel(st: Static, *, num_rows: int, num_kv_heads: int, dtype: Any) -> Callable[..., Any]:
    """The kernel, a function of the inputs of `Refs`, (q, ..., sinks) -> (out, lse)."""

    def mosaic_prefill(*refs: Any) -> None:  # the name that a profile shows
        body(*refs, st=st)

    B, K, R = num_rows, num_kv_heads, st.num_tiles * st.config.tile_rows
    return plgpu.kernel(
        mosaic_prefill,
        out_type=(
            jax.ShapeDtypeStruct((B, K, R, st.head_dim), dtype),
            jax.ShapeDtypeStruct((B, K, R), jnp.float32),
        ),
        # Tiles of one (row, KV head) run together and share its keys and values in the cache.
        grid=(B, K, st.num_tiles),
        grid_names=("row", "kv_head", "tile"),
        num_threads=st.config.num_consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types(st, dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if st.interpret else None,
    )


def _rows_of(q: Array, num_kv_heads: int, num_rows: int) -> Array:
    """Each KV head's queries as rows t * G + g, padded: [B, T, H, D] -> [B, K, R, D]."""
    B, T, H, D = q.shape
    G = H // num_kv_heads
    rows = q.reshape(B, T, num_kv_heads, G, D).swapaxes(1, 2)  # [B, K, T, G, D]
    rows = rows.reshape(B, num_kv_heads, T * G, D)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, num_rows - T * G), (0, 0)))


def _factors(scale: float | Array, soft_cap: float | Array | None) -> tuple[Array, Array]:
    """f32[2] for the kernel, and the sign of the scale, which the queries take on.

    Without a cap the scale, in base 2, above 0 so that it keeps a masked score's -inf. With one,
    scores are cap * tanh(x) = cap - 2 cap / (1 + exp(2x)): 2x in base 2, and the cap in base 2.
    """
    scale = jnp.asarray(scale, jnp.float32)
    size = jnp.abs(scale) * LOG2E
    if soft_cap is None:
        return jnp.stack([jnp.maximum(size, 1e-30), jnp.float32(0)]), jnp.sign(scale)
    cap = jnp.asarray(soft_cap, jnp.float32)
    return jnp.stack([2 * size / cap, cap * LOG2E]), jnp.sign(scale)


def _sinks_of_rows(sinks: Array | None, num_kv_heads: int, num_rows: int) -> Array:
    """The sink of each query row in base 2, f32[K, R]; not read where there are none."""
    if sinks is None:
        return jnp.zeros((1, 1), jnp.float32)
    by_head = (sinks.astype(jnp.float32) * LOG2E).reshape(num_kv_heads, -1)  # [K, G]
    return jnp.tile(by_head, (1, -(-num_rows // by_head.shape[1])))[:, :num_rows]
