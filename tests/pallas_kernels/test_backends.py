import logging
import sys

import jax.experimental.pallas
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import backends
from pallas_kernels.backends import Backend, pick_backend
from pallas_kernels.block_copy import block_copy
from pallas_kernels.devices import H100
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import api, paged_attention


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
        with pytest.raises(NotImplementedError, match=f"backend of .*: {name}: "):
            call(name)
    with pytest.raises(ValueError, match="backend is 'cuda'; must be None or one of mosaic"):
        call("cuda")


@pytest.mark.parametrize("call", CALLS)
def test_every_backend_answers(call):
    for name in ("reference", "xla", None):
        assert call(name).dtype == np.float32


def loaders(**reasons):
    """Backends that answer with their own name, or refuse."""
    return {
        name: lambda name=name, why=why: Backend(
            run=lambda **_: name, unsupported=lambda call, device: why
        )
        for name, why in reasons.items()
    }


def test_what_was_picked_is_logged_once(caplog):
    backends._log_once.cache_clear()
    ops = loaders(triton=None, xla="too odd", reference=None)
    with caplog.at_level(logging.INFO, logger="pallas_kernels.backends"):
        for _ in range(3):
            assert pick_backend("op", None, ops, None)() == "reference"
    messages = [record.getMessage() for record in caplog.records]
    (message,) = messages
    assert message == (
        "op: picked backend 'reference' (mosaic: the op has no such backend; triton: needs an "
        "NVIDIA GPU (here: cpu), or interpret=True; xla: too odd)"
    )


def test_a_gpu_takes_the_first_backend_that_takes_the_call():
    ops = loaders(mosaic="odd head_dim", triton=None, xla=None)
    device = AbstractDevice(device_kind=H100.kind, num_cores=132, platform="cuda")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert pick_backend("op", None, ops, None)() == "triton"
        with pytest.raises(NotImplementedError, match="backend of op: mosaic: odd head_dim"):
            pick_backend("op", "mosaic", ops, None)


def test_the_interpreter_runs_gpu_backends_anywhere():
    ops = loaders(triton=None, xla=None)
    assert pick_backend("op", "triton", ops, None, interpret=True)() == "triton"


def test_a_jax_without_a_backend_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(jax.experimental.pallas, "triton", raising=False)
    for name in [name for name in sys.modules if name.startswith(f"{api.PACKAGE}.triton")]:
        monkeypatch.delitem(sys.modules, name)
    backend = api.BACKENDS["triton"]()
    reason = backend.unsupported(None, H100)
    assert reason is not None
    assert "this JAX does not ship it" in reason
    with pytest.raises(NotImplementedError, match="cannot be imported"):
        backend.run()
