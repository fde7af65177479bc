"""Compiles cases for one GPU in a process of its own: a failed Mosaic compilation may abort it.

`python -m paged_jax_scripts.aot.worker GPU FOLDER KEY...` prints a JSON line of what was found for
each case as it ends. XLA and Mosaic dump into FOLDER. For whoever
looks into one case: AOT_KEEP=1 keeps the dumps, AOT_TRACEBACK=1 prints where a failure came from.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

CASE_SECONDS = 300  # that one case may take


def set_environment(folder: Path) -> None:
    """Ask for the dumps; must run before jax is imported."""
    (folder / "mosaic").mkdir(parents=True, exist_ok=True)
    flags = os.environ.get("XLA_FLAGS", "")
    dumps = f"--xla_dump_to={folder / 'xla'} --xla_dump_emitter_re=ptx"
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_COMPILATION_CACHE="false",
        XLA_FLAGS=f"{flags} {dumps}".strip(),
        MOSAIC_GPU_DUMP_TO=str(folder / "mosaic"),
        TF_CPP_MIN_LOG_LEVEL="2",
    )


def compile_case(gpu: str, key: str, folder: Path) -> dict[str, Any]:
    """Compile one case and read its dumps.

    Args:
        gpu: name in `TARGETS`.
        key: a case's key.
        folder: where this process dumps; what is in it is removed.

    Returns:
        `status` "ok", "unsupported" (and `reason`) or "failed" (and `reason`), `seconds`, and for
        what compiled `memory` and `kernels`.
    """
    from paged_jax_scripts.aot.cases import all_cases

    case = next(case for case in all_cases() if case.key == key)
    try:
        facts = _measure(gpu, case, folder)
    except Exception as error:  # whatever a compiler raises is a finding, not an end
        if is_refusal(error):
            return {"status": "unsupported", "reason": str(error)}
        if os.environ.get("AOT_TRACEBACK"):
            traceback.print_exc()
        facts = {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    for part in ("xla", "mosaic"):
        if not os.environ.get("AOT_KEEP"):
            shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir(exist_ok=True)
    return facts


def is_refusal(error: Exception) -> bool:
    """Whether a backend of ours says that it cannot take a call; Pallas raises the same class."""
    return isinstance(error, NotImplementedError) and str(error).startswith("backend of ")


def _measure(gpu: str, case: Any, folder: Path) -> dict[str, Any]:
    from paged_jax_scripts.aot import compiler, figures, kernels, triton_ir
    from paged_jax_scripts.aot.programs import program
    from paged_jax_scripts.aot.targets import TARGETS

    target, what = TARGETS[gpu], program(case)
    start = time.process_time()
    lowered = compiler.lower_for_target(target, what)
    compiled = lowered.compile()
    seconds = time.process_time() - start
    found = kernels.kernel_facts(folder, compiled.as_text() or "", target.device)
    facts = {
        "status": "ok",
        "seconds": round(seconds, 1),
        "memory": compiler.memory_facts(compiled, what.pool_bytes),
        "kernels": [dataclasses.asdict(kernel) for kernel in found],
    }
    attention = figures.attention_figures(case, facts["kernels"])
    if attention is not None:
        facts["attention"] = dataclasses.asdict(attention)
    if case.is_big:
        calls = triton_ir.triton_calls(lowered)
        facts["wide"] = {
            "accesses": sum(map(triton_ir.accesses, calls)),
            "narrow": [line for call in calls for line in triton_ir.narrow_accesses(call)],
        }
    return facts


def compile_apart(gpu: str, key: str, folder: Path) -> dict[str, Any]:
    """`compile_case` in a forked process: it may abort, and nothing that it caches is kept.

    (A second compilation of one kernel in a process is served from a cache and dumps nothing.)
    """
    output, errors = folder / "facts.json", folder / "stderr.txt"
    output.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        with errors.open("w") as stderr:
            os.dup2(stderr.fileno(), sys.stderr.fileno())
            signal.alarm(CASE_SECONDS)
            output.write_text(json.dumps(compile_case(gpu, key, folder)))
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return json.loads(output.read_text())
    last = [x for x in errors.read_text(errors="replace").splitlines() if x.strip()][-2:]
    why = f"over {CASE_SECONDS} s" if code == -signal.SIGALRM else " ".join(last)[-400:]
    return {"status": "crashed", "reason": f"the compiling process ended with code {code}: {why}"}


def main(argv: list[str]) -> None:
    """Compile every case that is named."""
    gpu, folder, *keys = argv
    set_environment(Path(folder))
    # Pallas's Triton backend warns on import that it is deprecated; JAX's own kernel too.
    warnings.simplefilter("ignore", DeprecationWarning)
    # What every case imports; no backend starts before the fork.
    from jax.experimental.pallas import mosaic_gpu, triton  # noqa: F401

    from paged_jax_scripts.aot import compiler, figures, kernels, programs, triton_ir  # noqa: F401

    for key in keys:
        print(json.dumps({"key": key, **compile_apart(gpu, key, Path(folder))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
