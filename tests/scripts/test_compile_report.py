"""The report's parsers and gates, on small listings; nothing here needs a CUDA plugin."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from paged_jax_scripts import compile_report
from paged_jax_scripts.aot import (
    cases,
    compiler,
    diff,
    figures,
    gates,
    kernels,
    runner,
    sass,
    worker,
)
from paged_jax_scripts.aot.targets import TARGETS, resident_ctas

LISTING = """
	.section	.text.toy,"ax",@progbits
toy:
.text.toy:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0020*/                   DEPBAR.LE SB0, 0x1 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R0], desc[UR8][R2.64], P1 ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R3 ;
        /*0050*/              @!P2 BRA `(.L_x_4) ;
.L_x_5:
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/                   STS [R1], RZ ;
        /*0090*/                   STS [R1+0x4], RZ ;
.L_x_2:
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00b0*/               @P3 BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   LDG.E.64 R6, desc[UR8][R2.64] ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4], R3 ;
        /*00f0*/              @!P2 BRA `(.L_x_4) ;
        /*0100*/                   BRA `(.L_x_5) ;
.L_x_6:
        /*0110*/                   BRA `(.L_x_6);
        /*0120*/                   NOP;
"""


def test_a_loop_without_its_side_blocks():
    ((name, text),) = sass.split_kernels(LISTING).items()
    blocks = sass.parse_blocks(text)
    assert name == "toy"
    assert len(sass.all_instructions(blocks)) == 17
    loop = sass.main_loop(blocks)
    assert loop is not None
    cost = sass.loop_cost(blocks, loop)
    # The hot path leaves out two stores and the retried wait (three instructions).
    assert (cost.hot, cost.body) == (8, 13)
    assert cost.counts == {"async_16b": 1, "global_loads": 1, "hmma": 2, "loads_16b": 1}
    assert cost.mma_macs == 2 * 16 * 8 * 16
    assert cost.wait_depth == 1


def test_an_inner_loop_is_the_main_one():
    listing = """
.L_x_1:
        /*0000*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
.L_x_2:
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
"""
    blocks = sass.parse_blocks(listing)
    assert len(sass.find_loops(blocks)) == 2
    loop = sass.main_loop(blocks)
    assert loop is not None
    assert sass.loop_cost(blocks, loop).body == 2


def test_code_without_loops_has_no_main_loop():
    assert sass.main_loop(sass.parse_blocks("        /*0000*/   EXIT ;\n")) is None


@pytest.mark.parametrize(
    ("opcode", "macs"),
    [
        ("HMMA.16816.F32.BF16", 2048),
        ("HMMA.1688.F32.TF32", 1024),
        ("IMMA.16832.S8.S8", 4096),
        ("HGMMA.64x8x16.F32.BF16", 2048),
        ("FFMA", 0),
    ],
)
def test_multiply_accumulates_of_a_warp(opcode, macs):
    instruction = sass.Instruction(address=0, predicate="", opcode=opcode, operands="")
    assert sass.mma_macs(instruction) == macs


def test_a_condition_among_the_operands_falls_through():
    make = dataclasses.replace
    branch = sass.Instruction(address=0, predicate="", opcode="BRA.U", operands="!UP0, `(.L_x_1)")
    assert branch.target == ".L_x_1"
    assert branch.falls_through
    assert not make(branch, operands="`(.L_x_1)").falls_through
    assert make(branch, predicate="@P0", operands="`(.L_x_1)").falls_through
    assert not make(branch, opcode="EXIT", operands="").falls_through
    assert make(branch, opcode="EXIT", predicate="@P0", operands="").falls_through


def test_what_ptxas_prints():
    log = """ptxas info    : Compiling entry function 'toy' for 'sm_90a'
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 78 registers, used 16 barriers, 1 bytes smem
"""
    assert kernels.parse_ptxas(log) == {
        "registers": 78,
        "spill_bytes": 20,
        "stack_bytes": 16,
        "static_smem": 1,
    }


def test_launches():
    thunks = (
        "002: kCustomKernel [prev=001 (1) | sink] decode grid: [8, 4, 2] threads: [128, 1, 1]  "
        "shared_memory: 73728 bytes\n003: kCopy [source] kCopy\n"
    )
    launch = kernels.Launch(grid=(8, 4, 2), threads=128, dynamic_smem=73728)
    assert kernels.parse_thunks(thunks) == {"decode": launch}
    module = (
        "%1 = gpu.launch async [%4] blocks(%a, %b, %c) in (%d = %c264, %e = %c1, %f = %c1) "
        "threads(%g, %h, %i) in (%j = %c256, %k = %c1, %l = %c1) "
        "dynamic_shared_memory_size %c105552_i32 {"
    )
    launch = kernels.Launch(grid=(264, 1, 1), threads=256, dynamic_smem=105552)
    assert kernels.parse_gpu_launch(module) == launch
    with pytest.raises(ValueError, match=r"no gpu\.launch"):
        kernels.parse_gpu_launch("module {}")


def test_resident_thread_blocks():
    device = TARGETS["h100"].device
    assert resident_ctas(device, threads=128, registers=165, smem=73_728) == 3
    assert resident_ctas(device, threads=256, registers=255, smem=0) == 1
    assert resident_ctas(device, threads=32, registers=16, smem=0) == 32
    assert resident_ctas(device, threads=1024, registers=32, smem=0) == 2
    assert resident_ctas(device, threads=128, registers=32, smem=232_448) == 1


def test_every_target_describes_its_device():
    for target in TARGETS.values():
        assert f"core_count: {target.device.num_sms}\n" in target.target_config
        assert target.device.kind in target.target_config
        assert ("ACCELERATED" in target.target_config) == (target.device.kind[7:11] != "A100")


def test_pool_sized_copies():
    hlo = """
  %copy.1 = bf16[1024,16]{1,0} copy(%x)
  %copy-start.2 = (s8[64]{0}, s8[64]{0}, u32[]) copy-start(%y)
  %add = f32[1024,16]{1,0} add(%copy.1, %z)
"""
    assert compiler.count_copies(hlo, at_least=1024 * 32) == 1
    assert compiler.count_copies(hlo, at_least=64) == 2
    assert compiler.count_copies(hlo, at_least=0) == 0


def make_case(**changes) -> cases.Case:
    return cases.Case(**{"kind": "decode", "backend": "triton", **changes})


def make_kernel(**changes) -> dict[str, Any]:
    """A kernel that breaks no rule: 4 warps, 128 tokens of 512 bytes a turn."""
    loop: dict[str, Any] = {"hot": 500, "body": 520, "mma_macs": 131072}
    loop.update(mma_columns=0, wait_depth=1)
    loop["counts"] = {"async_16b": 32, "global_loads": 32, "loads_16b": 32, "hmma": 64}
    facts = kernels.KernelFacts(
        name="decode",
        compiler="triton",
        registers=100,
        spill_bytes=0,
        stack_bytes=0,
        static_smem=0,
        grid=(8, 1, 1),
        threads=128,
        dynamic_smem=70_000,
        ctas_per_sm=3,
        num_instructions=900,
        counts={"hmma": 64, "loads_16b": 64, "global_loads": 64},
        loop=loop,
        ring_bytes=0,
        mma_columns=0,
        largest_axis=0,
    )
    return {**dataclasses.asdict(facts), **changes}


def make_facts(case, kernel, *, pool_bytes=0, **memory):
    attention = figures.attention_figures(case, [kernel])
    facts = {"status": "ok", "seconds": 1.0, "kernels": [kernel]}
    facts["memory"] = {
        "pool_bytes": pool_bytes,
        "alias_bytes": pool_bytes,
        "temp_bytes": 0,
        "pool_copies": 0,
        **memory,
    }
    if attention is not None:
        facts["attention"] = dataclasses.asdict(attention)
    return facts


def check(case, kernel, gpu="h100", **memory):
    return gates.check_case(gpu, case, make_facts(case, kernel, **memory))


def test_figures_of_a_kernel_that_copies_itself():
    found = figures.attention_figures(make_case(), [make_kernel()])
    assert found is not None
    assert (found.tokens_by_copies, found.tokens_by_mma) == (128, 128)
    assert (found.per_64_tokens, found.warp_instructions_per_token) == (250, 15.62)
    assert found.in_flight == 3 * 65536  # one tile of 64 KB in each block's shared memory
    assert found.wait_depth == 1


def test_figures_of_a_warp_specialised_kernel():
    loop: dict[str, Any] = {"hot": 160, "body": 300, "counts": {"hgmma": 16}, "mma_macs": 32768}
    loop.update(mma_columns=8, wait_depth=None)
    kernel = make_kernel(compiler="mosaic", loop=loop, ring_bytes=98304, ctas_per_sm=2, threads=256)
    found = figures.attention_figures(make_case(backend="mosaic", block_size=64), [kernel])
    assert found is not None
    assert (found.tokens_by_copies, found.tokens_by_mma) == (None, 64)
    assert (found.per_64_tokens, found.in_flight) == (160, 196608)


def test_no_figures_without_attention():
    assert figures.attention_figures(make_case(kind="kv_write"), [make_kernel()]) is None
    assert figures.attention_figures(make_case(), [make_kernel(loop=None)]) is None


def test_a_good_kernel_breaks_no_rule():
    assert check(make_case(), make_kernel()) == []


def planted(**changes):
    loop = make_kernel()["loop"]
    return make_kernel(loop={**loop, **changes})


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (make_kernel(spill_bytes=8), "spills 8 bytes"),
        (make_kernel(counts={"hmma": 64, "local": 3}), "3 local accesses"),
        (make_kernel(dynamic_smem=300_000), "300000 bytes of shared memory, over 232448"),
        (make_kernel(ctas_per_sm=0), "not even one thread block"),
        (make_kernel(counts={"loads_16b": 64}), "no tensor-core instruction"),
        (planted(counts={"hmma": 64}), "no 16-byte loads in the main loop"),
        (planted(mma_macs=65536), "a turn is 64 tokens by products but 128 by copies"),
        (make_kernel(loop=None), "no kernel with a loop"),
    ],
)
def test_a_planted_fault_is_named(kernel, message):
    assert any(message in line for line in check(make_case(), kernel))


def test_too_few_bytes_in_flight():
    small = make_case(block_size=64)
    kernel = make_kernel(ctas_per_sm=1, dynamic_smem=32_768)
    kernel["loop"] |= {"mma_macs": 65536, "counts": {"async_16b": 16, "loads_16b": 16, "hmma": 32}}
    assert check(small, kernel, gpu="h100") == []
    assert check(small, kernel, gpu="h200") == [
        "32768 bytes in flight a multiprocessor, under 49152"
    ]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"alias_bytes": 999}, "aliases 999 of the pool's 1000 bytes"),
        ({"temp_bytes": 21}, "temporaries are 2.1% of the pool, over 2%"),
        ({"pool_copies": 1}, "1 copies of pool-sized arrays"),
    ],
)
def test_a_copied_pool_is_named(memory, message):
    lines = check(make_case(kind="step"), make_kernel(), pool_bytes=1000, **memory)
    assert len(lines) == 1
    assert message in lines[0]


def test_mosaic_moves_keys_and_values_by_bulk_copies():
    case = make_case(backend="mosaic")
    kernel = make_kernel(compiler="mosaic", ring_bytes=98304, mma_columns=16)
    assert any("without bulk copies" in line for line in check(case, kernel))
    assert any("32 loads from global memory in the main loop" in x for x in check(case, kernel))


def test_the_bounds_of_the_mosaic_kernel():
    loop: dict[str, Any] = {"hot": 261, "body": 300, "counts": {"hgmma": 16}, "mma_macs": 65536}
    loop.update(mma_columns=16, wait_depth=None)
    kernel = make_kernel(compiler="mosaic", loop=loop, ring_bytes=98304, registers=105)
    kernel.update(ctas_per_sm=1, counts={"hgmma": 16, "bulk_copies": 4})
    assert check(make_case(backend="mosaic"), kernel) == [
        "main loop 261.0 instructions per 64 tokens, over 260",
        "105 registers, over 104",
        "1 resident thread blocks, under 2",
    ]
    assert check(make_case(backend="mosaic", group=8), kernel) == []


def test_beside_jax():
    case, other = make_case(), make_case(backend="jax")
    results = {case.key: make_facts(case, make_kernel())}
    loop = make_kernel()["loop"]
    results[other.key] = make_facts(other, make_kernel(loop={**loop, "hot": 490}, ctas_per_sm=4))
    name = "h100 triton/decode-s16-g4-d128-bf16"
    assert gates.check("h100", [case, other], results) == [
        f"{name}: main loop 15.62 warp instructions a token; JAX's own (jax) 15.31",
        f"{name}: main loop 250.0 instructions per 64 tokens; JAX's own (jax) 245.0",
        f"{name}: 196608 bytes in flight a multiprocessor, under JAX's own (jax) 262144",
    ]


def test_offsets_of_a_large_pool():
    case = make_case(is_big=True)
    facts = make_facts(case, make_kernel())
    facts["wide"] = {"accesses": 2, "narrow": ["%7 = tt.load %6"]}
    assert gates.check_case("h100", case, facts) == [
        "32-bit offset into a pool above 2**31 elements: %7 = tt.load %6"
    ]
    facts["wide"] = {"accesses": 0, "narrow": []}
    assert gates.check_case("h100", case, facts) == [
        "found no access to the large pool in the Triton IR"
    ]
    mosaic = make_case(kind="kv_write", backend="mosaic", is_big=True)
    facts = make_facts(mosaic, make_kernel(largest_axis=2**31))
    facts["wide"] = {"accesses": 0, "narrow": []}
    assert gates.check_case("h100", mosaic, facts) == [
        "a Mosaic kernel indexes an axis of 2147483648 positions with 32 bits"
    ]


def test_what_does_not_compile_is_named():
    case, xla = make_case(), make_case(kind="step", backend="xla")
    results = {
        case.key: {"status": "unsupported", "reason": "no such thing"},
        xla.key: {"status": "crashed", "reason": "code -6"},
    }
    lines = gates.check("h100", [case, xla], results)
    assert lines == [
        f"h100 {case.key}: must be supported, is not: no such thing",
        f"h100 {xla.key}: crashed: code -6",
    ]
    e4m3 = make_case(kv_dtype="float8_e4m3fn")
    results = {e4m3.key: {"status": "unsupported", "reason": "e4m3 needs 8.9"}}
    assert gates.check("a100", [e4m3], results) == []


def test_keys_are_unique_and_chosen_by_words():
    everything = cases.all_cases()
    assert len({case.key for case in everything}) == len(everything)
    assert {case.kind for case in everything} == set(cases.KINDS)
    assert {case.backend for case in compile_report.choose_cases(["mosaic/"])} == {"mosaic"}
    for group in runner.groups(everything):
        assert len({(case.backend, case.kind) for case in group}) == 1
        assert len(group) <= runner.GROUP_SIZE


def make_report(**changes):
    case, other = make_case(), make_case(kind="step", backend="xla")
    found = {
        case.key: make_facts(case, make_kernel(**changes)),
        other.key: make_facts(other, make_kernel(), pool_bytes=2**30),
        "mosaic/decode-s16-g4-d128-bf16": {"status": "unsupported", "reason": "needs a Hopper"},
    }
    versions = {"jax": "0.12", "ptxas": "V13", "nvdisasm": "V13", "date": "2026-01-31"}
    report = {"schema": 1, **versions, "violations": [], "results": {"h100": found}}
    return report, [case, other, make_case(backend="mosaic")]


def test_the_written_report():
    report, chosen = make_report()
    text = compile_report.markdown(report, chosen)
    assert "Nothing ran\non a GPU" in text
    assert "with JAX 0.12, ptxas V13" in text
    assert "2 programs compiled, 1 are not supported" in text
    row = next(line for line in text.splitlines() if line.startswith("| decode-s16"))
    assert "| 500 / 520 | 128 | 250 | 15.62 | 192 | 1 |" in row
    assert "| step-s16-g4-d128-bf16 | xla | 1024 | 100.0% | 0.0 | 0 |" in text
    assert "- mosaic/decode-s16-g4-d128-bf16: unsupported: needs a Hopper" in text


def test_the_written_figures_and_what_changed():
    (kept, _), (new, _) = make_report(), make_report(registers=120)
    new["jax"] = "0.13"
    kept = json.loads(compile_report.to_json(kept))
    new = json.loads(compile_report.to_json(new))
    new["results"]["h100"]["xla/new"] = {"status": "ok"}
    assert diff.diff_lines(kept, new) == [
        "jax: 0.12 -> 0.13",
        "h100 triton/decode-s16-g4-d128-bf16: kernels.0.registers 100 -> 120",
        "h100 xla/new: not in the kept report",
    ]


def test_an_update_keeps_what_is_not_compiled_now():
    (kept, _), (new, _) = make_report(), make_report(registers=120)
    kept["results"]["b200"] = dict(kept["results"]["h100"])
    kept["results"]["h100"]["gone/case"] = {"status": "ok"}
    del new["results"]["h100"]["xla/step-s16-g4-d128-bf16"]
    results = compile_report.merge(kept, new)
    assert list(results) == ["h100", "b200"]
    assert results["b200"] == kept["results"]["b200"]
    kernel = results["h100"]["triton/decode-s16-g4-d128-bf16"]["kernels"][0]
    assert kernel["registers"] == 120
    assert "xla/step-s16-g4-d128-bf16" in results["h100"]
    assert "gone/case" not in results["h100"]
    with pytest.raises(ValueError, match=r"--update: jax was 0\.12; must be 0\.13"):
        compile_report.merge(kept, {**new, "jax": "0.13"})


def run_report(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "paged_jax_scripts.compile_report", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("extra",), "unexpected arguments ['extra']"),
        (("--gpus=h100,v100",), "--gpus names ['v100']"),
        (("--kernels=nothing",), "--kernels=nothing names no case"),
    ],
)
def test_bad_flags(args, message):
    result = run_report(*args)
    assert result.returncode == 1
    assert message in result.stdout + result.stderr


def test_without_cudas_compiler_it_says_what_to_do():
    result = run_report("--kernels=xla/", PATH="/nowhere")
    assert result.returncode == 2
    assert "ptxas is in no nvidia wheel and not on PATH; run `make compile-report`" in result.stderr


def test_only_a_backends_own_refusal_is_unsupported():
    refused = NotImplementedError("backend of kv_write: mosaic: needs a Hopper")
    assert worker.is_refusal(refused)
    assert not worker.is_refusal(NotImplementedError("Unimplemented primitive: sort"))
    assert not worker.is_refusal(ValueError("backend of kv_write"))


def test_a_process_that_aborts_is_a_finding(tmp_path):
    """The worker forks for each case; here what it would compile aborts."""
    program = f"""
import json, os, pathlib
from paged_jax_scripts.aot import worker
worker.compile_case = lambda *args: os.abort()
print(json.dumps(worker.compile_apart("h100", "xla/step", pathlib.Path({str(tmp_path)!r}))))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(result.stdout)
    assert facts["status"] == "crashed"
    assert "ended with code -6" in facts["reason"]


def test_cases_of_a_worker_that_broke_are_reported():
    done = []
    report = runner.run_all(
        ["no-such-gpu"], [make_case(kind="step", backend="xla")], jobs=1, report=done.append
    )
    facts = report["no-such-gpu"]["xla/step-s16-g4-d128-bf16"]
    assert facts["status"] == "failed"
    assert "KeyError" in facts["reason"]
    assert len(done) == 1
