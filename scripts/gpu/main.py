"""`gpu_check`'s flags, its two kinds of process (supervisor and worker), and its exit code."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from .records import Budget, RecordFile
from .summary import draw, summarise
from .supervisor import Limits, Start, supervise

CONTINUED = "records.jsonl"


def main(argv: list[str]) -> None:
    """Supervise, or work."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if flags.FLAGS.out is None:
        raise app.UsageError("--out must name a folder")
    out = Path(flags.FLAGS.out)
    if flags.FLAGS.worker:
        sys.exit(_work(out))
    sys.exit(_supervise(out))


def _define_flags() -> None:
    # Not at import: other programs of this folder have flags of the same names.
    flags.DEFINE_string("out", None, "folder for what was found")
    flags.DEFINE_float("budget_s", 440.0, "seconds in all; 8 minutes is the aim")
    flags.DEFINE_list("backends", ["mosaic", "triton", "xla"], "backends to check")
    flags.DEFINE_list("sections", ["numerics", "racing", "speed", "step"], "what to do")
    flags.DEFINE_integer("threads", 0, "compilations at a time; 0: the cores, at most 12")
    flags.DEFINE_bool("cpu_rehearsal", False, "toy sizes on a CPU: does it run?")
    flags.DEFINE_bool("worker", False, "the process that touches the GPU (internal)")
    flags.DEFINE_float("started", 0.0, "when the run began (internal)")
    flags.DEFINE_list("excluded", [], "contenders that were fatal (internal)")


def run() -> None:
    """Entry point."""
    _define_flags()
    app.run(main)


def _supervise(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    records = RecordFile(out / CONTINUED)
    records.path.unlink(missing_ok=True)
    (out / "worker.log").unlink(missing_ok=True)
    budget = Budget(started=time.time(), seconds=flags.FLAGS.budget_s)
    threads = flags.FLAGS.threads or min(12, os.cpu_count() or 1)
    script = Path(__file__).resolve().parents[1] / "gpu_check.py"

    def command(start: Start) -> list[str]:
        return [
            sys.executable,
            str(script),
            "--worker",
            f"--out={out}",
            f"--started={budget.started}",
            f"--budget_s={budget.seconds}",
            f"--backends={','.join(flags.FLAGS.backends)}",
            f"--sections={','.join(flags.FLAGS.sections)}",
            f"--threads={start.threads}",
            f"--excluded={','.join(start.excluded)}",
            f"--cpu_rehearsal={flags.FLAGS.cpu_rehearsal}",
        ]

    supervise(command, records, budget, out / "worker.log", threads=threads, limits=Limits())
    fatal = [r["reason"] for r in records.read() if r["kind"] == "fatal"]
    text, results = summarise(records, seconds=budget.used)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "summary.txt").write_text(text)
    print(text)
    print(draw(results, out / "speed.png"))
    if fatal:
        print(f"error: {fatal[0]}", file=sys.stderr)
        return 2
    return 1 if any(r["status"] == "fail" for r in results["results"]) else 0


def _work(out: Path) -> int:
    """Exit code 0 when every item has a result."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants some too
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if flags.FLAGS.cpu_rehearsal:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Compiling is most of a rehearsal's time.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import jax

    from . import worker

    records = RecordFile(out / CONTINUED)
    device = jax.devices()[0]
    if device.platform != "gpu" and not flags.FLAGS.cpu_rehearsal:
        reason = f"no NVIDIA GPU: JAX's default device is {device.device_kind}"
        records.append("fatal", reason=f"{reason} (--cpu_rehearsal runs toy sizes on a CPU)")
        return 2
    records.append("device", **_device_facts(jax, device))
    context = worker.Context(
        rehearsal=flags.FLAGS.cpu_rehearsal,
        backends=tuple(flags.FLAGS.backends),
        excluded=frozenset(flags.FLAGS.excluded),
        budget=Budget(started=flags.FLAGS.started, seconds=flags.FLAGS.budget_s),
        records=records,
    )
    try:
        worker.work(all_items(context, flags.FLAGS.sections), context, threads=flags.FLAGS.threads)
    except worker.LostDeviceError as error:
        print(f"{error}: the device answers no more; a new process", flush=True)
        sys.stdout.flush()
        os._exit(worker.EXIT_LOST_DEVICE)  # a lost device also hangs at exit
    return 0


def all_items(context: Any, sections: Sequence[str]) -> Iterator[Any]:
    """Every item of the sections, in order of value."""
    from .big_pool import big_pool_items
    from .decode_step import step_items
    from .numerics import numerics_items, racing_items
    from .speed import speed_items

    wanted = set(sections)
    if "numerics" in wanted:
        numerics = numerics_items(context)
        first = 2 * len(context.backends)
        yield from numerics[:first]
        yield from big_pool_items(context)
        yield from numerics[first:]
    if "racing" in wanted:
        yield from racing_items(context)
    if "speed" in wanted:
        yield from speed_items(context)
    if "step" in wanted:
        yield from step_items(context)


def _device_facts(jax: Any, device: Any) -> dict[str, Any]:
    import importlib.metadata
    import platform
    import subprocess

    from pallas_kernels.devices import current_device

    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "flashinfer"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
    try:
        smi = subprocess.run(
            ["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        smi = f"{type(error).__name__}: {error}"
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "num_sms": getattr(device, "core_count", None),
        "memory": device.memory_stats() or {},
        "known": dataclasses.asdict(current_device()),
        "versions": versions,
        "nvidia_smi": smi,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
