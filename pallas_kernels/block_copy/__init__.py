"""Whole blocks at once: a step's copy-on-write copies, and the gathers for swapping."""

from pallas_kernels.block_copy.api import block_copy, block_gather, block_scatter
from pallas_kernels.block_copy.validate import check_copies

__all__ = ["block_copy", "block_gather", "block_scatter", "check_copies"]
