"""What the slots of ``suites.host_simulation`` hold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

VOCAB_SIZE = 17
EMPTY = -1


def encode(tokens: Sequence[int]) -> np.ndarray:
    """What the slots of a sequence must hold, from its first position on."""
    return np.arange(len(tokens), dtype=np.int64) * VOCAB_SIZE + np.asarray(tokens, np.int64)


def next_token(context: np.ndarray, *, sample_index: int = 0) -> int:
    """The model: a hash of all that the slots of the context hold; each sample has its own."""
    return zlib.crc32(context.tobytes(), sample_index) % VOCAB_SIZE
