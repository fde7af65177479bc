"""The gguf package's reader with bounds checks; the one module that imports that package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import dequantize

__all__ = ["CheckedReader", "dequantize"]


class CheckedReader(gguf.GGUFReader):
    """The library's reader, with bounds checks: its own slices end silently at the file's end."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"expected at least {end} bytes, the file has {len(self.data)}")
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            name = bytes(name_data).decode("utf-8", "replace")
            block_size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw_type[0])]
            num_bytes = int(np.prod(dims, dtype=np.uint64)) // block_size * type_size
            end = int(start_offs) + int(offset[0]) + num_bytes
            if end > len(self.data):
                raise ValueError(
                    f"tensor {name!r}: expected {num_bytes} bytes up to offset {end}, "
                    f"the file ends at {len(self.data)} (truncated?)"
                )
        super()._build_tensors(start_offs, fields)
