"""The host side of the KV pool: where blocks of preempted sequences wait (paper section 4.5).

Blocks travel in buffers of a few sizes, gathered and scattered for all layers by one launch each.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from paged_jax.blocks.block_manager import BlockSwap
from paged_jax.config import EngineConfig, require
from paged_jax.pool import KVPool, run_pool_op
from pallas_kernels.block_copy import block_gather, block_scatter

# Bytes of the buffer that blocks travel in: device memory that swapping takes beside the pool.
BUFFER_BYTES = 32 * 2**20
MAX_BUFFER_BLOCKS = 64


class _Arrival(NamedTuple):
    """Blocks on their way to the host: where they go, and the device's buffer of them."""

    hosts: np.ndarray
    buffer: KVPool


class HostPool:
    """Swapped-out blocks in host memory, as in the device's pool, scales of an 8-bit one included.

    ``store`` only dispatches; ``settle`` waits for what is on its way. All that reads or changes
    the host's blocks settles first, and what arrived later overwrites what arrived earlier.

    Args:
      pool: the device's pool, for its shape; none of it is kept.
      num_blocks: blocks here; block 0 is never used.
      donate: give the device's pool to ``load``, so that it is updated in place.
      backend: backend of gather and scatter where it has them, or None for the best one here.
      interpret: run a GPU backend in Pallas's interpreter (for tests).

    Attributes:
      blocks: ``[L, num_blocks, 2, K, S, D]``; memory is used as blocks are first written.
      scales: float32 ``[L, num_blocks, 2, K, S]`` of an 8-bit pool, else None.
      buffer_sizes: blocks of the buffers, in descending order.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_blocks: int,
        donate: bool = True,
        backend: str | None = None,
        interpret: bool = False,
    ) -> None:
        def empty(array: Array) -> np.ndarray:
            return np.empty((array.shape[0], num_blocks, *array.shape[2:]), array.dtype)

        self.blocks = empty(pool.blocks)
        self.scales = None if pool.scales is None else empty(pool.scales)
        most = min(max(BUFFER_BYTES // pool.block_nbytes, 1), MAX_BUFFER_BLOCKS)
        self.buffer_sizes = tuple(sorted({most, max(most // 8, 1)}, reverse=True))
        self._arriving: list[_Arrival] = []
        self._gather = make_block_gather(backend=backend, interpret=interpret)
        self._scatter = make_block_scatter(donate=donate, backend=backend, interpret=interpret)

    @property
    def max_programs(self) -> int:
        """Most programs that swapping compiles."""
        return 2 * len(self.buffer_sizes)

    def store(self, pool: KVPool, swaps: SequenceOf[BlockSwap]) -> None:
        """Dispatch swap-outs from ``pool``; later steps may overwrite the blocks there."""
        for chunk, ids in self._chunks(swaps):
            buffer = self._gather(pool, ids)
            for array in jax.tree.leaves(buffer):
                array.copy_to_host_async()
            self._arriving.append(_Arrival(np.array([swap.host for swap in chunk]), buffer))

    def load(self, pool: KVPool, swaps: SequenceOf[BlockSwap]) -> KVPool:
        """Dispatch swap-ins; returns the pool that has the blocks."""
        if swaps:
            self.settle()
        for chunk, ids in self._chunks(swaps):
            hosts = np.zeros(len(ids), np.int64)
            hosts[: len(chunk)] = [swap.host for swap in chunk]
            # Indexing copies: the host's blocks may be overwritten while the device still reads.
            scales = None if self.scales is None else self.scales[:, hosts]
            pool = self._scatter(pool, ids, KVPool(self.blocks[:, hosts], scales))  # pyright: ignore[reportArgumentType]
        return pool

    def settle(self) -> None:
        """Wait until all that was stored is here."""
        for hosts, buffer in self._arriving:
            self.blocks[:, hosts] = np.asarray(buffer.blocks)[:, : len(hosts)]
            if self.scales is not None:
                self.scales[:, hosts] = np.asarray(buffer.scales)[:, : len(hosts)]
        self._arriving.clear()

    def zero(self, hosts: SequenceOf[int]) -> None:
        """Overwrite blocks that nobody will read any more."""
        self.settle()
        self.blocks[:, list(hosts)] = 0
        if self.scales is not None:
            self.scales[:, list(hosts)] = 0

    def _chunks(
        self, swaps: SequenceOf[BlockSwap]
    ) -> list[tuple[SequenceOf[BlockSwap], np.ndarray]]:
        """The swaps of each buffer and, padded with 0 to its size, their device blocks."""
        chunks, start = [], 0
        while start < len(swaps):
            left = len(swaps) - start
            size = next((one for one in self.buffer_sizes if one <= left), self.buffer_sizes[-1])
            chunk = swaps[start : start + size]
            ids = np.zeros(size, np.int32)
            ids[: len(chunk)] = [swap.device for swap in chunk]
            chunks.append((chunk, ids))
            start += size
        return chunks


def make_block_gather(
    *, backend: str | None = None, interpret: bool = False
) -> Callable[[KVPool, Any], KVPool]:
    """Build the jitted ``gather(pool, ids i32[C]) -> pool of C blocks``, as ``HostPool``."""

    def gather(pool: KVPool, ids: Int[Array, "C"]) -> KVPool:
        def run(backend: str | None) -> Any:
            options = {"backend": backend, "interpret": interpret}
            return block_gather(pool.blocks, ids, kv_scales=pool.scales, **options)

        return run_pool_op(run, backend, like=pool)

    return jax.jit(gather)


def make_block_scatter(
    *, donate: bool, backend: str | None = None, interpret: bool = False
) -> Callable[[KVPool, Any, KVPool], KVPool]:
    """Build the jitted ``scatter(pool, ids i32[C], pool of C blocks) -> pool``, as ``HostPool``."""

    def scatter(pool: KVPool, ids: Int[Array, "C"], buffer: KVPool) -> KVPool:
        def run(backend: str | None) -> Any:
            scales = {"kv_scales": pool.scales, "block_scales": buffer.scales}
            options = {"backend": backend, "interpret": interpret}
            return block_scatter(pool.blocks, ids, buffer.blocks, **scales, **options)

        return run_pool_op(run, backend, like=pool)

    return jax.jit(scatter, donate_argnames=("pool",) if donate else ())


def resolve_num_host_blocks(config: EngineConfig, *, num_blocks: int, block_nbytes: int) -> int:
    """Blocks of the host pool, its unused block 0 included; 0 when nothing is ever swapped.

    With no size given it is the device pool's (paper section 4.5): what is swapped out was there.

    Args:
      config: the settings.
      num_blocks: of the device pool.
      block_nbytes: of a block over all layers.

    Raises:
      ValueError: ``swap_bytes`` holds no block.
    """
    if config.preemption == "recompute":
        return 0
    if config.num_host_blocks is not None:
        return config.num_host_blocks
    if config.swap_bytes is None:
        return num_blocks
    num_host_blocks = config.swap_bytes // block_nbytes
    require(
        num_host_blocks >= 2,
        f"swap_bytes={config.swap_bytes} must hold two blocks of {block_nbytes} bytes",
    )
    return num_host_blocks
