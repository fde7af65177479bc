"""Every GPU kernel lowers for CUDA on plain CPU JAX, through the public ops, for every GPU.

Interpreters let through what the compilers do not (arrays that are no powers of two, slices of
values): lowering is the cheapest proof that a kernel is one. `make compile-report` goes on from
here to machine code.
"""

import jax
import pytest

from paged_jax_scripts.aot.cases import MOVES, Case, all_cases
from paged_jax_scripts.aot.compiler import lower_for
from paged_jax_scripts.aot.gates import is_required
from paged_jax_scripts.aot.programs import program
from paged_jax_scripts.aot.targets import TARGETS
from paged_jax_scripts.aot.triton_ir import accesses, narrow_accesses, triton_calls
from paged_jax_scripts.aot.worker import is_refusal

OURS = [case for case in all_cases() if case.backend in ("mosaic", "triton")]
# Kinds, dtypes, head dims, block sizes and group sizes all occur; every GPU has some.
SAMPLE = {
    "a100": ["triton/decode-s16-g7-d128-bf16", "triton/kv_write-s16-d128-int8"],
    "h100": [
        "mosaic/decode-s16-g4-d128-bf16",
        "mosaic/step-s16-g4-d128-bf16",
        "triton/decode-s16-g4-d80-bf16",
        "triton/prefill-s64-g8-d256-bf16-t512",
    ],
    "h200": [
        "mosaic/prefill-s16-g4-d128-bf16-t512",
        "triton/block_copy-s16-d128-bf16",
        "triton/swap_out-s16-d128-bf16",
        "triton/swap_in-s16-d128-int8",
    ],
    "b200": [
        "mosaic/verify-s64-g4-d128-bf16-t4",
        "triton/decode-s16-g4-d128-e4m3",
        "triton/step-s64-g4-d128-bf16",
    ],
}
TARGETED = {"mosaic": "mosaic_gpu", "triton": "__gpu$xla.gpu.triton"}


def find(key: str) -> Case:
    return next(case for case in OURS if case.key == key)


def lower(gpu: str, case: Case) -> jax.stages.Lowered | None:
    """None where the backend says that it cannot, and need not."""
    try:
        return lower_for(TARGETS[gpu].device.kind, program(case))
    except NotImplementedError as error:
        if is_required(gpu, case) or not is_refusal(error):
            raise
        return None


def check(gpu: str, case: Case) -> None:
    lowered = lower(gpu, case)
    if lowered is not None:
        assert TARGETED[case.backend] in lowered.as_text()


@pytest.mark.parametrize(("gpu", "key"), [(gpu, key) for gpu in SAMPLE for key in SAMPLE[gpu]])
def test_lowers(gpu, key):
    assert is_required(gpu, find(key)) or key.startswith("mosaic/step")
    check(gpu, find(key))


@pytest.mark.long
@pytest.mark.parametrize("gpu", list(TARGETS))
@pytest.mark.parametrize("case", OURS, ids=lambda case: case.key)
def test_all_lower(gpu, case):
    check(gpu, case)


@pytest.mark.parametrize("kind", ["decode", "prefill", "kv_write", *MOVES])
def test_offsets_into_a_large_pool_have_64_bits(kind):
    (case,) = [
        case for case in OURS if case.kind == kind and case.is_big and case.backend == "triton"
    ]
    lowered = lower("h100", case)
    assert lowered is not None
    calls = triton_calls(lowered)
    assert sum(map(accesses, calls)) > 0
    assert [line for call in calls for line in narrow_accesses(call)] == []


def test_narrow_offsets_are_found():
    """The same reading of the IR, on a pool whose offsets fit 32 bits."""
    lowered = lower("h100", find("triton/decode-s16-g4-d128-bf16"))
    assert lowered is not None
    (call, *_) = triton_calls(lowered)
    size = max(call.num_elements)
    found = narrow_accesses(call, min_elements=size - 1)
    assert found
    assert accesses(call, min_elements=size - 1) == len(found)
