"""Tile sizes, splits and warps of the Pallas Triton kernel, chosen from shapes and device facts."""

import dataclasses
import math

from pallas_kernels.devices import Device
from pallas_kernels.paged_attention.call import AttentionCall

MIN_ROWS = 16  # rows of a tensor core's tile
MIN_TOKENS = 16
MAX_TOKENS = 128
MANY_ROWS = 64  # from here on registers hold one program, and prefill is bound by products
MAX_SPLITS = 32
MAX_STAGES = 11
MAX_EXACT_STAGES = 7  # of float32 operands, which take more registers
TILES_PER_SPLIT = 2  # with fewer, starting a program and merging cost more than its share
REGISTERS_PER_SM = 65_536
SMEM_SHARE = 0.9  # of what a program may have: the compiler needs some for itself
RESERVED_SMEM = 1024  # of each resident program
LATENCY = 1.35e-6  # seconds from the request for a block to its arrival, memory being busy
MIN_IN_FLIGHT = 32 * 1024
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """How one call is cut into programs, and how each is compiled.

    Attributes:
        rows: query rows of a tile (new tokens times heads of a group), a power of two from 16.
        tokens: KV positions of a tile, a power of two from 16.
        splits: programs that share a row's context.
        num_warps: warps of a program, a power of two.
        num_stages: depth of the software pipeline. Half of it is the table's, read ahead of the
            blocks it names, and half the blocks': 3 buffers one tile of them, 5 two, 7 three.
    """

    rows: int
    tokens: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, least in (("rows", MIN_ROWS), ("tokens", MIN_TOKENS), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; must be a power of two from {least}")
        for name in ("splits", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")

    @property
    def num_buffers(self) -> int:
        """Tiles of keys and values that shared memory holds at a time."""
        return max(1, (self.num_stages - 1) // 2)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n`.

    >>> [next_power_of_two(n) for n in (1, 7, 8, 80)]
    [1, 8, 8, 128]
    """
    return 1 << (n - 1).bit_length()


def pick_triton_config(call: AttentionCall, device: Device) -> TritonConfig:
    """The configuration of a call, by a model of what keeps the memory busy.

    1. The query rows of a KV head share a tile where the registers hold them, so that each key
       and value is read once for the whole group; more rows are tiled.
    2. Tiles of keys and values are as long as the registers (`_tile_shape`) and shared memory
       allow: that of two programs where the registers hold two, as one then loads while the
       other computes.
    3. Where the memory is what bounds the call (few rows a tile), as many tiles are buffered ahead
       as let `bytes_in_flight` grow: three of one program rather than one each of two, if that
       is more. It is then above `bytes_wanted` on every device of `devices.py` that is large.
    4. The context is split until every multiprocessor has its programs, while a full table still
       gives each split `TILES_PER_SPLIT` tiles.
    """
    num_rows = call.num_new * call.group
    config = _tile_shape(call, num_rows)
    wanted = min(2, _resident_by_registers(call, config))
    while config.tokens > MIN_TOKENS and num_resident(call, device, config) < wanted:
        config = dataclasses.replace(config, tokens=config.tokens // 2)
    if config.rows < MANY_ROWS:
        config = _deepest(call, device, config)
    programs = -(-num_rows // config.rows) * call.num_kv_heads * call.num_rows
    slots = max(1, num_resident(call, device, config)) * device.num_sms
    most = call.table_width * call.block_size // (TILES_PER_SPLIT * config.tokens)
    splits = max(1, min(slots // programs, most, MAX_SPLITS))
    return dataclasses.replace(config, splits=splits)


def _tile_shape(call: AttentionCall, num_rows: int) -> TritonConfig:
    """Rows, tokens and warps that compile without spills on A100, H100, H200 and B200."""
    padded = next_power_of_two(call.head_dim)
    exact = _operand_itemsize(call) == 4
    if exact:
        most = 16 if padded > 128 else 32
    else:
        most = MANY_ROWS if padded > 128 or call.is_quantized else 2 * MANY_ROWS
    rows = min(max(next_power_of_two(num_rows), MIN_ROWS), most)
    if exact:
        tokens = 32
    elif call.is_quantized:
        values = 16_384 if padded > 128 and rows == MIN_ROWS else 8192
        tokens = min(values // padded, MAX_TOKENS)
    else:
        tokens = 128 if rows == MIN_ROWS and padded <= 128 else 64
    if rows >= MANY_ROWS:  # the masks of a padded head dim take registers, too
        tokens = min(tokens, 64 if padded == call.head_dim else 32)
    few = rows < MANY_ROWS and tokens <= 64 and not exact and not call.is_quantized
    return TritonConfig(rows=rows, tokens=tokens, splits=1, num_warps=4 if few else 8, num_stages=3)


def _deepest(call: AttentionCall, device: Device, config: TritonConfig) -> TritonConfig:
    """As many buffers as raise `bytes_in_flight`; float32 stops at `bytes_wanted`."""
    enough = bytes_wanted(device) if _operand_itemsize(call) == 4 else math.inf
    best = bytes_in_flight(call, device, config)
    most = MAX_STAGES if _operand_itemsize(call) < 4 else MAX_EXACT_STAGES
    for num_stages in range(config.num_stages + 2, most + 1, 2):
        deeper = dataclasses.replace(config, num_stages=num_stages)
        if best >= enough or smem_bytes(call, deeper) > SMEM_SHARE * device.smem_per_block:
            break
        if bytes_in_flight(call, device, deeper) > best:
            config, best = deeper, bytes_in_flight(call, device, deeper)
    return config


def tile_bytes(call: AttentionCall, config: TritonConfig) -> int:
    """Shared memory of one tile of keys and values."""
    return 2 * config.tokens * next_power_of_two(call.head_dim) * ITEMSIZES[call.kv_dtype]


def smem_bytes(call: AttentionCall, config: TritonConfig) -> int:
    """Shared memory of a program: buffered tiles, the queries' and the weights' tile."""
    operands = config.rows * (next_power_of_two(call.head_dim) + config.tokens)
    exact = _operand_itemsize(call) == 4  # operands are kept in two parts
    return config.num_buffers * tile_bytes(call, config) + operands * (12 if exact else 2)


def num_resident(call: AttentionCall, device: Device, config: TritonConfig) -> int:
    """Programs that a multiprocessor holds at a time; 0 where one does not fit."""
    smem = smem_bytes(call, config)
    if smem > device.smem_per_block:
        return 0
    by_smem = device.smem_per_sm // (smem + RESERVED_SMEM)
    return min(by_smem, _resident_by_registers(call, config))


def _resident_by_registers(call: AttentionCall, config: TritonConfig) -> int:
    if _operand_itemsize(call) == 4 or config.rows >= MANY_ROWS or call.is_quantized:
        registers = 255
    else:
        registers = 168 if call.head_dim > 128 or config.rows > 16 else 128
    return REGISTERS_PER_SM // (registers * 32 * config.num_warps)


def bytes_in_flight(call: AttentionCall, device: Device, config: TritonConfig) -> int:
    """Keys and values under way to one multiprocessor: what hides the memory's latency."""
    resident = num_resident(call, device, config)
    real = tile_bytes(call, config) * call.head_dim // next_power_of_two(call.head_dim)
    return resident * config.num_buffers * real


def bytes_wanted(device: Device) -> int:
    """Bytes under way that keep the memory busy (Little's law), a multiprocessor.

    >>> from pallas_kernels.devices import A100, B200, H100, H200
    >>> [bytes_wanted(device) // 1024 for device in (A100, H100, H200, B200)]
    [32, 33, 47, 68]
    """
    return max(MIN_IN_FLIGHT, int(device.memory_bandwidth * LATENCY / device.num_sms))


def _operand_itemsize(call: AttentionCall) -> int:
    """Bytes of an element as the products take it; float32 where q and the pool differ."""
    if call.is_quantized or call.q_dtype == call.kv_dtype:
        return ITEMSIZES[call.q_dtype]
    return 4
