"""Writing new keys and values into their slots of the pool, in place."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
