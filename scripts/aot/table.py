"""The report as Markdown: a table for each GPU and kind of case, JAX's own kernel beside ours."""

import collections
from collections.abc import Iterator
from typing import Any

from paged_jax_scripts.aot.cases import KINDS, Case
from paged_jax_scripts.aot.targets import TARGETS

HEADER = """# Compile report

Every Pallas kernel and the whole decode step, compiled for GPUs that were not there. **Nothing ran
on a GPU**: these are the compilers' own figures, and counts of the machine code (SASS). They say
what a kernel asks of a multiprocessor, not how fast it is.

Made by `make compile-report` on {date} with JAX {jax}, ptxas {ptxas}, nvdisasm {nvdisasm};
{num_ok} programs compiled, {num_unsupported} are not supported by their backend (each with its
reason below), {num_violations} violations. The figures as data: compile_report.json.

## How each figure is got

- **Program**: an op called through its public function with `backend=`, lowered under an abstract
  mesh that names the GPU and compiled with JAX's ahead-of-time topologies. {rows} rows,
  {heads} KV heads, tables of {context} positions; prefill has {prefill} rows. A name such as
  `decode-s16-g4-d128-bf16` gives block size S, query heads a KV head G, head dim D and the pool's
  dtype; `tN` is T = N new tokens, `big` a pool above 2^31 elements, `80in128` a head dim of 80 in
  a pool that stores 128. `jax` and `jax8` are JAX's own deprecated `pallas.ops.gpu.paged_attention`
  with four warps and with its default of eight: tiles of 128 tokens, 2 stages, 8 splits; its pools
  K and V are two arrays.
- **regs, spill**: `ptxas -v` on the PTX that was dumped. **smem**: static + dynamic shared memory
  of the launch, bytes. **thr**: threads of a thread block (CTA).
- **CTA/SM**: resident thread blocks by threads (2048), registers (65536, by warps in units of
  256), shared memory (1 KB more than asked for) and the limit of 32; computed, not measured.
- **16 B / loads**: LDG and LDGSTS instructions of 16 bytes, of all; **16 B / stores**: STG.
  **bulk**: bulk copies in either direction (UTMALDG, UTMASTG, UBLKCP). **tensor**: HMMA (and IMMA,
  QMMA), HGMMA or UTC*MMA instructions. **SASS**: instructions of the kernel, trailing padding
  excluded.
- **loop**: instructions of one turn of the main loop, hot path / whole body. From the basic blocks
  of `nvdisasm -c` the natural loops are found by dominators; the main loop is the innermost one
  with most tensor-core instructions (in a warp-specialised kernel: the consumer's). The hot path
  is the way round that issues most tensor-core instructions, then most copies, and then has fewest
  instructions: it leaves out what a turn need not run (zeroing the values of a row's last tile,
  retries of a barrier wait), which the whole body counts.
- **tok**: KV tokens of one KV head that a turn consumes, counted from the code: its
  multiply-accumulates over those that a token needs at the columns the kernel pads to; for float32
  pools, whose products are several, bytes of the turn's 16-byte copies over the bytes of a token's
  K and V. Where both can be counted of a 16-bit pool, they must agree. **/64**: hot path per 64
  tokens. **warp/tok**: hot path times the warps that run it, per token: issue slots, comparable
  between kernels with different numbers of warps (more warps do the same tile in fewer
  instructions each); a producer's are not in it.
- **flight**: KB of K and V that the copies of a multiprocessor may have under way: resident thread
  blocks x tile buffers x tile bytes. Buffers are those in shared memory: a Mosaic kernel's
  declared ring; for Triton the dynamic shared memory over a turn's bytes, in halves of a tile (its
  `num_stages` promise more than it allocates). **wait**: groups of asynchronous copies that are
  left under way when the loop waits; 0 means that no copy overlaps the turn's products.
- **compile s**: seconds of processor time to lower and compile.
- **alias, temp, copies**: XLA's `memory_analysis()`: bytes of the donated pool that the output
  shares, temporaries, and `copy` instructions of at least an eighth of the pool in the optimised
  HLO. The step is a scan over {layers} layers of write and attention, after the block copies, the
  pool donated and in the carry.
- **Offsets** of a `big` pool: in the Triton IR, each access of the pool has a 64-bit offset.
  A Mosaic kernel indexes each axis with 32 bits and multiplies by strides with 64 (in its bulk
  copies the copy engine does): none of its arrays may have an axis of 2^31 positions.
"""

_KERNEL = (
    "| case | backend | kernel | regs | spill | smem | thr | CTA/SM | grid | 16 B / loads "
    "| 16 B / stores | bulk | tensor | SASS"
)
_ATTENTION = " | loop | tok | /64 | warp/tok | flight | wait"
_PROGRAM = "| case | backend | pool MB | alias | temp MB | copies | compile s | Pallas kernels"


def report_lines(results: dict[str, dict[str, dict[str, Any]]], cases: list[Case]) -> Iterator[str]:
    """The tables, GPU by GPU.

    Args:
        results: facts by GPU, by the cases' keys.
        cases: what was compiled.
    """
    everything = cases
    for gpu, found in results.items():
        cases = [case for case in everything if case.key in found]
        device = TARGETS[gpu].device
        yield f"\n## {device.kind}\n"
        for kind in KINDS:
            chosen = [case for case in cases if case.kind == kind]
            chosen.sort(key=lambda case: (_order(case, cases), case.backend))
            compiled = [case for case in chosen if found[case.key]["status"] == "ok"]
            if compiled:
                yield f"\n### {kind}\n"
                yield from _rows(kind, compiled, found)
        yield from _left_out(cases, found)


def _order(case: Case, cases: list[Case]) -> int:
    return next(i for i, other in enumerate(cases) if other.name == case.name)


def _rows(kind: str, cases: list[Case], found: dict[str, dict[str, Any]]) -> Iterator[str]:
    is_attention = cases[0].is_attention
    if kind != "step":
        head = _KERNEL + _ATTENTION * is_attention + " |"
        yield from (head, _rule(head))
        for case in cases:
            for kernel in _main_first(found[case.key]):
                yield _kernel_row(case, kernel, found[case.key])
    if not is_attention:
        if kind != "step":
            yield ""
        head = _PROGRAM + " |"
        yield from (head, _rule(head))
        for case in cases:
            yield _program_row(case, found[case.key])


def _rule(head: str) -> str:
    return "|" + "---|" * (head.count("|") - 1)


def _main_first(facts: dict[str, Any]) -> list[dict[str, Any]]:
    main = facts.get("attention", {}).get("kernel")
    return sorted(facts["kernels"], key=lambda kernel: kernel["name"] != main)


def _kernel_row(case: Case, kernel: dict[str, Any], facts: dict[str, Any]) -> str:
    counts = kernel["counts"]
    tensor = [
        f"{counts[name]} {name.upper()}" for name in ("hmma", "hgmma", "utcmma") if name in counts
    ]
    cells = [
        case.name,
        case.backend,
        kernel["name"].replace("paged_attention_block_h_16_pages_per_compute_block", "ppcb"),
        kernel["registers"],
        kernel["spill_bytes"],
        kernel["static_smem"] + kernel["dynamic_smem"],
        kernel["threads"],
        kernel["ctas_per_sm"],
        " ".join(map(str, kernel["grid"])),
        f"{counts.get('loads_16b', 0)} / {counts.get('global_loads', 0)}",
        f"{counts.get('stores_16b', 0)} / {counts.get('global_stores', 0)}",
        counts.get("bulk_copies", 0) + counts.get("bulk_stores", 0),
        " ".join(tensor) or 0,
        kernel["num_instructions"],
    ]
    attention = facts.get("attention")
    if attention is not None:
        loop = kernel["loop"]
        if kernel["name"] != attention["kernel"]:
            cells += [f"{loop['hot']} / {loop['body']}" if loop else "", "", "", "", "", ""]
        else:
            flight = attention["in_flight"]
            cells += [
                f"{loop['hot']} / {loop['body']}",
                _number(attention["tokens"]),
                _number(attention["per_64_tokens"]),
                _number(attention["warp_instructions_per_token"]),
                "" if flight is None else f"{flight / 1024:.0f}",
                "" if attention["wait_depth"] is None else attention["wait_depth"],
            ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:g}"


def _program_row(case: Case, facts: dict[str, Any]) -> str:
    memory = facts["memory"]
    pool = memory["pool_bytes"]
    cells = [
        case.name,
        case.backend,
        f"{pool / 2**20:.0f}",
        f"{memory['alias_bytes'] / pool:.1%}" if pool else "",
        f"{memory['temp_bytes'] / 2**20:.1f}",
        memory["pool_copies"],
        facts["seconds"],
        ", ".join(kernel["name"] for kernel in facts["kernels"]),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _left_out(cases: list[Case], found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Cases that did not compile, by reason."""
    reasons = collections.defaultdict(list)
    for case in cases:
        facts = found[case.key]
        if facts["status"] != "ok":
            reasons[facts["status"], facts["reason"]].append(case.key)
    if reasons:
        yield "\n### Not compiled\n"
    for (status, reason), keys in sorted(reasons.items()):
        yield f"- {', '.join(keys)}: {status}: {' '.join(reason.split())}"
