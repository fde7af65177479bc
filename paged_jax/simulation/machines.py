"""Facts of GPUs and of models, from their makers' data sheets and configurations."""

from __future__ import annotations

import dataclasses

GB = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator.

    Attributes:
      name: as its maker calls it.
      memory_bytes: of its memory.
      bandwidth: bytes a second, peak.
      flops: 16-bit tensor-core operations a second, dense, peak.
      link_bandwidth: bytes a second that one GPU sends to the others, peak (NVLink).
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float


A100_40GB = Gpu(
    name="A100-SXM4-40GB",
    memory_bytes=40 * GIB,
    bandwidth=1555 * GB,
    flops=312e12,
    link_bandwidth=300 * GB,
)
A100_80GB = Gpu(
    name="A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    bandwidth=2039 * GB,
    flops=312e12,
    link_bandwidth=300 * GB,
)
H100 = Gpu(
    name="H100-SXM5-80GB",
    memory_bytes=80 * GIB,
    bandwidth=3350 * GB,
    flops=989e12,
    link_bandwidth=450 * GB,
)
H200 = Gpu(
    name="H200-SXM5-141GB",
    memory_bytes=141 * GB,
    bandwidth=4800 * GB,
    flops=989e12,
    link_bandwidth=450 * GB,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What of a model decides memory and time.

    Attributes:
      name: of the model.
      num_params: weights.
      num_layers: L.
      num_heads: H.
      num_kv_heads: K.
      head_dim: D.
      max_position: longest context in tokens.
      bytes_per_value: of weights and cache.
    """

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.bytes_per_value * self.num_params

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers.

        >>> OPT_13B.kv_bytes_per_token  # the paper's 800 KB, section 3
        819200
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


OPT_13B = Geometry(
    name="OPT-13B",
    num_params=12.85e9,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_position=2048,
)
OPT_66B = Geometry(
    name="OPT-66B",
    num_params=65.7e9,
    num_layers=64,
    num_heads=72,
    num_kv_heads=72,
    head_dim=128,
    max_position=2048,
)
OPT_175B = Geometry(
    name="OPT-175B",
    num_params=174.6e9,
    num_layers=96,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    max_position=2048,
)
LLAMA_13B = Geometry(
    name="LLaMA-13B",
    num_params=13.02e9,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_position=2048,
)
LLAMA_3_8B = Geometry(
    name="Llama-3-8B",
    num_params=8.03e9,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
)
LLAMA_3_70B = Geometry(
    name="Llama-3-70B",
    num_params=70.6e9,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A model on some GPUs, split over their heads (paper section 4.6), and its cache.

    Attributes:
      model: the model.
      gpu: each of them.
      num_gpus: how many.
      kv_bytes: bytes of the KV pool on all of them.
    """

    model: Geometry
    gpu: Gpu
    num_gpus: int
    kv_bytes: float

    @property
    def num_slots(self) -> int:
        """Token positions that the pool holds."""
        return int(self.kv_bytes // self.model.kv_bytes_per_token)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of the pool, the null block, which holds nothing, beside them.

        >>> PAPER_OPT_13B.num_blocks(16)  # the paper's 15.7K slots
        984
        """
        return self.num_slots // block_size + 1


# The paper's Table 1.
PAPER_OPT_13B = Server(model=OPT_13B, gpu=A100_40GB, num_gpus=1, kv_bytes=12 * GIB)
PAPER_OPT_66B = Server(model=OPT_66B, gpu=A100_40GB, num_gpus=4, kv_bytes=21 * GIB)
PAPER_OPT_175B = Server(model=OPT_175B, gpu=A100_80GB, num_gpus=8, kv_bytes=264 * GIB)
PAPER_LLAMA_13B = Server(model=LLAMA_13B, gpu=A100_40GB, num_gpus=1, kv_bytes=12 * GIB)


def make_server(model: Geometry, gpu: Gpu, *, num_gpus: int = 1) -> Server:
    """A server whose pool has what the weights leave of 90 % of the memory, vLLM's default share.

    >>> round(make_server(LLAMA_3_8B, H100).kv_bytes / GIB, 1)
    57.0

    Raises:
      ValueError: the weights leave nothing.
    """
    kv_bytes = 0.9 * gpu.memory_bytes * num_gpus - model.weight_bytes
    if kv_bytes <= 0:
        raise ValueError(
            f"num_gpus={num_gpus} of {gpu.name} must hold {model.weight_bytes / GIB:.0f} GiB of "
            f"weights of {model.name} in 90 % of their memory"
        )
    return Server(model=model, gpu=gpu, num_gpus=num_gpus, kv_bytes=kv_bytes)


SERVERS = {
    "opt-13b": PAPER_OPT_13B,
    "opt-66b": PAPER_OPT_66B,
    "opt-175b": PAPER_OPT_175B,
    "llama-13b": PAPER_LLAMA_13B,
    "llama-3-8b-a100": make_server(LLAMA_3_8B, A100_80GB),
    "llama-3-8b-h100": make_server(LLAMA_3_8B, H100),
    "llama-3-8b-h200": make_server(LLAMA_3_8B, H200),
    "llama-3-70b-a100x4": make_server(LLAMA_3_70B, A100_80GB, num_gpus=4),
    "llama-3-70b-h100x4": make_server(LLAMA_3_70B, H100, num_gpus=4),
    "llama-3-70b-h100x8": make_server(LLAMA_3_70B, H100, num_gpus=8),
    "llama-3-70b-h200x2": make_server(LLAMA_3_70B, H200, num_gpus=2),
}
"""Servers by name: the paper's four, and later ones."""
