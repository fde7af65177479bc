"""The device side of the KV pool: one preallocated array of blocks (the paper's section 4.2)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from paged_jax.config import EngineConfig, ModelSpec, require

NULL_BLOCK = 0
DEFAULT_SEQUENCE_LEN = 1024


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVPool:
    """All keys and values of all sequences, as blocks of one array.

    Attributes:
      blocks: ``[L, P, 2, K, S, D]``: layer, block, key (0) or value (1), KV head, slot, channel.
        Block 0 is the null block: never allocated, its content never matters.
    """

    blocks: Float[Array, "L P 2 K S D"]

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: Any = jnp.float32,
        fill: float = 0.0,
    ) -> KVPool:
        """Allocate a pool.

        Args:
          spec: the model's geometry (L, K, D).
          num_blocks: blocks a layer (P), the null block included; at least 2.
          block_size: token positions a block (S).
          dtype: element type.
          fill: initial value; any value gives the same results (NaN in tests proves it).

        Raises:
          ValueError: fewer than two blocks, or ``L*P*2*K*S >= 2**31``, where 32-bit row indices
            would wrap.
        """
        _check_shape(spec, num_blocks=num_blocks, block_size=block_size)
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        # One jitted call, so that a pool costs one compilation and no second buffer.
        blocks = jax.jit(lambda: jnp.full(shape, fill, dtype=dtype))()
        return cls(blocks)

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
        """Bytes of the whole pool."""
        return int(np.prod(self.blocks.shape, dtype=np.int64)) * self.blocks.dtype.itemsize

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


def bytes_per_block(spec: ModelSpec, *, block_size: int, dtype: Any) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return spec.kv_values_per_token * block_size * jnp.dtype(dtype).itemsize


def resolve_num_blocks(config: EngineConfig, spec: ModelSpec) -> int:
    """Turn the configured pool size into a number of blocks, the null block included.

    Raises:
      ValueError: the size holds no block or more rows than 32-bit indices reach, or is more than
        the device has free; or the device does not report its free memory.
    """
    block_bytes = bytes_per_block(spec, block_size=config.block_size, dtype=config.kv_dtype)
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
