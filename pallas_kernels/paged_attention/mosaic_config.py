"""Tile shapes, ring depth and grid of the Mosaic decode kernel, by a stated model.

The model, for a kernel that should be bound by memory alone:

- A thread block (CTA) needs shared memory for its ring of K/V tiles, two buffers of queries and
  the probabilities, and registers that grow with the accumulator. From these follows how many
  are resident on a multiprocessor.
- By Little's law a multiprocessor must keep latency x its share of the bandwidth in flight. With
  about 1.2 microseconds under load that is 32 KB on an A100 or H100 and 48 KB on an H200 or B200.
- Two resident CTAs hide each other's latencies (softmax, tensor core) and are preferred; then
  the deepest ring that fits.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.devices import Device
from pallas_kernels.paged_attention.call import AttentionCall
from pallas_kernels.paged_attention.tuned import tuned_config

TILE_ROWS = 64  # rows of the tensor core's M side
MAX_COLUMNS = 64  # query columns (T * G) of one head
PACKED_COLUMNS = 16  # packing heads may widen a tile to this many columns
MAX_STAGES = 6
# What the pool's elements are multiplied as. From int8 to bfloat16 there is a short path, from
# float8_e4m3fn to float16 an instruction; both are exact.
PRODUCT_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "bfloat16",
    "float8_e4m3fn": "float16",
}
THREADS = 256  # one consumer and one producer warpgroup
SYSTEM_SMEM = 1024  # bytes that CUDA keeps a CTA
REGISTERS_PER_SM = 65_536
MAX_REGISTERS = 255  # a thread's; more would spill


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicDecodeConfig:
    """How the decode kernel is laid out on a device.

    Attributes:
        pack: adjacent key/value heads that share a tile; more are fewer, larger copies, and as
            many times the columns.
        stages: tiles of the ring.
        num_ctas: persistent thread blocks.
        mma: use `mma` (any tensor core since Ampere) rather than Hopper's `wgmma`.
    """

    pack: int
    stages: int
    num_ctas: int
    mma: bool

    def __post_init__(self):
        if self.pack not in (1, 2, 4, 8):
            raise ValueError(f"pack is {self.pack}; must be 1, 2, 4 or 8")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; must be at least 2")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas is {self.num_ctas}; must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeGeometry:
    """Sizes of a tile: `TILE_ROWS` rows of K or V, for the columns of `pack` heads.

    Attributes:
        pack: heads a tile.
        block_tokens: token positions of a block that one tile holds (S, or 64 of a larger S).
        num_groups: head groups a row (K / pack).
        head_columns: columns a head: T * G, padded to a multiple of 8.
    """

    pack: int
    block_tokens: int
    num_groups: int
    head_columns: int

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.pack * self.head_columns

    @property
    def tile_tokens(self) -> int:
        """Token positions a tile."""
        return TILE_ROWS // self.pack

    @property
    def block_rows(self) -> int:
        """Rows of a tile that come from one block: tokens of one head, then of the next."""
        return self.block_tokens * self.pack

    @property
    def blocks_per_tile(self) -> int:
        """Blocks a tile is gathered from."""
        return TILE_ROWS // self.block_rows


def decode_geometry(call: AttentionCall, config: MosaicDecodeConfig) -> DecodeGeometry:
    """Sizes of the tiles of a call."""
    return DecodeGeometry(
        pack=config.pack,
        block_tokens=min(call.block_size, TILE_ROWS),
        num_groups=call.num_kv_heads // config.pack,
        head_columns=_head_columns(call),
    )


def pick_mosaic_decode_config(call: AttentionCall, device: Device) -> MosaicDecodeConfig:
    """The configuration for a call that `unsupported_decode` lets pass, by the model above.

    >>> from pallas_kernels.devices import H100
    >>> call = AttentionCall(num_rows=32, num_new=1, num_heads=32, num_kv_heads=8, head_dim=128,
    ...     block_size=16, table_width=128, num_blocks=4096, q_dtype="bfloat16",
    ...     kv_dtype="bfloat16")
    >>> pick_mosaic_decode_config(call, H100)
    MosaicDecodeConfig(pack=2, stages=3, num_ctas=264, mma=False)
    """
    blocks = max(1, TILE_ROWS // call.block_size)
    limit = max(1, PACKED_COLUMNS // _head_columns(call))
    if call.is_quantized and call.block_size * limit < 32:
        limit = 32 // call.block_size  # the scales of a block are copied 128 bytes at a time
    pack = math.gcd(call.num_kv_heads, blocks, limit)
    columns = pack * _head_columns(call)
    registers = THREADS * register_estimate(call, columns)
    resident = 2 if 2 * registers <= REGISTERS_PER_SM else 1
    while True:
        budget = min(device.smem_per_sm // resident - SYSTEM_SMEM, device.smem_per_block)
        stages = (budget - _fixed_bytes(call, columns)) // tile_bytes(call)
        if stages >= 2 or resident == 1:
            break
        resident = 1
    return MosaicDecodeConfig(
        pack=pack,
        stages=int(min(max(stages, 2), MAX_STAGES)),
        num_ctas=device.num_sms * resident,
        mma=device.compute_capability is not None and device.compute_capability[0] >= 10,
    )


def decode_config(call: AttentionCall, device: Device) -> MosaicDecodeConfig:
    """As measured on the device, else as the model says; q's dtype does not count, nor a window."""
    call = dataclasses.replace(call, q_dtype=PRODUCT_DTYPES[call.kv_dtype])
    measured = tuned_config(call, device, backend="mosaic")
    return MosaicDecodeConfig(**measured) if measured else pick_mosaic_decode_config(call, device)


def resident_ctas(call: AttentionCall, config: MosaicDecodeConfig, device: Device) -> int:
    """Thread blocks a multiprocessor holds, by the model."""
    columns = config.pack * _head_columns(call)
    smem = smem_bytes(call, config) + SYSTEM_SMEM
    by_registers = REGISTERS_PER_SM // (THREADS * register_estimate(call, columns))
    return min(device.smem_per_sm // smem, by_registers)


def bytes_in_flight(call: AttentionCall, config: MosaicDecodeConfig, device: Device) -> int:
    """K/V bytes that the rings of one multiprocessor hold."""
    return resident_ctas(call, config, device) * config.stages * tile_bytes(call)


def smem_bytes(call: AttentionCall, config: MosaicDecodeConfig) -> int:
    """Shared memory of a thread block."""
    columns = config.pack * _head_columns(call)
    return config.stages * tile_bytes(call) + _fixed_bytes(call, columns)


def tile_bytes(call: AttentionCall) -> int:
    """Bytes of a tile of K and V in the ring, with scales."""
    scales = 4 if call.is_quantized else 0
    return 2 * TILE_ROWS * (call.head_dim * jnp.dtype(call.kv_dtype).itemsize + scales)


def register_estimate(call: AttentionCall, columns: int) -> int:
    """Registers a thread, fitted to ptxas's reports over D 64..256 and 8..64 columns."""
    accumulators = (call.head_dim + 2 * TILE_ROWS) * columns / 128  # output, scores, sums
    registers = 56 + 1.5 * accumulators
    if call.is_quantized:
        registers += 3 / 8 * (call.head_dim - 64)
    if call.num_new > 1:
        registers += 3 / 4 * columns  # the token of each column, kept for the mask
    return 8 * math.ceil(registers / 8)


def _head_columns(call: AttentionCall) -> int:
    return 8 * math.ceil(call.num_new * call.group / 8)


def _fixed_bytes(call: AttentionCall, columns: int) -> int:
    """All but the ring: two buffers of queries, the probabilities, barriers and reductions.

    An 8-bit pool has a tile of K or V in 16 bits, too.
    """
    wide = TILE_ROWS * call.head_dim if call.is_quantized else 0
    return 2 * (2 * columns * call.head_dim + columns * TILE_ROWS + wide) + 4096
