"""Argument checks of `block_copy`, `block_gather` and `block_scatter`."""

from typing import Any

import numpy as np

from pallas_kernels.paged_attention.call import QUANTIZED_DTYPES
from pallas_kernels.paged_attention.validate import check_array, check_int32


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
        check_ids(name, ids, num_blocks=num_blocks)
    real = (src != 0) | (dst != 0)
    src, dst = src[real], dst[real]
    for name, ids in (("src", src), ("dst", dst)):
        if (ids == 0).any():
            raise ValueError(f"{name} names the null block 0 in a pair that is not padding (0, 0)")
    _check_unique("dst", dst)
    both = np.intersect1d(src, dst)
    if both.size:
        raise ValueError(f"src and dst both name block {both[0]}; a block must be one or the other")


def check_ids(name: str, ids: Any, *, num_blocks: int, is_written: bool = False) -> None:
    """Raise ValueError unless host ids are blocks `0..P-1`, and no two the same if written to.

    Args:
        name: of the argument, for the message.
        ids: block ids; 0 is padding.
        num_blocks: blocks of the pool (P).
        is_written: they are written to.
    """
    ids = np.asarray(ids, np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        raise ValueError(
            f"{name} has values {ids.min()}..{ids.max()}; must be within 0..{num_blocks - 1}"
        )
    if is_written:
        _check_unique(name, ids[ids != 0])


def _check_unique(name: str, ids: np.ndarray) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name} names block {values[counts > 1][0]} more than once; must be once")


def check_pool(kv_blocks: Any, kv_scales: Any) -> None:
    """Raise ValueError unless `kv_blocks` is a pool and has scales just where it needs them."""
    shape = tuple(kv_blocks.shape)
    if len(shape) != 6 or shape[2] != 2 or min(shape) < 1:
        raise ValueError(f"kv_blocks has shape {shape}; must be [L, P, 2, K, S, D], no axis empty")
    check_scales("kv_scales", kv_scales, kv_blocks)


def check_scales(name: str, scales: Any, blocks: Any) -> None:
    """Raise ValueError unless 8-bit blocks `[L, P, 2, K, S, D]` come with scales, others not."""
    if str(blocks.dtype) not in QUANTIZED_DTYPES:
        if scales is not None:
            raise ValueError(f"{name} is given for blocks of {blocks.dtype}; must be None")
        return
    wanted = tuple(blocks.shape[:5])
    if scales is None:
        raise ValueError(f"{name} is None; blocks of {blocks.dtype} need their scales")
    if str(scales.dtype) != "float32" or tuple(scales.shape) != wanted:
        raise ValueError(
            f"{name} is {scales.dtype}{list(scales.shape)}; must be float32{list(wanted)}"
        )


def check_id_array(name: str, ids: Any) -> None:
    """Raise ValueError unless `ids` is int32 with one axis."""
    check_array(name, ids)
    if ids.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; must be [C]")
    check_int32(name, ids, tuple(ids.shape))
