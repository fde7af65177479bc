"""All copy-on-write copies of a step at once."""

from pallas_kernels.block_copy.api import block_copy, check_copies

__all__ = ["block_copy", "check_copies"]
