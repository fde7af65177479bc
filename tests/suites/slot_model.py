"""What the slots of ``suites.host_simulation`` hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCAB_SIZE = 17
EMPTY = -1


def encode(tokens: Sequence[int]) -> np.ndarray:
    """What the slots of a sequence must hold, from its first position on."""
    return np.arange(len(tokens), dtype=np.int64) * VOCAB_SIZE + np.asarray(tokens, np.int64)
