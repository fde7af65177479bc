"""Checks and measures every kernel on a machine with an NVIDIA GPU, in under 8 minutes.

    python scripts/gpu_check.py --out DIR

Needs a checkout, JAX with its CUDA plugin and numpy; nothing has to be installed or downloaded.
In order of value: facts of the device; numerics of every kernel and backend against `reference`;
bitwise equal repeats; decode attention against a device copy and other libraries; the whole decode
step. When the time budget runs out, what was measured is written all the same. `DIR` then holds
records.jsonl (a line a fact), results.json, summary.txt, worker.log and, with matplotlib,
speed.png. The exit code is 0 if nothing failed, 1 if something did, 2 without a GPU.

`--cpu_rehearsal` runs the same flow at toy sizes on a CPU, kernels in Pallas's interpreter.
"""

import importlib
import sys
import types
from pathlib import Path


def provide_jaxtyping() -> None:
    """Where jaxtyping is missing, let its annotations stand for plain arrays."""
    try:
        importlib.import_module("jaxtyping")
    except ModuleNotFoundError:
        import jax

        class Shaped:
            def __class_getitem__(cls, item: object) -> type:
                return jax.Array

        stand_in = types.ModuleType("jaxtyping")
        names = ("Bool", "Float", "Int", "Integer", "Num", "Shaped", "UInt", "UInt8", "Int8")
        stand_in.__dict__.update(dict.fromkeys(names, Shaped), Array=jax.Array)
        sys.modules["jaxtyping"] = stand_in


def start(module: str) -> None:
    """Run a module of this folder's `gpu`, from a checkout or installed."""
    here = Path(__file__).resolve()
    # Started as a file, Python puts this folder first, where module names are not the library's.
    sys.path[:] = [path for path in sys.path if path != str(here.parent)]
    sys.path.insert(0, str(here.parents[1]))
    provide_jaxtyping()
    importlib.import_module(f"{here.parent.name}.gpu.{module}").run()


if __name__ == "__main__":
    start("main")
