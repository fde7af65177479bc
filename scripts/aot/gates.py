"""What must hold of the compiled kernels; every violation is one line."""

import dataclasses
from typing import Any

from paged_jax_scripts.aot.cases import MOVES, THEIRS, Case
from paged_jax_scripts.aot.targets import TARGETS

MAX_TEMP_SHARE = 0.02
MIN_IN_FLIGHT = {"a100": 32 * 1024, "h100": 32 * 1024, "h200": 48 * 1024, "b200": 48 * 1024}
OURS = ("mosaic", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicBounds:
    """Of the Mosaic decode kernel on Hopper at head_dim 128, bfloat16."""

    per_64_tokens: dict[int, float]  # by block size
    registers: int
    ctas: int


# Those of the issue that asked for the kernel: the best of a study of its possible structures.
HOPPER_BOUNDS = MosaicBounds(per_64_tokens={16: 260, 64: 165}, registers=104, ctas=2)


def check(gpu: str, cases: list[Case], results: dict[str, dict[str, Any]]) -> list[str]:
    """All violations of one GPU's results.

    Args:
        gpu: name in `TARGETS`.
        cases: what was compiled.
        results: what the worker found, by the cases' keys.
    """
    found = []
    for case in cases:
        facts = results[case.key]
        if facts["status"] == "unsupported" and case.backend in OURS and is_required(gpu, case):
            found.append(f"{gpu} {case.key}: must be supported, is not: {facts['reason']}")
        elif facts["status"] in ("failed", "crashed"):
            if case.backend in (*OURS, "xla"):
                found.append(f"{gpu} {case.key}: {facts['status']}: {facts['reason']}")
        elif facts["status"] == "ok" and case.backend not in THEIRS:
            reasons = check_case(gpu, case, facts)
            reasons += _compare_with_jax(gpu, case, facts, results)
            found += [f"{gpu} {case.key}: {reason}" for reason in reasons]
    return found


def is_required(gpu: str, case: Case) -> bool:
    """Whether one of our backends must take a case on a GPU.

    Triton takes everything but e4m3 before compute capability 8.9. Mosaic needs Hopper: it moves
    blocks and writes what needs no conversion, and attends to 16-bit pools whose head dim its
    copies can tile; its prefill is not for Blackwell.
    """
    if case.backend == "triton":
        return not (case.kv_dtype == "float8_e4m3fn" and gpu == "a100")
    if gpu == "a100":
        return False
    if case.kind in MOVES:
        return True
    if case.kind == "kv_write":
        return case.kv_dtype == case.q_dtype
    if case.kv_dtype not in ("bfloat16", "float16") or case.head_dim % 64:
        return False
    return case.is_attention and (gpu, case.kind) != ("b200", "prefill")


def check_case(gpu: str, case: Case, facts: dict[str, Any]) -> list[str]:
    """Violations of one compiled case of ours."""
    found = []
    device = TARGETS[gpu].device
    for kernel in facts["kernels"]:
        name = kernel["name"]
        if kernel["spill_bytes"] or kernel["counts"].get("local"):
            local = kernel["counts"].get("local", 0)
            found.append(f"{name}: spills {kernel['spill_bytes']} bytes ({local} local accesses)")
        smem = kernel["static_smem"] + kernel["dynamic_smem"]
        if smem > device.smem_per_block:
            found.append(f"{name}: {smem} bytes of shared memory, over {device.smem_per_block}")
        if kernel["ctas_per_sm"] < 1:
            found.append(f"{name}: not even one thread block fits a multiprocessor")
    if case.backend in OURS and not facts["kernels"]:
        found.append("no Pallas kernel in the compiled program")
    if case.is_attention and case.backend in OURS:
        found += _check_attention(gpu, case, facts)
    if case.kind in ("kv_write", *MOVES) and case.backend in OURS:
        wide = ("loads_16b", "bulk_copies", "bulk_stores")
        if not any(kernel["counts"].get(name) for kernel in facts["kernels"] for name in wide):
            found.append("no 16-byte load and no bulk copy")
    if facts["memory"]["pool_bytes"]:
        found += check_memory(facts["memory"])
    if case.is_big and "wide" in facts:
        found += _check_offsets(case, facts)
    return found


def check_memory(memory: dict[str, int]) -> list[str]:
    """The pool stays where it is: aliased whole, no temporary or copy of its size."""
    found, pool = [], memory["pool_bytes"]
    if memory["alias_bytes"] < pool:
        found.append(f"aliases {memory['alias_bytes']} of the pool's {pool} bytes")
    if memory["temp_bytes"] > MAX_TEMP_SHARE * pool:
        share = memory["temp_bytes"] / pool
        found.append(f"temporaries are {share:.1%} of the pool, over {MAX_TEMP_SHARE:.0%}")
    if memory["pool_copies"]:
        found.append(f"{memory['pool_copies']} copies of pool-sized arrays in the HLO")
    return found


def _check_attention(gpu: str, case: Case, facts: dict[str, Any]) -> list[str]:
    attention = facts.get("attention")
    if attention is None:
        return ["no kernel with a loop"]
    kernel = next(k for k in facts["kernels"] if k["name"] == attention["kernel"])
    counts, loop = kernel["counts"], kernel["loop"]["counts"]
    found = []
    is_16_bit = case.kv_dtype in ("bfloat16", "float16")
    tensor = sum(counts.get(name, 0) for name in ("hmma", "hgmma", "utcmma"))
    if is_16_bit and not tensor:
        found.append("no tensor-core instruction")
    if case.backend == "mosaic":
        if not counts.get("bulk_copies"):
            found.append("moves K and V without bulk copies")
        if loop.get("global_loads"):
            found.append(f"{loop['global_loads']} loads from global memory in the main loop")
    elif not loop.get("loads_16b"):
        found.append("no 16-byte loads in the main loop")
    by_mma, by_copies = attention["tokens_by_mma"], attention["tokens_by_copies"]
    if is_16_bit and by_mma and by_copies and by_mma != by_copies:
        found.append(f"a turn is {by_mma:g} tokens by products but {by_copies:g} by copies")
    if case.kind == "decode" and case.kv_dtype == "bfloat16":
        least, flight = MIN_IN_FLIGHT[gpu], attention["in_flight"] or 0
        if flight < least:
            found.append(f"{flight} bytes in flight a multiprocessor, under {least}")
    if case.backend == "mosaic" and gpu in ("h100", "h200"):
        found += _check_bounds(case, attention, kernel)
    return found


def _check_bounds(case: Case, attention: dict[str, Any], kernel: dict[str, Any]) -> list[str]:
    """The issue's bounds, at the shape that it names (and at blocks of 64)."""
    is_named = (case.kind, case.group, case.head_dim, case.kv_dtype) == (
        "decode",
        4,
        128,
        "bfloat16",
    )
    if not is_named or case.is_big or case.query_dim:
        return []
    found = []
    most, cost = HOPPER_BOUNDS.per_64_tokens[case.block_size], attention["per_64_tokens"]
    if cost is None or cost > most:
        found.append(f"main loop {cost} instructions per 64 tokens, over {most}")
    if kernel["registers"] > HOPPER_BOUNDS.registers:
        found.append(f"{kernel['registers']} registers, over {HOPPER_BOUNDS.registers}")
    if kernel["ctas_per_sm"] < HOPPER_BOUNDS.ctas:
        found.append(f"{kernel['ctas_per_sm']} resident thread blocks, under {HOPPER_BOUNDS.ctas}")
    return found


def _compare_with_jax(
    gpu: str, case: Case, facts: dict[str, Any], results: dict[str, dict[str, Any]]
) -> list[str]:
    """Decode in bfloat16 at a shape that JAX's own kernel has too, with four warps or with eight.

    More warps are fewer instructions a warp for the same tile, so what is compared is also times
    the warps: issue slots of a multiprocessor.
    """
    ours = facts.get("attention")
    if ours is None or case.kv_dtype != "bfloat16" or case.is_big:
        return []
    found = []
    for name in THEIRS:
        theirs = results.get(f"{name}/{case.name}", {}).get("attention")
        if theirs is None:
            continue
        if case.head_dim == 128 and gpu == "h100" and (case.block_size, case.group) == (16, 4):
            figures = {"warp_instructions_per_token": "warp instructions a token"}
            if name == "jax":
                figures["per_64_tokens"] = "instructions per 64 tokens"
            for figure, words in figures.items():
                mine, other = ours[figure], theirs[figure]
                if mine is None or mine >= other:
                    found.append(f"main loop {mine} {words}; JAX's own ({name}) {other}")
        mine, other = ours["in_flight"] or 0, theirs["in_flight"] or 0
        if mine < other:
            found.append(
                f"{mine} bytes in flight a multiprocessor, under JAX's own ({name}) {other}"
            )
    return found


def _check_offsets(case: Case, facts: dict[str, Any]) -> list[str]:
    wide = facts["wide"]
    longest = max((kernel["largest_axis"] for kernel in facts["kernels"]), default=0)
    if longest >= 2**31:
        return [f"a Mosaic kernel indexes an axis of {longest} positions with 32 bits"]
    if wide["narrow"]:
        return [f"32-bit offset into a pool above 2**31 elements: {wide['narrow'][0]}"]
    if case.backend == "triton" and not wide["accesses"]:
        return ["found no access to the large pool in the Triton IR"]
    return []
