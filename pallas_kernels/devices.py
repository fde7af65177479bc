"""Facts of the device that a call is traced for: what backends and heuristics decide on."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its published figures (NVIDIA's data sheets and tuning guides).

    Attributes:
        kind: as `jax.Device.device_kind`.
        platform: "cuda", or "cpu", "tpu", ... where no GPU kernel runs.
        compute_capability: (major, minor), or None where unknown or not a GPU.
        num_sms: multiprocessors.
        memory_bandwidth: bytes/s.
        matmul_rate: dense bf16 tensor-core operations/s.
        l2_bytes: second-level cache.
        smem_per_sm: shared memory of a multiprocessor, bytes.
        smem_per_block: most shared memory one thread block may ask for, bytes.
    """

    kind: str
    platform: str = "cuda"
    compute_capability: tuple[int, int] | None
    num_sms: int = 1
    memory_bandwidth: float = 1e12
    matmul_rate: float = 1e14
    l2_bytes: int = 40 * 2**20
    smem_per_sm: int = 102_400
    smem_per_block: int = 101_376

    @property
    def is_cuda(self) -> bool:
        """Whether the Pallas GPU kernels can run here at all."""
        return self.platform == "cuda"


A100 = Device(
    kind="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    num_sms=108,
    memory_bandwidth=2.04e12,
    matmul_rate=312e12,
    l2_bytes=41_943_040,
    smem_per_sm=167_936,
    smem_per_block=166_912,
)
H100 = Device(
    kind="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_sms=132,
    memory_bandwidth=3.35e12,
    matmul_rate=989e12,
    l2_bytes=52_428_800,
    smem_per_sm=233_472,
    smem_per_block=232_448,
)
H200 = dataclasses.replace(H100, kind="NVIDIA H200", memory_bandwidth=4.8e12)
B200 = Device(
    kind="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=148,
    memory_bandwidth=7.67e12,
    matmul_rate=2250e12,
    l2_bytes=132_644_864,
    smem_per_sm=233_472,
    smem_per_block=232_448,
)
L4 = Device(
    kind="NVIDIA L4",
    compute_capability=(8, 9),
    num_sms=58,
    memory_bandwidth=3.0e11,
    matmul_rate=121e12,
    l2_bytes=50_331_648,
)
A10 = Device(
    kind="NVIDIA A10",
    compute_capability=(8, 6),
    num_sms=72,
    memory_bandwidth=6.0e11,
    matmul_rate=125e12,
    l2_bytes=6_291_456,
)
RTX_4090 = dataclasses.replace(
    L4,
    kind="NVIDIA GeForce RTX 4090",
    num_sms=128,
    memory_bandwidth=1.008e12,
    matmul_rate=165e12,
    l2_bytes=75_497_472,
)
KNOWN_GPUS = {
    "a100": A100,
    "h100": H100,
    "h200": H200,
    "b200": B200,
    "l4": L4,
    "a10": A10,
    "rtx4090": RTX_4090,
}
# Told apart by a word of `device_kind`; longer names first, as "A10" begins "A100".
_WORDS = {"GH200": "h200", "GB200": "b200", "H100": "h100", "H200": "h200", "B200": "b200",
          "A100": "a100", "4090": "rtx4090", "A10": "a10", "L4": "l4"}  # fmt: skip


def known_gpu(kind: str) -> Device | None:
    """The facts of a GPU by its `device_kind`, or None for one that is not listed.

    >>> known_gpu("NVIDIA H100 80GB HBM3").num_sms
    132
    >>> known_gpu("NVIDIA A10G") == A10
    True
    """
    words = kind.replace("-", " ").replace("_", " ").split()
    for word, name in _WORDS.items():
        if any(part == word or part == f"{word}G" for part in words):
            return KNOWN_GPUS[name]
    return None


def current_device() -> Device:
    """The device that code traced now will run on.

    That is the device of the surrounding abstract mesh, when it names one (compiling for a GPU
    that is not there), else JAX's default device. A GPU that `known_gpu` does not list gets what
    JAX reports of it and, for the rest, the figures of a small Ampere part.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        if abstract.platform not in ("cuda", "gpu"):
            return Device(
                kind=abstract.device_kind, platform=abstract.platform, compute_capability=None
            )
        return _gpu(abstract.device_kind, compute_capability=None, num_sms=abstract.num_cores)
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return Device(kind=device.device_kind, platform=device.platform, compute_capability=None)
    return _gpu(
        device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        num_sms=getattr(device, "core_count", None),
    )


def kernel_device() -> Device:
    """`current_device`, or an H100 in its place where that is no GPU: for the interpreters."""
    device = current_device()
    return device if device.is_cuda else H100


def _gpu(kind: str, *, compute_capability: Any, num_sms: int | None) -> Device:
    known = known_gpu(kind)
    if known is not None:
        return dataclasses.replace(known, kind=kind)
    if isinstance(compute_capability, str):
        major, _, minor = compute_capability.partition(".")
        compute_capability = (int(major), int(minor or 0))
    return Device(kind=kind, compute_capability=compute_capability, num_sms=num_sms or 64)
