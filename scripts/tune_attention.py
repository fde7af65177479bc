"""Times configurations of the attention kernels on this machine's GPU and writes a table.

    python scripts/tune_attention.py --out pallas_kernels/paged_attention/tuned

For every shape the heuristic's configuration and the stated grid around it are timed in turns, as
`gpu_check` times decode attention. The table (`<device>.json`, see
`pallas_kernels/paged_attention/tuned.py`) keeps the fastest, or the heuristic's own where none is
faster by `--least_gain`. `--cpu_rehearsal` does it all once at toy size in Pallas's interpreter.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve()
    sys.path.insert(0, str(here.parents[1]))
    importlib.import_module(f"{here.parent.name}.gpu_check").start("tuning")
