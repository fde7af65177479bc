"""The one argument check of `paged_attention`, shared by every backend.

Shapes and dtypes are known while tracing and are always checked. Values are checked only when
they are concrete and the call is not traced, so that nothing is added to a compiled step: inside
`jit` lengths are clamped instead (`clamp_lens`).
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
MAX_ROW_INDEX = 2**31


def is_concrete(x: Any) -> bool:
    """Whether `x` holds values that the host may read (not a tracer or a bare shape)."""
    return not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)


def check_array(name: str, x: Any) -> None:
    """Raise ValueError unless `x` is an array (a list is none)."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise ValueError(f"{name} is a {type(x).__name__}; must be an array")


def check_float(name: str, x: Any) -> None:
    """Raise ValueError unless `x` has one of `FLOAT_DTYPES`."""
    check_array(name, x)
    if str(x.dtype) not in FLOAT_DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}; must be one of {', '.join(FLOAT_DTYPES)}")


def check_int32(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `x` is int32 of exactly `shape`."""
    check_array(name, x)
    if str(x.dtype) != "int32":
        raise ValueError(f"{name} has dtype {x.dtype}; must be int32")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; must be {shape}")


def check_kv_blocks(kv_blocks: Any, kv_scales: Any = None) -> None:
    """Raise ValueError unless `kv_blocks` is a pool `[N, 2, K, S, D]` that int32 can index.

    An 8-bit pool must come with its scales `[N, 2, K, S]`, and no other pool with any.
    """
    check_array("kv_blocks", kv_blocks)
    shape = tuple(kv_blocks.shape)
    if str(kv_blocks.dtype) not in QUANTIZED_DTYPES:
        if str(kv_blocks.dtype) not in FLOAT_DTYPES:
            allowed = ", ".join((*FLOAT_DTYPES, *QUANTIZED_DTYPES))
            raise ValueError(f"kv_blocks has dtype {kv_blocks.dtype}; must be one of {allowed}")
        if kv_scales is not None:
            raise ValueError(
                f"kv_scales is given but kv_blocks has dtype {kv_blocks.dtype}; only pools of "
                f"{' or '.join(QUANTIZED_DTYPES)} have scales"
            )
    elif kv_scales is None:
        raise ValueError(f"kv_scales is None; a pool of {kv_blocks.dtype} needs its scales")
    elif str(kv_scales.dtype) != "float32" or tuple(kv_scales.shape) != shape[:4]:
        raise ValueError(
            f"kv_scales is {kv_scales.dtype}{list(kv_scales.shape)}; must be "
            f"float32{list(shape[:4])}"
        )
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise ValueError(f"kv_blocks has shape {shape}; must be [N, 2, K, S, D], no axis empty")
    if np.prod(shape[:4], dtype=np.int64) >= MAX_ROW_INDEX:
        raise ValueError(f"kv_blocks has shape {shape}; N * 2 * K * S must be under 2**31")


def check_paged_attention(
    q: Any,
    kv_blocks: Any,
    block_tables: Any,
    kv_lens: Any,
    q_lens: Any,
    *,
    scale: Any = None,
    window: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    kv_scales: Any = None,
) -> None:
    """Check every argument of `paged_attention`; the errors are those listed there."""
    check_kv_blocks(kv_blocks, kv_scales)
    check_float("q", q)
    K, D = kv_blocks.shape[2], kv_blocks.shape[4]
    if q.ndim != 4 or min(q.shape) < 1:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [B, T, H, D], no axis empty")
    B, _, H, _ = q.shape
    if q.shape[3] > D:
        raise ValueError(f"q has head dim {q.shape[3]}; must be at most the {D} of kv_blocks")
    if H % K:
        raise ValueError(f"q has {H} heads; must be a multiple of the {K} heads of kv_blocks")
    check_array("block_tables", block_tables)
    if block_tables.ndim != 2 or block_tables.shape[1] < 1:
        raise ValueError(f"block_tables has shape {tuple(block_tables.shape)}; must be [B, M], M>0")
    check_int32("block_tables", block_tables, (B, block_tables.shape[1]))
    check_int32("kv_lens", kv_lens, (B,))
    check_int32("q_lens", q_lens, (B,))
    if sinks is not None:
        check_float("sinks", sinks)
        if tuple(sinks.shape) != (H,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}; must be ({H},)")
    _check_scalars(scale=scale, window=window, soft_cap=soft_cap)
    if not any(isinstance(x, jax.core.Tracer) for x in (q, kv_blocks)):
        _check_values(q, kv_blocks, block_tables, kv_lens, q_lens)


def _check_scalars(*, scale: Any, window: Any, soft_cap: Any) -> None:
    for name, x in (("scale", scale), ("window", window), ("soft_cap", soft_cap)):
        if x is not None and np.shape(x) != ():
            raise ValueError(f"{name} has shape {np.shape(x)}; must be a scalar")
    if window is not None:
        if not jnp.issubdtype(jnp.result_type(window), jnp.integer):
            raise ValueError(f"window has dtype {jnp.result_type(window)}; must be an integer")
        if is_concrete(window) and int(window) < 1:
            raise ValueError(f"window is {int(window)}; must be at least 1")
    if soft_cap is not None and is_concrete(soft_cap) and not float(soft_cap) > 0:
        raise ValueError(f"soft_cap is {float(soft_cap)}; must be above 0")


def _check_values(q: Any, kv_blocks: Any, block_tables: Any, kv_lens: Any, q_lens: Any) -> None:
    T, N, S = q.shape[1], kv_blocks.shape[0], kv_blocks.shape[3]
    M = block_tables.shape[1]
    if not is_concrete(kv_lens):
        return
    lens = np.asarray(kv_lens)
    if lens.size and (lens.min() < 0 or lens.max() > M * S):
        raise ValueError(
            f"kv_lens has values {lens.min()}..{lens.max()}; must be within 0..{M * S} "
            f"(block_tables' width {M} times the block size {S})"
        )
    if is_concrete(q_lens):
        new = np.asarray(q_lens)
        bad = np.flatnonzero((new < 0) | (new > np.minimum(T, lens)))
        if bad.size:
            b = bad[0]
            raise ValueError(
                f"q_lens[{b}] is {new[b]}; must be within 0..min(T={T}, kv_lens[{b}]={lens[b]})"
            )
    if is_concrete(block_tables):
        tables = np.asarray(block_tables)
        used = np.arange(M) < -(-lens // S)[:, None]  # [B, M]
        bad = np.argwhere(used & ((tables < 0) | (tables >= N)))
        if bad.size:
            b, m = bad[0]
            raise ValueError(
                f"block_tables[{b}, {m}] is {tables[b, m]} and in use (kv_lens[{b}]={lens[b]}); "
                f"must be within 0..{N - 1}"
            )


def clamp_lens(
    kv_lens: Int[Array, "B"], q_lens: Int[Array, "B"], *, num_slots: int, max_new: int
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Lengths as a compiled call uses them: `kv_lens` in 0..num_slots (table width times block
    size) and `q_lens` in 0..min(max_new, kv_lens).
    """
    kv_lens = jnp.clip(kv_lens, 0, num_slots)
    return kv_lens, jnp.clip(q_lens, 0, jnp.minimum(max_new, kv_lens))
