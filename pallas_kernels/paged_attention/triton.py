"""`paged_attention` in Pallas Triton: decode and prefill on compute capability 8.0 and later.

One program attends a tile of query rows of one KV head (new tokens times heads of the group) to
its share of the row's context, tile by tile through the block table (flash attention, Dao et al.,
arXiv:2205.14135; split over the context as in flash decoding, arXiv:2311.01282). The shares are
cut from the positions that the row really attends to, so ragged lengths stay balanced. Tiles that
every query of the program sees whole take a loop without masks; the few others, at the window's
start, at the diagonal and at the end, follow in a second loop.

A tile's keys are loaded as one array [tokens, D] by their row in the pool, so that the compiler's
pipeline copies them to shared memory 16 bytes at a time, swizzled for the tensor core. Head dims
that are no power of two are loaded with a mask: neither the pool nor shared traffic is padded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import Device, current_device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.triton_config import (
    TritonConfig,
    num_resident,
    pick_triton_config,
)
from pallas_kernels.paged_attention.triton_kernel import Static, attend
from pallas_kernels.paged_attention.tuned import tuned_config
from pallas_kernels.paged_attention.validate import clamp_lens

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)


def unsupported(call: AttentionCall, device: Device) -> str | None:
    """Why the kernel cannot take a call on a device, or None if it can."""
    if call.has_score_fn:
        return "score_fn is for xla and reference"
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return f"needs compute capability 8.0 or later (here: {capability})"
    if call.kv_dtype == "float8_e4m3fn" and capability < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9 or later (here: {capability})"
    if call.head_dim not in HEAD_DIMS:
        return f"head dim {call.head_dim} is none of {HEAD_DIMS} (a pool may store it padded)"
    if call.block_size not in BLOCK_SIZES:
        return f"block size {call.block_size} is none of {BLOCK_SIZES}"
    if num_resident(call, device, pick_triton_config(call, device)) == 0:
        return f"{device.kind} has too little shared memory for a tile of head dim {call.head_dim}"
    if call.is_quantized and 2**31 <= call.num_elements <= 2**32:
        return "8-bit pools of 2**31 to 2**32 elements: Pallas Triton gives them 32-bit offsets"
    return None


def paged_attention_triton(
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
    interpret: bool = False,
    config: TritonConfig | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """The semantics of `paged_attention` (see there); returns the output and the lse.

    `config` overrides the choice: a measured table's, or `pick_triton_config`'s.

    Products are of q's dtype where it has 16 bits and the pool has the same or 8 bits; else of
    float32, as three TF32 products (float32's accuracy but for its last bits), or as one TF32
    product (10 bits of mantissa) at head dim 256.
    """
    assert score_fn is None, "see unsupported()"
    B, T, H, D = q.shape
    N, _, K, S, _ = kv_blocks.shape
    if config is None:
        call = AttentionCall.of(q, kv_blocks, block_tables, window=window)
        config = _config(call, current_device())
    kv_lens, q_lens = clamp_lens(kv_lens, q_lens, num_slots=block_tables.shape[1] * S, max_new=T)
    static = _static(q, kv_blocks, interpret, config)
    merge = config.splits > 1
    num_tiles = pl.cdiv(T * static.group, config.rows)
    out, lse = pl.pallas_call(
        functools.partial(attend, static=static),
        grid=(num_tiles * K, B, config.splits),
        out_shape=(
            jax.ShapeDtypeStruct((config.splits * B * T * H, D), jnp.float32 if merge else q.dtype),
            jax.ShapeDtypeStruct((config.splits * B * T * H,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_attention_triton",
    )(
        q.reshape(B * T * H, D),
        kv_blocks.reshape(N * 2 * K * S, D),
        None if kv_scales is None else kv_scales.reshape(N * 2 * K * S),
        jnp.clip(block_tables, 0, N - 1),
        kv_lens,
        q_lens,
        _scalar(scale, jnp.float32),
        None if window is None else _scalar(window, jnp.int32),
        None if soft_cap is None else _scalar(soft_cap, jnp.float32),
        None if sinks is None or merge else sinks.astype(jnp.float32),
    )
    if merge:
        tiled = None if sinks is None else jnp.tile(sinks, B * T)
        out, lse = _merge(out.reshape(config.splits, -1, D), lse.reshape(config.splits, -1), tiled)
    return out.reshape(B, T, H, D).astype(q.dtype), lse.reshape(B, T, H)


def _static(q: Array, kv_blocks: Array, interpret: bool, config: TritonConfig) -> Static:
    _, T, H, D = q.shape
    K, S = kv_blocks.shape[2:4]
    return Static(
        num_new=T,
        group=H // K,
        num_kv_heads=K,
        block_size=S,
        head_dim=D,
        dtype=_product_dtype(q.dtype, kv_blocks.dtype),
        interpret=interpret,
        config=config,
    )


def _config(call: AttentionCall, device: Device) -> TritonConfig:
    """As measured on the device, else as the model says."""
    measured = tuned_config(call, device, backend="triton")
    return TritonConfig(**measured) if measured else pick_triton_config(call, device)


def _product_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    if q_dtype == kv_dtype or (q_dtype.itemsize == 2 and kv_dtype.itemsize == 1):
        return q_dtype
    return jnp.dtype(jnp.float32)


def _scalar(x: Any, dtype: Any) -> Array:
    return jnp.asarray(x, dtype).reshape(1)


def _merge(
    out: Float[Array, "splits X D"], lse: Float[Array, "splits X"], sinks: Float[Array, "X"] | None
) -> tuple[Float[Array, "X D"], Float[Array, "X"]]:
    """One output of the splits', each weighted by its share of the softmax's denominator."""
    top = lse.max(axis=0)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    share = jnp.exp(lse - shift)  # [splits, X]
    attended = share.sum(axis=0)
    total = attended if sinks is None else attended + jnp.exp(sinks.astype(jnp.float32) - shift)
    share = share / jnp.where(attended > 0, total, 1.0)
    return jnp.sum(out * share[..., None], axis=0), jnp.log(attended) + shift
