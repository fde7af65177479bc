"""Whole blocks in one launch, every layer at once: copies, and the gathers for swapping."""

from typing import Any, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import Backend, gpu_backend, pick_backend
from pallas_kernels.block_copy.blocks import Blocks
from pallas_kernels.block_copy.call import CopyCall
from pallas_kernels.block_copy.reference import move_blocks_reference
from pallas_kernels.block_copy.validate import (
    check_copies,
    check_id_array,
    check_ids,
    check_pool,
    check_scales,
)
from pallas_kernels.block_copy.xla import move_blocks_xla
from pallas_kernels.broadcasting import broadcasts
from pallas_kernels.paged_attention.validate import check_int32, is_concrete

BACKENDS = {
    "mosaic": lambda: gpu_backend("pallas_kernels.block_copy.mosaic", "move_blocks_mosaic"),
    "triton": lambda: gpu_backend("pallas_kernels.block_copy.triton", "move_blocks_triton"),
    "xla": lambda: Backend(run=move_blocks_xla),
    "reference": lambda: Backend(run=move_blocks_reference),
}


@overload
def block_copy(
    kv_blocks: Shaped[Array, "L P 2 K S D"],
    src: Int[Array, "C"],
    dst: Int[Array, "C"],
    *,
    kv_scales: None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Shaped[Array, "L P 2 K S D"]: ...


@overload
def block_copy(
    kv_blocks: Shaped[Array, "L P 2 K S D"],
    src: Int[Array, "C"],
    dst: Int[Array, "C"],
    *,
    kv_scales: Float[Array, "L P 2 K S"],
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "L P 2 K S D"], Float[Array, "L P 2 K S"]]: ...


@broadcasts
def block_copy(
    kv_blocks: Any,
    src: Any,
    dst: Any,
    *,
    kv_scales: Any = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Any:
    """Copy whole blocks, `kv_blocks[:, dst[i]] = kv_blocks[:, src[i]]`; in place when donated.

    Padding pairs are (0, 0). No block may be both source and destination and no destination may
    be named twice, so the order of the pairs does not matter. Inside `jit` that is not checked
    (`check_copies` does it on the host, before the step) and ids are clamped to `0..P-1`.

    Args:
        kv_blocks: the whole pool `[L, P, 2, K, S, D]`, all layers.
        src: blocks to read, int32 `[C]`.
        dst: blocks to write, int32 `[C]`.
        kv_scales: an 8-bit pool's scales `[L, P, 2, K, S]`, copied with their blocks.
        backend: "mosaic", "triton", "xla", "reference", or None: the best one that takes the
            call; a named one never falls back.
        interpret: run "mosaic" and "triton" in Pallas's interpreter, on any device: for tests.

    Returns:
        The pool, or with `kv_scales` the pair `(kv_blocks, kv_scales)`.

    Raises:
        ValueError: a shape, dtype or pair that does not fit, or an unknown backend.
        NotImplementedError: the named backend cannot take the call here; says why.
    """
    check_pool(kv_blocks, kv_scales)
    check_id_array("src", src)
    check_int32("dst", dst, tuple(src.shape))
    if is_concrete(src) and is_concrete(dst):
        check_copies(src, dst, num_blocks=kv_blocks.shape[1])
    call = CopyCall.of(kv_blocks, src, kv_scales=kv_scales)
    run = pick_backend("block_copy", backend, BACKENDS, call, interpret=interpret)
    pool = _blocks(kv_blocks, kv_scales)
    if call.num_pairs == 0:
        return _result(pool)
    last = call.num_blocks - 1
    return _result(run(None, pool, jnp.clip(src, 0, last), jnp.clip(dst, 0, last)))


@broadcasts
def block_gather(
    kv_blocks: Shaped[Array, "L P 2 K S D"],
    ids: Int[Array, "C"],
    *,
    kv_scales: Float[Array, "L P 2 K S"] | None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Any:
    """Collect whole blocks of every layer in one buffer, `kv_blocks[:, ids]`: to swap them out.

    Inside `jit` ids are not checked but clamped to `0..P-1`; 0, the null block, is padding.

    Args:
        kv_blocks: the whole pool, all layers.
        ids: blocks to read, int32; the same one may be named twice.
        kv_scales: an 8-bit pool's scales, collected with their blocks.
        backend: as for `block_copy`.
        interpret: as for `block_copy`.

    Returns:
        `[L, C, 2, K, S, D]`, or with `kv_scales` the pair of it and `[L, C, 2, K, S]`.

    Raises:
        ValueError: a shape, dtype or id that does not fit, or an unknown backend.
        NotImplementedError: the named backend cannot take the call here; says why.
    """
    check_pool(kv_blocks, kv_scales)
    check_id_array("ids", ids)
    if is_concrete(ids):
        check_ids("ids", ids, num_blocks=kv_blocks.shape[1])
    call = CopyCall.of(kv_blocks, ids, kv_scales=kv_scales)
    run = pick_backend("block_gather", backend, BACKENDS, call, interpret=interpret)
    pool = _blocks(kv_blocks, kv_scales)
    if call.num_pairs == 0:
        return _result(Blocks(pool.kv[:, :0], None if kv_scales is None else kv_scales[:, :0]))
    src = jnp.clip(ids, 0, call.num_blocks - 1)
    return _result(run(pool, None, src, jnp.arange(call.num_pairs, dtype=jnp.int32)))


@broadcasts
def block_scatter(
    kv_blocks: Shaped[Array, "L P 2 K S D"],
    ids: Int[Array, "C"],
    blocks: Shaped[Array, "L C 2 K S D"],
    *,
    kv_scales: Float[Array, "L P 2 K S"] | None = None,
    block_scales: Float[Array, "L C 2 K S"] | None = None,
    backend: str | None = None,
    interpret: bool = False,
) -> Any:
    """Put blocks of a buffer into the pool, `kv_blocks[:, ids] = blocks`; in place when donated.

    The way back of `block_gather`: to swap blocks in. What comes with id 0, the null block, is
    padding and may be anything. Inside `jit` ids are not checked but clamped to `0..P-1`.

    Args:
        kv_blocks: the whole pool, all layers.
        ids: blocks to write, int32; no block but 0 may be named twice.
        blocks: what to write, of the pool's dtype.
        kv_scales: an 8-bit pool's scales.
        block_scales: those of `blocks`.
        backend: as for `block_copy`.
        interpret: as for `block_copy`.

    Returns:
        The pool, or with `kv_scales` the pair `(kv_blocks, kv_scales)`.

    Raises:
        ValueError: a shape, dtype or id that does not fit, or an unknown backend.
        NotImplementedError: the named backend cannot take the call here; says why.
    """
    check_pool(kv_blocks, kv_scales)
    check_id_array("ids", ids)
    wanted = (kv_blocks.shape[0], ids.shape[0], *kv_blocks.shape[2:])
    if tuple(blocks.shape) != wanted or blocks.dtype != kv_blocks.dtype:
        raise ValueError(
            f"blocks is {blocks.dtype}{list(blocks.shape)}; must be {kv_blocks.dtype}{list(wanted)}"
        )
    check_scales("block_scales", block_scales, blocks)
    if is_concrete(ids):
        check_ids("ids", ids, num_blocks=kv_blocks.shape[1], is_written=True)
    call = CopyCall.of(kv_blocks, ids, kv_scales=kv_scales)
    run = pick_backend("block_scatter", backend, BACKENDS, call, interpret=interpret)
    pool = _blocks(kv_blocks, kv_scales)
    if call.num_pairs == 0:
        return _result(pool)
    dst = jnp.clip(ids, 0, call.num_blocks - 1)
    src = jnp.arange(call.num_pairs, dtype=jnp.int32)
    return _result(run(_blocks(blocks, block_scales), pool, src, dst))


def _blocks(kv: Any, scales: Any) -> Blocks:
    return Blocks(jnp.asarray(kv), None if scales is None else jnp.asarray(scales))


def _result(blocks: Blocks) -> Any:
    return blocks.kv if blocks.scales is None else (blocks.kv, blocks.scales)
