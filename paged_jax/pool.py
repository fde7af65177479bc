"""The device side of the KV pool: one preallocated array of blocks (the paper's section 4.2)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from paged_jax.config import EngineConfig, ModelSpec, require
from pallas_kernels.quantize import MAX_STORED

NULL_BLOCK = 0
DEFAULT_SEQUENCE_LEN = 1024


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["blocks", "scales"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class KVPool:
    """All keys and values of all sequences, as blocks of one array.

    Attributes:
      blocks: ``[L, P, 2, K, S, D]``: layer, block, key (0) or value (1), KV head, slot, channel.
        Block 0 is the null block: never allocated, its content never matters.
      scales: float32 ``[L, P, 2, K, S]`` of an 8-bit pool, whose elements times their scale are
        the keys and values; None of a float pool.
    """

    blocks: Shaped[Array, "L P 2 K S D"]
    scales: Float[Array, "L P 2 K S"] | None = None

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: Any = jnp.float32,
        head_dim: int | None = None,
        fill: float = 0.0,
    ) -> KVPool:
        """Allocate a pool.

        Args:
          spec: the model's geometry (L, K, D).
          num_blocks: blocks a layer (P), the null block included; at least 2.
          block_size: token positions a block (S).
          dtype: element type; int8 and float8_e4m3fn come with scales.
          head_dim: channels a head (D), at least the model's; None means the model's.
          fill: initial value; any value gives the same results (NaN in tests proves it).

        Raises:
          ValueError: fewer than two blocks, a head dim under the model's, or
            ``L*P*2*K*S >= 2**31``, where 32-bit row indices would wrap.
        """
        _check_shape(spec, num_blocks=num_blocks, block_size=block_size)
        rows = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size)
        shape = (*rows, _stored_head_dim(spec, head_dim))

        def make() -> KVPool:
            if not is_quantized(dtype):
                return cls(jnp.full(shape, fill, dtype=dtype))
            return cls(jnp.ones(shape, dtype=dtype), jnp.full(rows, fill, dtype=jnp.float32))

        # One jitted call, so that a pool costs one compilation and no second buffer.
        return jax.jit(make)()

    @property
    def num_layers(self) -> int:
        """Layers (L)."""
        return self.blocks.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks a layer (P), the null block included."""
        return self.blocks.shape[1]

    @property
    def block_size(self) -> int:
        """Token positions a block (S)."""
        return self.blocks.shape[4]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, scales included."""
        arrays = [self.blocks] if self.scales is None else [self.blocks, self.scales]
        return sum(int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in arrays)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.nbytes // self.num_blocks


def _check_shape(spec: ModelSpec, *, num_blocks: int, block_size: int) -> None:
    require(num_blocks >= 2, f"num_blocks={num_blocks} must be >= 2: block 0 is the null block")
    require(block_size >= 1, f"block_size={block_size} must be >= 1")
    num_rows = spec.num_layers * num_blocks * 2 * spec.num_kv_heads * block_size
    require(
        num_rows < 2**31,
        f"num_blocks={num_blocks} makes {num_rows} rows (L*P*2*K*S), must be under 2**31",
    )


def is_quantized(dtype: Any) -> bool:
    """Whether a pool of ``dtype`` has scales."""
    return jnp.dtype(dtype).name in MAX_STORED


def _stored_head_dim(spec: ModelSpec, head_dim: int | None) -> int:
    require(
        head_dim is None or head_dim >= spec.head_dim,
        f"pool_head_dim={head_dim} must be at least the model's head_dim={spec.head_dim}",
    )
    return spec.head_dim if head_dim is None else head_dim


def bytes_per_block(
    spec: ModelSpec, *, block_size: int, dtype: Any, head_dim: int | None = None
) -> int:
    """Bytes that one block takes over all layers: keys, values and, in 8 bits, their scales.

    Args:
      spec: the model's geometry.
      block_size: token positions a block (S).
      dtype: of the pool.
      head_dim: channels a head in the pool; None means the model's.

    Raises:
      ValueError: a head dim under the model's.
    """
    rows = 2 * spec.num_layers * spec.num_kv_heads * block_size
    row = _stored_head_dim(spec, head_dim) * jnp.dtype(dtype).itemsize
    return rows * (row + (4 if is_quantized(dtype) else 0))


def resolve_num_blocks(config: EngineConfig, spec: ModelSpec) -> int:
    """Turn the configured pool size into a number of blocks, the null block included.

    Raises:
      ValueError: the size holds no block or more rows than 32-bit indices reach, or is more than
        the device has free; or the device does not report its free memory; or
        ``pool_head_dim`` is under the model's.
    """
    block_bytes = bytes_per_block(
        spec, block_size=config.block_size, dtype=config.kv_dtype, head_dim=config.pool_head_dim
    )
    num_blocks, source = _wanted_blocks(config, spec, block_bytes)
    require(num_blocks >= 2, f"{source} must hold two blocks of {block_bytes} bytes")
    _check_shape(spec, num_blocks=num_blocks, block_size=config.block_size)
    free = _free_bytes_or_none()
    require(
        free is None or num_blocks * block_bytes <= free,
        f"{source} asks for a pool of {num_blocks * block_bytes} bytes, must be at most the "
        f"{free} that are free",
    )
    return num_blocks


def _wanted_blocks(config: EngineConfig, spec: ModelSpec, block_bytes: int) -> tuple[int, str]:
    """The number of blocks, and the setting that it comes from."""
    if config.num_blocks is not None:
        return config.num_blocks, f"num_blocks={config.num_blocks}"
    if config.pool_bytes is not None:
        return config.pool_bytes // block_bytes, f"pool_bytes={config.pool_bytes}"
    if config.memory_fraction is not None:
        budget = int(free_device_bytes() * config.memory_fraction)
        source = f"memory_fraction={config.memory_fraction} ({budget} bytes)"
        return budget // block_bytes, source
    longest = min(config.max_model_len or spec.max_position, DEFAULT_SEQUENCE_LEN)
    num_blocks = 1 + config.max_num_seqs * -(-longest // config.block_size)
    return num_blocks, f"max_num_seqs={config.max_num_seqs} (no pool size given)"


def _free_bytes_or_none() -> int | None:
    try:
        return free_device_bytes()
    except ValueError:
        return None


def free_device_bytes() -> int:
    """Free bytes of the default device; on CPU, of the machine's memory.

    Raises:
      ValueError: neither the device nor the operating system reports its memory.
    """
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError) as error:
        raise ValueError(
            f"memory_fraction: {device} does not report its free memory; use pool_bytes instead"
        ) from error


def run_pool_op(run: Callable[[str | None], Any], backend: str | None, *, like: KVPool) -> KVPool:
    """Run a write or a move of blocks; where the attention's backend has none, the best other one.

    Args:
      run: gets the backend's name, or None for the best one here; returns blocks, or the pair of
        blocks and scales where ``like`` has scales.
      backend: the one to use where it can.
      like: a pool of the same dtype.
    """
    try:
        result = run(backend)
    except NotImplementedError:
        result = run(None)
    return KVPool(result) if like.scales is None else KVPool(*result)
