"""`block_copy`: a step's block copies in one launch, every layer at once."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from pallas_kernels.backends import Backend, pick_backend
from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.block_copy.xla import block_copy_xla
from pallas_kernels.paged_attention.validate import check_int32, is_concrete

BACKENDS = {
    "xla": lambda: Backend(run=block_copy_xla),
    "reference": lambda: Backend(run=block_copy_reference),
}


def block_copy(
    kv_blocks: Shaped[Array, "L P 2 K S D"],
    src: Int[Array, "C"],
    dst: Int[Array, "C"],
    *,
    backend: str | None = None,
) -> Shaped[Array, "L P 2 K S D"]:
    """Copy whole blocks, `kv_blocks[:, dst[i]] = kv_blocks[:, src[i]]`; in place when donated.

    Padding pairs are (0, 0). No block may be both source and destination and no destination may
    be named twice, so the order of the pairs does not matter. Inside `jit` that is not checked
    (`check_copies` does it on the host, before the step) and ids are clamped to `0..P-1`.

    Args:
        kv_blocks: the whole pool, all layers.
        src: blocks to read, int32.
        dst: blocks to write, int32.
        backend: "reference", "xla" or None: the best one here; a named one never falls back.

    Raises:
        ValueError: a shape, dtype or pair that does not fit, or an unknown backend.
        NotImplementedError: a backend that is not available.
    """
    if kv_blocks.ndim != 6 or kv_blocks.shape[2] != 2 or min(kv_blocks.shape) < 1:
        raise ValueError(
            f"kv_blocks has shape {tuple(kv_blocks.shape)}; must be [L, P, 2, K, S, D], "
            "no axis empty"
        )
    if src.ndim != 1:
        raise ValueError(f"src has shape {tuple(src.shape)}; must be [C]")
    check_int32("src", src, tuple(src.shape))
    check_int32("dst", dst, tuple(src.shape))
    if is_concrete(src) and is_concrete(dst):
        check_copies(src, dst, num_blocks=kv_blocks.shape[1])
    run = pick_backend("block_copy", backend, BACKENDS, None)
    if src.shape[0] == 0:
        return jnp.asarray(kv_blocks)
    last = kv_blocks.shape[1] - 1
    return run(jnp.asarray(kv_blocks), jnp.clip(src, 0, last), jnp.clip(dst, 0, last))


def check_copies(src: Any, dst: Any, *, num_blocks: int) -> None:
    """Raise ValueError unless the pairs may be copied in any order (host arrays or lists).

    Args:
        src: blocks to read.
        dst: blocks to write.
        num_blocks: blocks of the pool (P).

    Raises:
        ValueError: an id outside `0..P-1`, a destination named twice, the null block in a pair
            other than (0, 0), or a block that is both source and destination.

    >>> check_copies([3, 0], [5, 0], num_blocks=6)
    >>> check_copies([3, 5], [5, 4], num_blocks=6)
    Traceback (most recent call last):
        ...
    ValueError: src and dst both name block 5; a block must be one or the other
    """
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    for name, ids in (("src", src), ("dst", dst)):
        if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
            raise ValueError(
                f"{name} has values {ids.min()}..{ids.max()}; must be within 0..{num_blocks - 1}"
            )
    real = (src != 0) | (dst != 0)
    src, dst = src[real], dst[real]
    for name, ids in (("src", src), ("dst", dst)):
        if (ids == 0).any():
            raise ValueError(f"{name} names the null block 0 in a pair that is not padding (0, 0)")
    values, counts = np.unique(dst, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"dst names block {values[counts > 1][0]} more than once; must be once")
    both = np.intersect1d(src, dst)
    if both.size:
        raise ValueError(f"src and dst both name block {both[0]}; a block must be one or the other")
