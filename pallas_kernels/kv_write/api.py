"""`kv_write`: the fused reshape-and-write of new keys and values into blocks."""

from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import Backend, gpu_backend, pick_backend
from pallas_kernels.broadcasting import broadcasts
from pallas_kernels.kv_write.call import WriteCall
from pallas_kernels.kv_write.reference import kv_write_reference
from pallas_kernels.kv_write.xla import kv_write_xla
from pallas_kernels.paged_attention.validate import (
    check_float,
    check_int32,
    check_kv_blocks,
    is_concrete,
)

BACKENDS = {
    "mosaic": lambda: gpu_backend("pallas_kernels.kv_write.mosaic", "kv_write_mosaic"),
    "triton": lambda: gpu_backend("pallas_kernels.kv_write.triton", "kv_write_triton"),
    "xla": lambda: Backend(run=kv_write_xla),
    "reference": lambda: Backend(run=kv_write_reference),
}


@overload
def kv_write(
    kv_blocks: Float[Array, "N 2 K S D"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Float[Array, "N 2 K S D"]: ...


@overload
def kv_write(
    kv_blocks: Shaped[Array, "N 2 K S D"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    slot_mapping: Int[Array, "B T"],
    q_lens: Int[Array, "B"],
    *,
    kv_scales: Float[Array, "N 2 K S"],
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "N 2 K S D"], Float[Array, "N 2 K S"]]: ...


@broadcasts
def kv_write(
    kv_blocks: Any,
    k: Any,
    v: Any,
    slot_mapping: Any,
    q_lens: Any,
    *,
    kv_scales: Any = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Any:
    """Write each row's new keys and values to their slots; in place when the pool is donated.

    In words of a loop::

        for b, t in rows, range(q_lens[b]):
            block, slot = slot_mapping[b, t] // S, slot_mapping[b, t] % S
            kv_blocks[block, 0, :, slot] = k[b, t]
            kv_blocks[block, 1, :, slot] = v[b, t]

    Padded positions (`t >= q_lens[b]`), whatever their slot, change nothing but, perhaps, slot 0
    of block 0 (the null block). Inside `jit`, where values are not checked, so do slots outside
    the pool. Values are cast to the pool's dtype; with `kv_scales` they are quantised, one scale
    a token and head (`pallas_kernels.quantize`), and the scales are written beside them. Where
    the pool stores D padded, the rest of a head is written as zeros.

    Args:
        kv_blocks: the pool `[N, 2, K, S, D]`, K at index 0 and V at 1 of the second axis; a float
            dtype, or int8 or float8_e4m3fn with `kv_scales`.
        k: new keys `[B, T, K, d]`, d at most D; float32, bfloat16 or float16.
        v: new values, the same.
        slot_mapping: `block * S + offset` of each new token, int32 `[B, T]`.
        q_lens: new tokens in the row, int32 `[B]`.
        kv_scales: float32 scales of an 8-bit pool, `[N, 2, K, S]`.
        backend: "mosaic", "triton", "xla", "reference", or None: the best one that takes the
            call; a named one never falls back.
        interpret: run "mosaic" and "triton" in Pallas's interpreter, on any device: for tests.

    Returns:
        The pool, or with `kv_scales` the pair `(kv_blocks, kv_scales)`.

    Raises:
        ValueError: a shape, dtype or value that does not fit (two tokens for one slot, a slot
            outside the pool), or an unknown backend.
        NotImplementedError: the named backend cannot take the call here; says why.
    """
    _check(kv_blocks, k, v, slot_mapping, q_lens, kv_scales)
    call = WriteCall.of(kv_blocks, k)
    run = pick_backend("kv_write", backend, BACKENDS, call, interpret=interpret)
    blocks, scales = run(
        jnp.asarray(kv_blocks),
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(slot_mapping),
        jnp.asarray(q_lens),
        kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
    )
    return blocks if kv_scales is None else (blocks, scales)


def _check(kv_blocks: Any, k: Any, v: Any, slot_mapping: Any, q_lens: Any, kv_scales: Any) -> None:
    check_kv_blocks(kv_blocks, kv_scales)
    N, _, K, S, D = kv_blocks.shape
    for name, x in (("k", k), ("v", v)):
        check_float(name, x)
        if x.ndim != 4 or tuple(x.shape) != tuple(k.shape) or x.shape[2] != K or x.shape[3] > D:
            wanted = f"[B, T, {K}, at most {D}], alike for k and v"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; must be {wanted}")
    if v.dtype != k.dtype:
        raise ValueError(f"v has dtype {v.dtype}; must be that of k, {k.dtype}")
    B, T = k.shape[:2]
    check_int32("slot_mapping", slot_mapping, (B, T))
    check_int32("q_lens", q_lens, (B,))
    if not (is_concrete(slot_mapping) and is_concrete(q_lens)):
        return
    new, slots = np.asarray(q_lens), np.asarray(slot_mapping)
    if new.size and (new.min() < 0 or new.max() > T):
        raise ValueError(f"q_lens has values {new.min()}..{new.max()}; must be within 0..T={T}")
    slots = slots[np.arange(T) < new[:, None]]
    if slots.size and (slots.min() < 0 or slots.max() >= N * S):
        raise ValueError(
            f"slot_mapping has values {slots.min()}..{slots.max()}; must be within 0..{N * S - 1}"
        )
    values, counts = np.unique(slots, return_counts=True)
    if slots.size and counts.max() > 1:
        slot = values[counts.argmax()]
        raise ValueError(f"slot_mapping names slot {slot} {counts.max()} times; must be once")
