"""Configurations that were measured on a device, as data; none is shipped that was not.

`tuned/<device>.json` (`h100.json`, ...: the names of `devices.KNOWN_GPUS`) is written by
`scripts/tune_attention.py` and holds::

    {"schema": 1,
     "device_kind": "NVIDIA H100 80GB HBM3",      as JAX names the device that was measured
     "jax": "0.11.2", "date": "2026-01-31",
     "entries": [
       {"backend": "triton",                      whose configuration it is
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16,
        "q_dtype": "bfloat16", "kv_dtype": "bfloat16", "num_new": 1,
        "num_rows": 32, "num_tokens": 2048,       rows (B) and positions a row (M * S)
        "config": {"...": 64},                    fields of the backend's configuration
        "seconds": 1.0e-4,                        median, of the best configuration
        "default_seconds": 1.2e-4}]}              median, of what the heuristic picks
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.devices import KNOWN_GPUS, Device, known_gpu
from pallas_kernels.paged_attention.call import AttentionCall

SCHEMA = 1
TUNED_FOLDER = Path(__file__).parent / "tuned"
EXACT_FIELDS = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "q_dtype",
    "kv_dtype",
    "num_new",
)
MAX_RATIO = 2.0  # how far rows and positions may be from those that were measured


def tuned_config(
    call: AttentionCall, device: Device, *, backend: str, folder: Path = TUNED_FOLDER
) -> dict[str, Any] | None:
    """The measured configuration for a call, or None: then the heuristic decides.

    Args:
        call: shapes and dtypes.
        device: where it will run.
        backend: whose configuration, "mosaic" or "triton".
        folder: where the tables are.

    Raises:
        ValueError: a table of another schema.
    """
    name = device_name(device)
    if name is None:
        return None
    return find_config(load_table(folder / f"{name}.json"), call, backend=backend)


def find_config(
    entries: Sequence[Mapping[str, Any]], call: AttentionCall, *, backend: str
) -> dict[str, Any] | None:
    """The nearest entry's configuration.

    Heads, head dim, block size, dtypes and T must be equal; of those, the entry whose rows and
    positions are nearest (the sum of their ratios' logarithms) is taken, if neither is more than
    `MAX_RATIO` times away.

    Args:
        entries: of a table.
        call: shapes and dtypes.
        backend: whose configuration.
    """
    best, least = None, math.inf
    for entry in entries:
        if entry["backend"] != backend:
            continue
        if any(entry[field] != getattr(call, field) for field in EXACT_FIELDS):
            continue
        rows = abs(math.log2(entry["num_rows"] / call.num_rows))
        tokens = abs(math.log2(entry["num_tokens"] / num_tokens(call)))
        if max(rows, tokens) <= math.log2(MAX_RATIO) and rows + tokens < least:
            best, least = dict(entry["config"]), rows + tokens
    return best


def load_table(path: Path) -> tuple[dict[str, Any], ...]:
    """The entries of a table; none where there is no such file.

    Raises:
        ValueError: a table of another schema.
    """
    return _load(path) if path.is_file() else ()


@functools.cache
def _load(path: Path) -> tuple[dict[str, Any], ...]:
    table = json.loads(path.read_text())
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}; must be {SCHEMA}")
    return tuple(table["entries"])


def device_name(device: Device) -> str | None:
    """The short name of a listed GPU ("h100"), or None.

    >>> from pallas_kernels.devices import H100
    >>> device_name(H100)
    'h100'
    """
    known = known_gpu(device.kind)
    return next((name for name, gpu in KNOWN_GPUS.items() if gpu == known), None)


def num_tokens(call: AttentionCall) -> int:
    """Positions that a row's table has room for, at least one."""
    return max(1, call.table_width * call.block_size)
