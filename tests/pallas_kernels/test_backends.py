import logging

import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.backends import pick_backend
from pallas_kernels.block_copy import block_copy
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


def call_paged_attention(backend):
    kv, q, one = np.zeros((2, 2, 1, 4, 8), np.float32), np.zeros((1, 1, 1, 8), np.float32), [1]
    one = np.int32(one)
    return paged_attention(q, kv, np.int32([[1]]), one, one, backend=backend)


def call_kv_write(backend):
    kv, k = np.zeros((2, 2, 1, 4, 8), np.float32), np.zeros((1, 1, 1, 8), np.float32)
    return kv_write(kv, k, k, np.int32([[4]]), np.int32([1]), backend=backend)


def call_block_copy(backend):
    kv = np.zeros((1, 3, 2, 1, 4, 8), np.float32)
    return block_copy(kv, np.int32([1]), np.int32([2]), backend=backend)


CALLS = [call_paged_attention, call_kv_write, call_block_copy]


@pytest.mark.parametrize("call", CALLS)
def test_a_named_backend_never_falls_back(call):
    for name in ("mosaic", "triton"):
        with pytest.raises(NotImplementedError, match=f"backend '{name}' of .* is not available"):
            call(name)
    with pytest.raises(ValueError, match="backend is 'cuda'; must be None or one of mosaic"):
        call("cuda")


@pytest.mark.parametrize("call", CALLS)
def test_every_backend_answers(call):
    for name in ("reference", "xla", None):
        assert call(name).dtype == np.float32


def test_what_was_picked_is_logged_once(caplog):
    backends._best.cache_clear()
    with caplog.at_level(logging.INFO, logger="pallas_kernels.backends"):
        for _ in range(3):
            assert pick_backend("op", None, {"reference": max, "xla": min}) is min
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "op: picked backend 'xla' (mosaic: not available; triton: not available; reference: slower)"
    ]
