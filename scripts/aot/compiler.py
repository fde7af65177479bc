"""Lowers and compiles a program for a GPU that is not there (JAX's ahead-of-time topologies)."""

import contextlib
import functools
import re
import warnings
from typing import Any

import jax
from jax.experimental import topologies

from paged_jax_scripts.aot.cases import Program
from paged_jax_scripts.aot.targets import Target


@functools.cache
def absent_device(target: Target) -> Any:
    """A device object of a GPU that is described and not there; needs the CUDA plugin."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target.target_config
    )
    return topology.devices[0]


def abstract_mesh(kind: str) -> contextlib.AbstractContextManager[Any]:
    """The context in which code is traced for a GPU of this `device_kind`."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(
        # Auto: nothing is sharded, and ops that know nothing of sharding are traced as ever.
        jax.sharding.AbstractMesh(
            (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
        )
    )


def lower_for(kind: str, program: Program) -> jax.stages.Lowered:
    """Lower for CUDA; needs no plugin.

    Args:
        kind: the GPU's `device_kind`.
        program: what to lower.
    """
    jitted = jax.jit(program.run, donate_argnums=program.donated)
    with warnings.catch_warnings(), abstract_mesh(kind):
        # Said by every lowering; which backends exist when it is gone is pallas_kernels' affair.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return jitted.trace(*program.args).lower(lowering_platforms=("cuda",))


def lower_for_target(target: Target, program: Program) -> jax.stages.Lowered:
    """Lower so that `compile()` works; needs the CUDA plugin, no GPU."""
    device = absent_device(target)
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.args
    )
    placed = Program(run=program.run, args=args, donated=program.donated)
    return lower_for(target.device.kind, placed)


def memory_facts(compiled: jax.stages.Compiled, pool_bytes: int) -> dict[str, Any]:
    """Bytes of arguments that outputs share, temporaries, and copies as large as the pool."""
    stats: Any = compiled.memory_analysis()
    return {
        "pool_bytes": pool_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "pool_copies": count_copies(compiled.as_text() or "", at_least=pool_bytes // 8),
    }


def count_copies(hlo: str, *, at_least: int) -> int:
    """Copies (`copy`, `copy-start`) in optimised HLO of arrays of at least so many bytes.

    >>> count_copies("  %copy.1 = bf16[4,8]{1,0} copy(%x)", at_least=64)
    1
    """
    if at_least <= 0:
        return 0
    count = 0
    for shape in re.findall(r"= \(?(\w+\[[\d,]*\])[^=]*? copy(?:-start)?\(", hlo):
        dtype, dims = shape[:-1].split("[")
        size = _itemsize(dtype)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        count += size >= at_least
    return count


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
