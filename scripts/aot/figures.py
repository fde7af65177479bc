"""What the report says of an attention kernel beside the compilers' own figures.

Two figures need to know how many KV tokens of one KV head a turn of the main loop consumes. It is
counted from the instructions, not believed from a configuration:

- by matrix products: a turn's multiply-accumulates of all warps are `2 * tokens * columns * D`
  (scores, then values), with the query columns that the kernel pads to;
- by copies, where the computing warps issue them: bytes of a turn's 16-byte copies over the bytes
  of K and V of a token.
"""

import dataclasses
from typing import Any

from paged_jax_scripts.aot.cases import Case

WARP_BYTES = 32 * 16  # one warp's 16-byte copy
PREFILL_ROWS = 64  # query rows a warpgroup, in kernels that keep queries on the M side


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """Of the kernel that holds the main loop.

    Attributes:
        kernel: its name.
        tokens: KV tokens a turn.
        tokens_by_mma: the same by the matrix products; None without tensor cores.
        tokens_by_copies: the same by copies; None where another warp issues them.
        loop_instructions: of the hot path of a turn.
        per_64_tokens: of these, what 64 tokens of a KV head cost.
        warp_instructions_per_token: times the warps that run the loop, over the tokens.
        in_flight: K and V bytes that copies of one multiprocessor's resident thread blocks may
            have under way.
        wait_depth: groups of asynchronous copies that may still be under way at the loop's wait;
            None where it waits for barriers.
    """

    kernel: str
    tokens: float | None
    tokens_by_mma: float | None
    tokens_by_copies: float | None
    loop_instructions: int
    per_64_tokens: float | None
    warp_instructions_per_token: float | None
    in_flight: int | None
    wait_depth: int | None


def main_kernel(kernels: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The kernel whose main loop does most of the work (others merge parts)."""
    with_loop = [kernel for kernel in kernels if kernel["loop"]]

    def weigh(kernel: dict[str, Any]) -> tuple[int, int]:
        counts = kernel["loop"]["counts"]
        tensor = sum(counts.get(name, 0) for name in ("hmma", "hgmma", "utcmma"))
        return tensor, kernel["num_instructions"]

    return max(with_loop, key=weigh, default=None)


def attention_figures(case: Case, kernels: list[dict[str, Any]]) -> AttentionFigures | None:
    """Figures of an attention case; None for other cases, or where no kernel has a loop.

    Args:
        case: what was compiled.
        kernels: `KernelFacts` of its kernels as dicts.
    """
    kernel = main_kernel(kernels)
    if not case.is_attention or kernel is None:
        return None
    loop, counts = kernel["loop"], kernel["loop"]["counts"]
    is_mosaic = kernel["compiler"] == "mosaic"
    # One warp of every four-warp group holds a quarter of a warpgroup instruction.
    warps = 4 if is_mosaic else kernel["threads"] // 32
    turn_bytes = None
    if not is_mosaic:
        copies = counts.get("async_16b") or counts.get("loads_16b", 0)
        turn_bytes = copies * WARP_BYTES * warps or None
    by_mma = _tokens_by_mma(case, kernel, warps)
    stored = case.token_bytes * _padded_dim(case, kernel) // case.head_dim
    by_copies = turn_bytes / stored if turn_bytes else None
    tokens = _tokens(case, by_mma, by_copies)
    return AttentionFigures(
        kernel=kernel["name"],
        tokens=tokens,
        tokens_by_mma=by_mma,
        tokens_by_copies=by_copies,
        loop_instructions=loop["hot"],
        per_64_tokens=round(64 * loop["hot"] / tokens, 1) if tokens else None,
        warp_instructions_per_token=round(warps * loop["hot"] / tokens, 2) if tokens else None,
        in_flight=_in_flight(kernel, turn_bytes),
        wait_depth=None if is_mosaic else loop["wait_depth"],
    )


def _tokens(case: Case, by_mma: float | None, by_copies: float | None) -> float | None:
    """The better count: a float32 product may be several, an 8-bit pool's copies not all 16 bytes.

    Prefill's rows are the kernel's choice, so its products count only where a warpgroup's shape
    tells them.
    """
    return by_copies or by_mma if case.kv_dtype == "float32" else by_mma or by_copies


def _tokens_by_mma(case: Case, kernel: dict[str, Any], warps: int) -> float | None:
    macs = kernel["loop"]["mma_macs"] * warps
    if not macs:
        return None
    if kernel["compiler"] == "mosaic":
        columns = kernel["loop"]["mma_columns"] or kernel["mma_columns"]
        if case.kind == "prefill":  # queries on the M side: n is tokens
            columns = PREFILL_ROWS
    else:
        columns = max(16, next_power_of_2(case.group * case.new_tokens))
        if case.kind == "prefill":
            return None  # its rows are the kernel's choice
    return macs / (2 * columns * _padded_dim(case, kernel)) if columns else None


def _padded_dim(case: Case, kernel: dict[str, Any]) -> int:
    return case.head_dim if kernel["compiler"] == "mosaic" else next_power_of_2(case.head_dim)


def _in_flight(kernel: dict[str, Any], turn_bytes: int | None) -> int | None:
    """Resident thread blocks x tile buffers x tile bytes.

    Mosaic: the shared-memory ring, as its module declares it. Others: asynchronous copies can
    fill as many tiles, counted in halves (K or V alone), as the shared memory holds; loads into
    registers are one tile.
    """
    ctas = kernel["ctas_per_sm"]
    if kernel["compiler"] == "mosaic":
        return ctas * kernel["ring_bytes"] if kernel["ring_bytes"] else None
    if not turn_bytes:
        return None
    if not kernel["loop"]["counts"].get("async_16b"):
        return ctas * turn_bytes
    half = turn_bytes // 2
    return ctas * half * max(1, kernel["dynamic_smem"] // half)


def next_power_of_2(x: int) -> int:
    """The least power of two that is at least x.

    >>> next_power_of_2(96), next_power_of_2(64)
    (128, 64)
    """
    return 1 << (x - 1).bit_length()
