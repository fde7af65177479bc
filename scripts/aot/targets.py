"""GPUs to compile for: XLA's description of each, and what bounds its resident thread blocks."""

import dataclasses

from pallas_kernels.devices import KNOWN_GPUS, Device

# The same in all four parts (CUDA C programming guide, "Technical Specifications").
REGISTERS_PER_SM = 65_536
THREADS_PER_SM = 2_048
CTAS_PER_SM = 32
RESERVED_SMEM = 1_024  # bytes of shared memory that the driver keeps for each thread block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What XLA must know of a GPU beside `pallas_kernels.devices.Device`.

    Attributes:
        device: the facts that backends decide on.
        has_accelerated_features: compile for sm_90a or sm_100a (WGMMA, TMA, tcgen05).
        fpus_per_core: float32 lanes of a multiprocessor.
        memory_bytes: device memory.
        clock_ghz: boost clock.
    """

    device: Device
    has_accelerated_features: bool
    fpus_per_core: int
    memory_bytes: int
    clock_ghz: float

    @property
    def target_config(self) -> str:
        """The text proto that `jax.experimental.topologies` takes."""
        assert self.device.compute_capability is not None
        major, minor = self.device.compute_capability
        features = "feature_extension: ACCELERATED_FEATURES" * self.has_accelerated_features
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {THREADS_PER_SM}
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.device.smem_per_sm}
  shared_memory_per_block_optin: {self.device.smem_per_block}
  core_count: {self.device.num_sms}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {int(self.device.memory_bandwidth)}
  l2_cache_size: {self.device.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  registers_per_core_limit: {REGISTERS_PER_SM}
  registers_per_block_limit: {REGISTERS_PER_SM}
  device_address_bits: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.device.kind}"
"""


# NVIDIA's data sheets of the SXM parts with the most memory.
TARGETS = {
    "a100": Target(
        device=KNOWN_GPUS["a100"],
        has_accelerated_features=False,
        fpus_per_core=64,
        memory_bytes=85_100_068_864,
        clock_ghz=1.41,
    ),
    "h100": Target(
        device=KNOWN_GPUS["h100"],
        has_accelerated_features=True,
        fpus_per_core=128,
        memory_bytes=84_942_979_072,
        clock_ghz=1.98,
    ),
    "h200": Target(
        device=KNOWN_GPUS["h200"],
        has_accelerated_features=True,
        fpus_per_core=128,
        memory_bytes=151_397_597_184,
        clock_ghz=1.98,
    ),
    "b200": Target(
        device=KNOWN_GPUS["b200"],
        has_accelerated_features=True,
        fpus_per_core=128,
        memory_bytes=191_514_411_008,
        clock_ghz=1.965,
    ),
}


def resident_ctas(device: Device, *, threads: int, registers: int, smem: int) -> int:
    """Thread blocks of a kernel that fit in a multiprocessor at once.

    Registers are handed out to warps in units of 256 (8 a thread); shared memory in units of
    128 bytes, `RESERVED_SMEM` more than asked for.

    >>> resident_ctas(KNOWN_GPUS["h100"], threads=256, registers=78, smem=105_472)
    2
    """
    warps = -(-threads // 32)
    warp_registers = -(-registers // 8) * 8 * 32
    per_cta = -(-(smem + RESERVED_SMEM) // 128) * 128
    return min(
        CTAS_PER_SM,
        THREADS_PER_SM // (32 * warps),
        REGISTERS_PER_SM // (warps * max(warp_registers, 1)),
        device.smem_per_sm // per_cta,
    )
