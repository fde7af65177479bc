"""Every program that `gpu_check` would run on a GPU lowers for one, at its real size, without."""

import time

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.devices import A100, B200, H100
from scripts.gpu import records, worker
from scripts.gpu.main import all_items

# JAX says so at each lowering; the backend is used for as long as JAX ships it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def lower_items(tmp_path, device, sections, *, step, start=0):
    """How many items lower, and those that a backend refuses; anything else raises."""
    context = worker.Context(
        rehearsal=False,
        backends=("mosaic", "triton", "xla"),
        excluded=frozenset(),
        budget=records.Budget(started=time.time(), seconds=3600),
        records=records.RecordFile(tmp_path / "records.jsonl"),
    )
    abstract = AbstractDevice(device_kind=device.kind, num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    lowered, refused = [], []
    for item in list(all_items(context, sections))[start::step]:
        try:
            with use_abstract_mesh(mesh):
                prepared = item.prepare()
        except NotImplementedError:
            refused.append(item.item_id)
            continue
        lowered.append(item.item_id)
        if item.section == "speed":
            assert {"mosaic", "triton", "xla", "dense xla"} <= set(prepared.programs)
    return lowered, refused


@pytest.mark.parametrize(
    ("sections", "step", "start", "least"),
    [(["numerics", "racing"], 19, 0, 5), (["speed"], 40, 0, 4), (["step"], 4, 1, 2)],
)
def test_a_sample_lowers_for_hopper(tmp_path, sections, step, start, least):
    lowered, _ = lower_items(tmp_path, H100, sections, step=step, start=start)
    assert len(lowered) >= least


@pytest.mark.long
@pytest.mark.parametrize("device", [A100, H100, B200], ids=lambda device: device.kind)
@pytest.mark.parametrize("section", ["numerics", "racing", "step"])
def test_all_lower(tmp_path, device, section):
    lowered, _ = lower_items(tmp_path, device, [section], step=1)
    assert len(lowered) >= 5


@pytest.mark.long
def test_every_shape_of_the_speed_section_lowers(tmp_path):
    lowered, refused = lower_items(tmp_path, H100, ["speed"], step=1)
    assert len(lowered) == 4 * 2 * 16
    assert not refused
