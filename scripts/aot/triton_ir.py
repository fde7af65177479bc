"""Reads the Triton IR that Pallas lowers to: how wide the offsets into large arrays are."""

import dataclasses
import math
import re
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

_ADD = re.compile(r"(%[\w#]+) = tt\.addptr (%[\w#]+), %[\w#]+ : .*, (?:tensor<[\dx]*)?(i\d+)>?")
_VIEW = re.compile(r"(%[\w#]+) = tt\.(?:splat|broadcast|expand_dims|reshape) (%[\w#]+)\b.*tt\.ptr")
_USE = re.compile(r"(?:= tt\.load|tt\.store|= tt\.atomic_rmw [\w, ]*) (%[\w#]+)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonCall:
    """One Pallas Triton kernel of a lowered program.

    Attributes:
        ir: its Triton IR as text.
        num_elements: elements of each operand and then of each result: the kernel's arguments.
    """

    ir: str
    num_elements: tuple[int, ...]


def triton_calls(lowered: jax.stages.Lowered) -> list[TritonCall]:
    """The Triton kernels of a program lowered for CUDA, in the order of their calls."""
    calls = []
    module: Any = lowered.compiler_ir("stablehlo")
    for operation in _walk(module.operation):
        if operation.name != "stablehlo.custom_call":
            continue
        name = ir.StringAttr(operation.attributes["call_target_name"]).value
        if name != "__gpu$xla.gpu.triton":
            continue
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        types = [value.type for value in (*operation.operands, *operation.results)]
        calls.append(
            TritonCall(
                ir=_parse(ir.StringAttr(config["ir"]).value_bytes),
                num_elements=tuple(math.prod(ir.RankedTensorType(t).shape) for t in types),
            )
        )
    return calls


def narrow_accesses(call: TritonCall, *, min_elements: int = 2**31) -> list[str]:
    """Loads and stores of arguments with more elements whose offset is computed in 32 bits.

    A pointer is an argument plus offsets, added one after the other. One of them must be 64 bits
    wide, and the kernel must multiply in 64 bits (else a narrow product was widened too late).

    Args:
        call: the kernel.
        min_elements: arguments above this are looked at.

    Returns:
        The lines of the IR that break the rule.
    """
    # MLIR prints the arguments of a function as %arg0, %arg1, ...
    large = [f"%arg{i}" for i, size in enumerate(call.num_elements) if size > min_elements]
    lines = call.ir.splitlines()
    multiplies = any(re.search(r"arith\.muli .*i64", line) for line in lines)
    roots: dict[str, tuple[str, bool]] = {name: (name, False) for name in large}
    narrow = []
    for line in lines:
        if added := _ADD.search(line):
            result, source, width = added.groups()
            if source in roots:
                root, is_wide = roots[source]
                roots[result] = (root, is_wide or width == "i64")
        elif viewed := _VIEW.search(line):
            if viewed.group(2) in roots:
                roots[viewed.group(1)] = roots[viewed.group(2)]
        elif (used := _USE.search(line)) and used.group(1) in roots:
            is_wide = roots[used.group(1)][1]
            if not (is_wide and multiplies):
                narrow.append(line.strip())
    return narrow


def accesses(call: TritonCall, *, min_elements: int = 2**31) -> int:
    """How many loads and stores of large arguments a kernel has."""
    wide_ir = call.ir.replace("i64", "i0")
    return len(narrow_accesses(dataclasses.replace(call, ir=wide_ir), min_elements=min_elements))


def _walk(operation: Any) -> Any:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def _parse(bytecode: bytes) -> str:
    with ir.Context() as context:
        triton_dialect.register_dialect(context)
        context.load_all_available_dialects()
        return str(ir.Module.parse(bytecode))
