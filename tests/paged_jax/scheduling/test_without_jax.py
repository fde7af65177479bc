"""The host side is usable where jax is not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["jax"] = None  # any import of it fails
from paged_jax.blocks.block_manager import BlockManager
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
assert BlockManager(num_blocks=4, block_size=4).allocate(0, num_tokens=9)
"""


def test_host_side_never_imports_jax():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
