import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.devices import (
    A100,
    B200,
    H100,
    H200,
    KNOWN_GPUS,
    current_device,
    kernel_device,
    known_gpu,
)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", A100),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H200", H200),
        ("NVIDIA GH200 480GB", H200),
        ("NVIDIA B200", B200),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_known_by_kind(kind, device):
    assert known_gpu(kind) == device


def test_every_kind_is_its_own():
    assert all(known_gpu(device.kind) == device for device in KNOWN_GPUS.values())


def test_default_device():
    assert current_device().platform == jax.devices()[0].platform == "cpu"
    assert not current_device().is_cuda
    assert kernel_device() == H100  # what the interpreters stand for
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_device().platform == "cpu"


def on(kind, platform="cuda", num_cores=None):
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform=platform)
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def test_device_of_the_abstract_mesh():
    with on(H100.kind):
        assert current_device() == H100
    with on("NVIDIA Z900", num_cores=200):
        assert current_device().is_cuda
        assert current_device().num_sms == 200
        assert current_device().compute_capability is None
    with on("TPU v5", platform="tpu"):
        assert not current_device().is_cuda
