"""Tile shapes of the Mosaic GPU prefill kernel: a pure choice from the call and the device."""

import dataclasses

from jax._src import lib as jax_lib  # nothing public tells the version of CUDA

from pallas_kernels.devices import Device
from pallas_kernels.paged_attention.call import AttentionCall

WARPGROUP_ROWS = 64  # query rows a consumer warpgroup holds: M of one WGMMA
MAX_STAGES = 6
# JAX's own attention_mgpu refuses these for causal masks, "due to a ptxas miscompilation".
MISCOMPILING_CUDA = range(12080, 12091)
SMEM_SLACK = 4096  # bytes for barriers, alignment and the compiler's own scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicPrefillConfig:
    """Tile shapes of one compiled kernel.

    Attributes:
        tile_rows: query rows a thread block holds, 64 a consumer warpgroup; a row is one
            (token, query head) pair of a KV head.
        tile_tokens: KV positions a tile.
        num_stages: tiles of K, and of V, in flight or in use.

    Raises:
        ValueError: a value that the kernel cannot have.
    """

    tile_rows: int
    tile_tokens: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.tile_rows not in (64, 128):
            raise ValueError(f"tile_rows is {self.tile_rows}; must be 64 or 128")
        if self.tile_tokens not in (64, 128):
            raise ValueError(f"tile_tokens is {self.tile_tokens}; must be 64 or 128")
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}; must be at least 1")

    @property
    def num_consumers(self) -> int:
        """Warpgroups that compute; one more issues the copies."""
        return self.tile_rows // WARPGROUP_ROWS

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a thread block, bytes, for a 16-bit pool."""
        elements = (self.tile_rows + 2 * self.num_stages * self.tile_tokens) * head_dim
        return 2 * elements + 4 * self.tile_rows + SMEM_SLACK


def cuda_runtime_version() -> int:
    """1000 * major + 10 * minor of the CUDA that JAX's plugin uses; 0 where there is no plugin."""
    versions = getattr(jax_lib, "cuda_versions", None)
    return 0 if versions is None else versions.cuda_runtime_get_version()


def pick_tile_tokens(block_size: int, head_dim: int) -> int | None:
    """The most KV positions a tile that are whole blocks, or an even share of one; else None.

    A tile's scores and the output share a warpgroup's registers, so a wide head has fewer.

    >>> pick_tile_tokens(16, 128), pick_tile_tokens(128, 256), pick_tile_tokens(48, 128)
    (128, 64, None)
    """
    for tokens in (128, 64) if head_dim <= 128 else (64,):
        if tokens % block_size == 0 or block_size % tokens == 0:
            return tokens
    return None


def pick_mosaic_prefill_config(call: AttentionCall, device: Device) -> MosaicPrefillConfig:
    """Choose the tile shapes.

    Two consumer warpgroups wherever a row's tokens fill them: each K and V byte then serves 128
    query rows, and one warpgroup's softmax runs beside the other's products (arXiv 2407.08608,
    section 3.1). The rest of the shared memory is stages.

    Raises:
        ValueError: the call is one that `unsupported_prefill` names.
    """
    tokens = pick_tile_tokens(call.block_size, call.head_dim)
    if tokens is None:
        raise ValueError(f"block_size is {call.block_size}; no tile of tokens fits it")
    rows = 64 if call.num_new * call.group <= 64 else 128
    stages = MAX_STAGES
    config = MosaicPrefillConfig(tile_rows=rows, tile_tokens=tokens, num_stages=stages)
    while config.smem_bytes(call.head_dim) > device.smem_per_block and config.num_stages > 1:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def unsupported_prefill(call: AttentionCall, device: Device) -> str | None:
    """Why the Mosaic prefill kernel cannot take a call on a device, or None if it can."""
    if call.has_score_fn:
        return "score_fn (only reference and xla take it)"
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return f"prefill needs compute capability 9.x (WGMMA); {device.kind} has another"
    if cuda_runtime_version() in MISCOMPILING_CUDA:
        return "prefill with CUDA 12.8 or 12.9, whose ptxas miscompiles causal masks (13 works)"
    if call.is_quantized:
        return f"prefill from a pool of {call.kv_dtype} (must be bfloat16 or float16)"
    if call.kv_dtype not in ("bfloat16", "float16"):
        return f"a pool of {call.kv_dtype} (must be bfloat16 or float16)"
    if call.head_dim % 64 or call.head_dim > 256:
        return (
            f"head_dim {call.head_dim} (must be 64, 128, 192 or 256; store the pool with D padded "
            "to the next of these)"
        )
    if call.block_size < 8 or pick_tile_tokens(call.block_size, call.head_dim) is None:
        return f"block_size {call.block_size} (must be 8, 16, 32 or a multiple of 64)"
    return None
