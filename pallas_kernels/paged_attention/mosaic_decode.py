"""`paged_attention` for few new tokens a row, in Pallas Mosaic GPU (Hopper; Blackwell by `mma`).

Each K and V byte is read once, by bulk copies through the block table:

1. Operands are exchanged: scores^T = K q^T and out^T += V^T p^T, so the 64 rows of a tensor-core
   instruction hold context tokens, and its columns the few queries (c = t * G + g, padded to 8).
2. A flat work list (`work.py`) gives every persistent thread block an equal run of tiles. An item
   of the list writes one partial result; `mosaic_merge.py` merges those of a unit.
3. One warpgroup only issues copies, the other one computes (`mosaic_decode_kernel.py`).
4. Where blocks are small, a tile holds adjacent heads of a block (they lie side by side), which
   makes fewer and larger copies; scores of one head's rows and another's columns are masked.

Online softmax over tiles, in base 2, is that of FlashAttention (arXiv 2205.14135), and the split
over the context that of Flash-Decoding.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import Device, kernel_device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.mosaic_config import (
    MAX_COLUMNS,
    MAX_REGISTERS,
    PRODUCT_DTYPES,
    DecodeGeometry,
    MosaicDecodeConfig,
    decode_config,
    decode_geometry,
    register_estimate,
    smem_bytes,
)
from pallas_kernels.paged_attention.mosaic_decode_kernel import launch
from pallas_kernels.paged_attention.mosaic_decode_types import Inputs, Static
from pallas_kernels.paged_attention.mosaic_merge import merge_partials
from pallas_kernels.paged_attention.validate import clamp_lens
from pallas_kernels.paged_attention.work import Work, plan_work

BLOCK_SIZES = (8, 16, 32, 64, 128)
MIN_SCALES = 32  # copies of scales go to multiples of 128 bytes of shared memory
INTERPRETED_CTAS = 3  # the interpreter runs them one after the other
LOG2_E = math.log2(math.e)


def unsupported_decode(call: AttentionCall, device: Device) -> str | None:
    """Why the decode kernel cannot take a call on a device, or None."""
    if call.has_score_fn:
        return "score_fn is not supported"
    if device.compute_capability is None or device.compute_capability[0] < 9:
        return f"needs compute capability 9.0 or later (here: {device.compute_capability})"
    if call.kv_dtype not in PRODUCT_DTYPES:
        return f"kv_blocks are {call.kv_dtype}; the tensor core transposes V only in 16-bit types"
    if call.head_dim % 64 or call.head_dim > 256:
        return (
            f"the pool stores head_dim {call.head_dim}; must be 64, 128, 192 or 256 (make the "
            "pool with head_dim padded to the next of these: q may keep the model's own)"
        )
    if call.block_size not in BLOCK_SIZES:
        return f"block size {call.block_size}; must be one of {BLOCK_SIZES}"
    if call.num_new * call.group > MAX_COLUMNS:
        return (
            f"{call.num_new} new tokens of {call.group} query heads a key/value head; "
            f"their product must be at most {MAX_COLUMNS}"
        )
    config = decode_config(call, device)
    geometry = decode_geometry(call, config)
    if call.is_quantized and geometry.block_rows < MIN_SCALES:
        return (
            f"8-bit blocks of {call.block_size} tokens and {call.num_kv_heads} key/value heads; "
            f"adjacent heads must fill up {MIN_SCALES} rows (use blocks of 32 tokens or more)"
        )
    registers = register_estimate(call, geometry.columns)
    if registers > MAX_REGISTERS:
        return (
            f"{geometry.columns} columns of head_dim {call.head_dim} in {call.kv_dtype} need "
            f"{registers} registers a thread; must be at most {MAX_REGISTERS}"
        )
    need = smem_bytes(call, config)
    if need > device.smem_per_block:
        return f"needs {need} bytes of shared memory; {device.kind} has {device.smem_per_block}"
    return None


def paged_attention_mosaic_decode(
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
    kv_scales: Float[Array, "N 2 K S"] | None = None,
    work: Work | None = None,
    config: MosaicDecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there), for T * H / K up to 64.

    Args:
        q: as there, like all arguments not named here; multiplied in the pool's dtype, or
            for an 8-bit pool in that of `PRODUCT_DTYPES`.
        work: the step's work list (`plan_decode_work`); made here when None.
        config: tile shapes and grid; by `decode_config` when None.
        interpret: run in Pallas's interpreter with its race detector.

    Raises:
        NotImplementedError: the call is none that `unsupported_decode` lets pass.
        ValueError: `work` was planned for other shapes, or for a window that is not given here.
    """
    B, T, H, D = q.shape
    N, _, K, S, _ = kv_blocks.shape
    M = block_tables.shape[1]
    call = AttentionCall.of(q, kv_blocks, block_tables, window=window)
    device = kernel_device()
    reason = unsupported_decode(call, device)
    if reason is not None:
        raise NotImplementedError(f"mosaic decode: {reason}")
    if config is None:
        config = decode_config(call, device)
        if interpret:
            config = dataclasses.replace(config, num_ctas=INTERPRETED_CTAS)
    geometry = decode_geometry(call, config)
    kv_lens, q_lens = clamp_lens(kv_lens, q_lens, num_slots=M * S, max_new=T)
    kv_lens = jnp.where(q_lens > 0, kv_lens, 0)
    if work is None:
        work = plan_work(
            kv_lens,
            q_lens,
            num_groups=geometry.num_groups,
            tile_tokens=geometry.tile_tokens,
            num_ctas=config.num_ctas,
            window=window,
        )
    _check_work(work, geometry, num_rows=B, window=window)
    static = Static(
        geometry=geometry,
        config=config,
        T=T,
        G=H // K,
        N=N,
        S=S,
        D=D,
        dtype=jnp.dtype(PRODUCT_DTYPES[call.kv_dtype]),
        pool_dtype=kv_blocks.dtype,
        has_window=window is not None,
        has_soft_cap=soft_cap is not None,
        interpret=interpret,
    )
    inputs = Inputs(
        q=_queries(q, static),
        kv=kv_blocks.reshape(2 * N, K * S, D),
        tables=block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        window=jnp.asarray(0 if window is None else window, jnp.int32).reshape(1),
        factors=_factors(scale, soft_cap),
        items=work.items,
        cta_ptr=work.cta_ptr,
        scales=None if kv_scales is None else kv_scales.reshape(2 * N, K * S),
    )
    partials = launch(inputs, static)
    out, lse = merge_partials(
        *partials,
        work.unit_ptr,
        sinks,
        geometry=geometry,
        num_columns=T * static.G,
        out_dtype=q.dtype,
        interpret=interpret,
    )
    return _new_tokens(out, lse, q_lens, shape=q.shape)


def _check_work(
    work: Work, geometry: DecodeGeometry, *, num_rows: int, window: int | Array | None
) -> None:
    planned = (work.unit_ptr.shape[0] - 1, work.num_groups, work.tile_tokens)
    needed = (num_rows * geometry.num_groups, geometry.num_groups, geometry.tile_tokens)
    if planned != needed:
        raise ValueError(
            f"work was planned for (units, head groups, tile tokens) {planned}; must be {needed}"
        )
    if work.has_window and window is None:
        raise ValueError("work was planned with a window; it must be planned without for this call")


def _queries(q: Float[Array, "B T H D"], static: Static) -> Float[Array, "B K/pack columns D"]:
    """Queries by columns, in the pool's dtype."""
    B, T, H, D = q.shape
    geometry = static.geometry
    q = q.astype(static.dtype).reshape(B, T, H // static.G, static.G, D)
    q = q.transpose(0, 2, 1, 3, 4).reshape(B, H // static.G, T * static.G, D)
    padding = geometry.head_columns - T * static.G
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return q.reshape(B, geometry.num_groups, geometry.columns, D)


def _factors(scale: float | Array, soft_cap: float | Array | None) -> Float[Array, "2"]:
    """Scores in base 2 are `product * a`, or `tanh(product * a) * b` with a soft cap."""
    scale = jnp.asarray(scale, jnp.float32)
    if soft_cap is None:
        return jnp.stack([scale * LOG2_E, jnp.float32(0)])
    soft_cap = jnp.asarray(soft_cap, jnp.float32)
    return jnp.stack([scale / soft_cap, soft_cap * LOG2_E])


def _new_tokens(
    out: Array, lse: Array, q_lens: Int[Array, "B"], *, shape: Sequence[int]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Columns back to tokens and heads; zeros at padded tokens."""
    B, T, H, D = shape
    K = out.shape[0] * out.shape[1] // B
    out = out.reshape(B, K, T, H // K, D).transpose(0, 2, 1, 3, 4).reshape(B, T, H, D)
    lse = lse.reshape(B, K, T, H // K).transpose(0, 2, 1, 3).reshape(B, T, H)
    if T == 1:  # a row without new tokens had no tiles: the merge made zeros
        return out, lse
    new = (jnp.arange(T, dtype=jnp.int32) < q_lens[:, None])[:, :, None]  # [B, T, 1]
    return jnp.where(new[..., None], out, 0), jnp.where(new, lse, -jnp.inf)
