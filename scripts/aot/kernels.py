"""Figures of each Pallas kernel of a compiled program, from what the compilers dumped."""

import dataclasses
import functools
import importlib.util
import math
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from paged_jax_scripts.aot import sass
from paged_jax_scripts.aot.targets import resident_ctas
from pallas_kernels.devices import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is launched."""

    grid: tuple[int, ...]
    threads: int
    dynamic_smem: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """One compiled kernel.

    Attributes:
        name: as the kernel's author named it.
        compiler: "triton" or "mosaic".
        registers, spill_bytes, stack_bytes, static_smem: from `ptxas -v`.
        grid, threads, dynamic_smem: of the launch.
        ctas_per_sm: by `resident_ctas`.
        num_instructions: SASS instructions, all of the kernel.
        counts: by class, as `sass.count_classes`.
        loop: of the main loop, as `sass.LoopCost`; None where there is none.
        ring_bytes: the largest buffer in shared memory that a Mosaic module declares, with all
            others of its size: the ring of K and V tiles; 0 for Triton.
        mma_columns: least n of the products that a Mosaic module asks of warp-level tensor-core
            instructions; 0 without any.
        largest_axis: most positions of an axis of any array of a Mosaic module, which indexes
            axes with 32 bits and multiplies by strides with 64; 0 for Triton.
    """

    name: str
    compiler: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem: int
    grid: tuple[int, ...]
    threads: int
    dynamic_smem: int
    ctas_per_sm: int
    num_instructions: int
    counts: dict[str, int]
    loop: dict[str, Any] | None
    ring_bytes: int
    mma_columns: int
    largest_axis: int


@functools.cache
def tool(name: str) -> str:
    """Path of a CUDA tool: of NVIDIA's wheels, else on PATH.

    Raises:
        FileNotFoundError: neither has it.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is in no nvidia wheel and not on PATH")
    return found


def tool_version(name: str) -> str:
    """The release that a tool reports, `V13.0.88`."""
    result = subprocess.run([tool(name), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V\d+\.\d+\.\d+", result.stdout)
    return found.group() if found else result.stdout.strip()


def kernel_facts(folder: Path, hlo: str, device: Device) -> list[KernelFacts]:
    """Read the dumps of one compilation.

    Args:
        folder: with `xla/` and `mosaic/`.
        hlo: the optimised HLO.
        device: for the resident thread blocks.
    """
    found = []
    launches = {}
    for path in sorted((folder / "xla").glob("*thunk_sequence.txt")):
        launches |= parse_thunks(path.read_text())
    names = pallas_names(hlo)
    for path in sorted((folder / "xla").glob("*.ptx")):
        ptx = path.read_text()
        entry = re.search(r"\.entry\s+(\w+)", ptx)
        if entry and entry.group(1) in launches and _is_pallas(entry.group(1), names):
            launch = launches[entry.group(1)]
            found.append(_facts(entry.group(1), "triton", path, launch, device))
    for path in sorted((folder / "mosaic").glob("*.ptx")):
        module = path.with_name(f"{path.stem}.before_layout_inference.txt")
        text, name = module.read_text(), re.sub(r"_\d+$", "", path.stem)
        facts = _facts(name, "mosaic", path, parse_gpu_launch(text), device)
        found.append(
            dataclasses.replace(
                facts,
                ring_bytes=parse_ring(text),
                mma_columns=parse_mma_columns(text),
                largest_axis=parse_largest_axis(text),
            )
        )
    return found


def pallas_names(hlo: str) -> set[str]:
    """Names of the Pallas Triton kernels that an optimised program calls.

    >>> pallas_names('custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "decode"}')
    {'decode'}
    """
    names = set()
    for line in hlo.splitlines():
        if 'custom_call_target="__gpu$xla.gpu.triton"' in line:
            names.update(re.findall(r"\bname = \"(\w+)\"", line)[-1:])
    return names


def _is_pallas(entry: str, names: set[str]) -> bool:
    # XLA tells kernels of one name apart by a number.
    return any(re.fullmatch(rf"{name}(_\d+)?", entry) for name in names)


def parse_thunks(text: str) -> dict[str, Launch]:
    """Launches that XLA's `*thunk_sequence.txt` lists, by kernel name."""
    launches = {}
    for name, grid, threads, smem in re.findall(
        r"kCustomKernel.*?\]\s+(\S+) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+)",
        text,
    ):
        x, y, z = (int(part) for part in threads.split(","))
        launches[name] = Launch(
            grid=tuple(int(part) for part in grid.split(",")),
            threads=x * y * z,
            dynamic_smem=int(smem),
        )
    return launches


def parse_gpu_launch(text: str) -> Launch:
    """The `gpu.launch` of a Mosaic module before layout inference.

    Raises:
        ValueError: there is none, or its sizes are not constants.
    """
    sizes = r"in \((.*?)\)"
    found = re.search(
        rf"gpu\.launch.*? blocks\(.*?\) {sizes} threads\(.*?\) {sizes}"
        r"(?: dynamic_shared_memory_size %c(\d+))?",
        text,
    )
    if found is None:
        raise ValueError("no gpu.launch with constant sizes in the Mosaic module")
    grid, threads = (
        tuple(int(x) for x in re.findall(r"= %c(\d+)", part)) for part in found.groups()[:2]
    )
    return Launch(
        grid=grid,
        threads=threads[0] * threads[1] * threads[2],
        dynamic_smem=int(found.group(3) or 0),
    )


def parse_ring(text: str) -> int:
    """Bytes of the largest shared-memory buffer of a Mosaic module, and of others as large.

    >>> parse_ring('"mosaic_gpu.slice_smem"() <{offset = 0 : i32}> : () -> memref<3x64xbf16, #gpu')
    384
    """
    buffers = {}
    for offset, dims, dtype in re.findall(
        r"slice_smem\"\(.*?offset = (\d+) : i32.*?-> memref<([\dx]+)x([a-z]\w+), #gpu", text
    ):
        bits = re.search(r"\d+", dtype)
        size = math.prod(int(x) for x in dims.split("x")) * (int(bits.group()) if bits else 8) // 8
        buffers[int(offset)] = max(size, buffers.get(int(offset), 0))
    largest = max(buffers.values(), default=0)
    return sum(size for size in buffers.values() if size == largest)


def parse_largest_axis(text: str) -> int:
    """Most positions of an axis of the arrays in a Mosaic module.

    >>> parse_largest_axis("memref<4x65600x128xbf16, strided<[8396800, 128, 1]>>")
    65600
    """
    shapes = re.findall(r"memref<((?:\d+x)+)", text)
    return max((int(x) for shape in shapes for x in shape[:-1].split("x")), default=0)


def parse_mma_columns(text: str) -> int:
    """Least n of a Mosaic module's `mma` accumulators, 0 without any.

    >>> parse_mma_columns("mosaic_gpu.mma accumulator(%1 : vector<64x8xf32>) a(%2 ...")
    8
    """
    found = re.findall(r"mosaic_gpu\.mma accumulator\(%\w+ : vector<\d+x(\d+)x", text)
    return min(map(int, found), default=0)


def parse_ptxas(log: str) -> dict[str, int]:
    """Registers, spills, stack and static shared memory from what `ptxas -v` prints.

    >>> log = "8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"
    >>> parse_ptxas(log + "\\nptxas info : Used 40 registers, used 1 barriers, 16 bytes smem")
    {'registers': 40, 'spill_bytes': 8, 'stack_bytes': 8, 'static_smem': 16}
    """
    registers = re.search(r"Used (\d+) registers", log)
    smem = re.search(r"(\d+) bytes smem", log)
    return {
        "registers": int(registers.group(1)) if registers else 0,
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "stack_bytes": sum(map(int, re.findall(r"(\d+) bytes stack", log))),
        "static_smem": int(smem.group(1)) if smem else 0,
    }


def _facts(name: str, compiler: str, ptx: Path, launch: Launch, device: Device) -> KernelFacts:
    text = ptx.read_text()
    target = re.search(r"\.target\s+(sm_\w+)", text)
    assert target is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [tool("ptxas"), "-v", f"-arch={target.group(1)}", str(ptx), "-o", cubin.name]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [tool("nvdisasm"), "-c", cubin.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = parse_ptxas(log)
    blocks = sass.parse_blocks(next(iter(sass.split_kernels(listing).values())))
    instructions = sass.all_instructions(blocks)
    loop = sass.main_loop(blocks)
    return KernelFacts(
        name=name,
        compiler=compiler,
        **used,
        grid=launch.grid,
        threads=launch.threads,
        dynamic_smem=launch.dynamic_smem,
        ctas_per_sm=resident_ctas(
            device,
            threads=launch.threads,
            registers=used["registers"],
            smem=used["static_smem"] + launch.dynamic_smem,
        ),
        num_instructions=len(instructions),
        counts=sass.count_classes(instructions),
        loop=dataclasses.asdict(sass.loop_cost(blocks, loop)) if loop else None,
        ring_bytes=0,
        mma_columns=0,
        largest_axis=0,
    )
