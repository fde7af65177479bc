"""`kv_write` in Pallas Triton: one program a token, keys and values of all heads, in place.

A token's keys lie together; in the pool each head's go to a row of their own. Both sides move 16
bytes a thread. Programs of padding do nothing, so the null block is not written.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.devices import Device
from pallas_kernels.kv_write.call import WriteCall
from pallas_kernels.quantize import magnitude, scale_and_factor, store

MAX_TILE = 8192  # elements of one program's keys; more heads take more programs


def unsupported(call: WriteCall, device: Device) -> str | None:
    """Why the kernel cannot take a call on a device, or None if it can."""
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return f"needs compute capability 8.0 or later (here: {capability})"
    if call.kv_dtype == "float8_e4m3fn" and capability < (8, 9):
        return f"float8_e4m3fn needs compute capability 8.9 or later (here: {capability})"
    if call.is_quantized and 2**31 <= call.num_elements <= 2**32:
        return "8-bit pools of 2**31 to 2**32 elements: Pallas Triton gives them 32-bit offsets"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What a program knows when it is compiled.

    Attributes:
        num_new: padded new tokens a row (T).
        num_kv_heads: key/value heads (K).
        block_size: token positions a block (S).
        head_dim: channels a head in the pool (D).
        new_head_dim: channels a head of the new keys and values (d).
        num_slots: slots of the pool (N * S).
        heads: heads a program writes, a power of two.
        is_quantized: the pool has scales.
    """

    num_new: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    new_head_dim: int
    num_slots: int
    heads: int
    is_quantized: bool

    @property
    def channels(self) -> int:
        """D, up to a power of two."""
        return pl.next_power_of_2(self.head_dim)

    @property
    def num_warps(self) -> int:
        """So that a thread stores 16 bytes at a time."""
        per_thread = 16 if self.is_quantized else 8
        return min(8, max(1, self.heads * self.channels // (32 * per_thread)))


def kv_write_triton(
    kv_blocks: Shaped[Array, "N 2 K S D"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: Float[Array, "N 2 K S"] | None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "N 2 K S D"], Float[Array, "N 2 K S"] | None]:
    """The semantics of `kv_write` (see there); returns the pool and its scales, if it has any."""
    N, _, K, S, D = kv_blocks.shape
    B, T, _, d = k.shape
    static = Static(
        num_new=T,
        num_kv_heads=K,
        block_size=S,
        head_dim=D,
        new_head_dim=d,
        num_slots=N * S,
        heads=min(pl.next_power_of_2(K), max(1, MAX_TILE // pl.next_power_of_2(D))),
        is_quantized=kv_scales is not None,
    )
    pool = [kv_blocks.reshape(N * 2 * K * S, D)]
    if kv_scales is not None:
        pool.append(kv_scales.reshape(N * 2 * K * S))
    new = (k.reshape(B * T * K, d), v.reshape(B * T * K, d), slot_mapping.reshape(B * T), q_lens)
    written = pl.pallas_call(
        functools.partial(_write_token, static=static),
        grid=(B * T, pl.cdiv(K, static.heads)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool],
        input_output_aliases={len(new) + i: i for i in range(len(pool))},
        compiler_params=plgpu.CompilerParams(num_warps=static.num_warps, num_stages=1),
        interpret=interpret,
        name="kv_write_triton",
    )(*new, *pool)
    scales = written[1].reshape(N, 2, K, S) if kv_scales is not None else None
    return written[0].reshape(N, 2, K, S, D), scales


def _write_token(
    k_ref: Any,  # [B*T*K, d]
    v_ref: Any,  # [B*T*K, d]
    slots_ref: Any,  # [B*T]
    q_lens_ref: Any,  # [B]
    *pool_refs: Any,  # [N*2*K*S, D] and, in 8 bits, [N*2*K*S]: inputs, then the same as outputs
    static: Static,
) -> None:
    token = pl.program_id(0)
    head = pl.program_id(1) * static.heads + jnp.arange(static.heads, dtype=jnp.int32)
    num_new = jnp.int32(static.num_new)
    slot = slots_ref[token]
    is_real = jax.lax.rem(token, num_new) < q_lens_ref[jax.lax.div(token, num_new)]

    @pl.when(is_real & (slot >= 0) & (slot < static.num_slots))
    def _():
        outputs = pool_refs[len(pool_refs) // 2 :]
        for i, new_ref in enumerate((k_ref, v_ref)):
            _write_heads(new_ref, outputs, token, head, slot, i, static=static)


def _write_heads(
    new_ref: Any,
    outputs: tuple[Any, ...],
    token: Array,
    head: Array,
    slot: Array,
    i: int,
    *,
    static: Static,
) -> None:
    """Write the keys (i = 0) or values (1) of a program's heads."""
    K, S = static.num_kv_heads, jnp.int32(static.block_size)
    shape = (static.heads, static.channels)
    channel = jnp.broadcast_to(jnp.arange(static.channels, dtype=jnp.int32), shape)
    is_head = jnp.broadcast_to((head < K)[:, None], shape)
    source = jnp.broadcast_to((token * K + head)[:, None], shape)
    x = plgpu.load(
        new_ref.at[source, channel],
        mask=is_head & (channel < static.new_head_dim),
        other=jnp.zeros((), new_ref.dtype),
    )
    block, offset = jax.lax.div(slot, S), jax.lax.rem(slot, S)
    target = ((block * 2 + i) * K + head) * S + offset  # rows of [N*2*K*S]
    dtype = outputs[0].dtype
    if static.is_quantized:
        x = x.astype(jnp.float32)
        scale, factor = scale_and_factor(magnitude(x).max(axis=1), dtype)
        plgpu.store(outputs[1].at[target], scale, mask=head < K)
        x = store(x, factor[:, None], dtype)
    plgpu.store(
        outputs[0].at[jnp.broadcast_to(target[:, None], shape), channel],
        x.astype(dtype),
        mask=is_head & (channel < static.head_dim),
    )
