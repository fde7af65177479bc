"""`kv_write` in Pallas Mosaic GPU: one thread block a token, moved by bulk copies only.

A token's keys and values of all heads go to shared memory and from there, by one strided bulk
copy, to their rows in the pool. No element passes through a register, so the pool must store what
it is given: quantising and casting writes are the Triton kernel's. Thread blocks of padding do
nothing, so the null block is not written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import Device
from pallas_kernels.kv_write.call import WriteCall

MAX_BOX = 256  # elements of an axis that one bulk copy moves


def unsupported(call: WriteCall, device: Device) -> str | None:
    """Why the kernel cannot take a call on a device, or None if it can."""
    capability = device.compute_capability
    if capability is None or capability < (9, 0):
        return f"needs compute capability 9.0 or later (here: {capability})"
    if call.is_quantized:
        return "it does not quantise"
    if call.new_dtype != call.kv_dtype:
        return f"it does not cast (from {call.new_dtype} to a pool of {call.kv_dtype})"
    if call.new_head_dim != call.head_dim:
        return f"it does not pad heads (from {call.new_head_dim} to {call.head_dim} channels)"
    itemsize = jnp.dtype(call.kv_dtype).itemsize
    if call.head_dim * itemsize % 16:
        return f"a head of {call.head_dim * itemsize} bytes is not made of 16-byte pieces"
    if max(call.head_dim, call.num_kv_heads) > MAX_BOX:
        return f"{call.num_kv_heads} heads of {call.head_dim}; either must be at most {MAX_BOX}"
    need = 2 * call.num_kv_heads * call.head_dim * itemsize
    if need > device.smem_per_block - 1024:
        return f"needs {need} bytes of shared memory; {device.kind} has {device.smem_per_block}"
    return None


def kv_write_mosaic(
    kv_blocks: Float[Array, "N 2 K S D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: Float[Array, "N 2 K S"] | None,
    interpret: bool = False,
) -> tuple[Float[Array, "N 2 K S D"], None]:
    """The semantics of `kv_write` (see there) for pools without scales."""
    assert kv_scales is None, "see unsupported()"
    N, _, K, S, D = kv_blocks.shape
    B, T = k.shape[:2]
    pool = jax.new_ref(kv_blocks)
    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)

    def kv_write(*refs):  # the kernel's name
        _write_token(*refs, num_new=T, block_size=S, num_slots=N * S)

    plgpu.kernel(
        kv_write,
        out_type=(),
        grid=(B * T,),
        grid_names=("token",),
        scratch_types=[
            plgpu.SMEM((2, K, D), kv_blocks.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        **options,
    )(
        k.reshape(B * T, K, D),
        v.reshape(B * T, K, D),
        slot_mapping.reshape(B * T),
        q_lens,
        pool,
    )
    return jax.freeze(pool), None


def _write_token(
    k_ref: Any,  # [B*T, K, D]
    v_ref: Any,  # [B*T, K, D]
    slots_ref: Any,  # [B*T]
    q_lens_ref: Any,  # [B]
    pool_ref: Any,  # [N, 2, K, S, D]
    buffer: Any,  # [2, K, D] in shared memory
    arrived: Any,  # barrier of both copies
    *,
    num_new: int,
    block_size: int,
    num_slots: int,
) -> None:
    token = jax.lax.axis_index("token")
    row = jax.lax.div(token, jnp.int32(num_new))
    slot = slots_ref[token]
    is_real = token - row * num_new < q_lens_ref[row]

    @pl.when(is_real & (slot >= 0) & (slot < num_slots))
    def _():
        plgpu.copy_gmem_to_smem(k_ref.at[token], buffer.at[0], arrived)
        plgpu.copy_gmem_to_smem(v_ref.at[token], buffer.at[1], arrived)
        block = jax.lax.div(slot, jnp.int32(block_size))
        offset = slot - block * block_size
        plgpu.barrier_wait(arrived)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, pool_ref.at[block, :, :, offset])
        plgpu.wait_smem_to_gmem(0)
