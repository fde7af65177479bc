import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.devices import A100, B200, H100
from pallas_kernels.paged_attention.arg_specs import HEAD_SHAPES
from pallas_kernels.paged_attention.mosaic_config import MosaicDecodeConfig
from pallas_kernels.paged_attention.triton_config import TritonConfig
from pallas_kernels.paged_attention.tuned import find_config, load_table, tuned_config
from scripts import gpu_check
from scripts.gpu import tuning
from scripts.gpu.speed import Shape

CALL = Shape(heads=HEAD_SHAPES["llama3-8b"], batch=8, context=2048, block_size=16).call()
SCRIPT = Path(gpu_check.__file__).with_name("tune_attention.py")


@pytest.mark.parametrize(
    ("backend", "device"),
    [("triton", A100), ("triton", H100), ("triton", B200), ("mosaic", H100), ("mosaic", B200)],
)
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b/8", "smollm2", "gemma3-4b"])
def test_the_grid_holds_the_default_first_and_no_two_alike(name, device, backend):
    call = Shape(heads=HEAD_SHAPES[name], batch=8, context=2048, block_size=16).call()
    grid = tuning.config_grid(call, backend, device)
    assert grid[0] == tuning.default_config(call, backend, device)
    assert len(set(grid)) == len(grid) > 5
    if device == B200:
        assert all(c.mma for c in grid if isinstance(c, MosaicDecodeConfig))


def test_a_backend_without_configurations():
    with pytest.raises(ValueError, match="backend is 'xla'; must be 'mosaic' or 'triton'"):
        tuning.config_grid(CALL, "xla", H100)


def test_the_fastest_goes_into_the_table_and_comes_back():
    grid = tuning.config_grid(CALL, "triton", H100)
    best = grid[7]

    def timer(call, backend, configs):
        assert (call, backend) == (CALL, "triton")
        return [1.0 if c == best else math.inf if i == 3 else 2.0 for i, c in enumerate(configs)]

    entry = tuning.tune(CALL, "triton", grid, timer)
    assert (entry["seconds"], entry["default_seconds"]) == (1.0, 2.0)
    assert (entry["num_tried"], entry["num_failed"]) == (len(grid), 1)
    found = find_config([json.loads(json.dumps(entry))], CALL, backend="triton")
    assert TritonConfig(**found) == best


def test_a_small_gain_leaves_the_heuristic():
    grid = tuning.config_grid(CALL, "mosaic", H100)
    entry = tuning.tune(CALL, "mosaic", grid, lambda *a: [1.0] + [0.99] * (len(grid) - 1))
    assert MosaicDecodeConfig(**entry["config"]) == grid[0]


def test_nothing_that_runs_is_no_entry():
    grid = tuning.config_grid(CALL, "triton", H100)[:2]
    assert tuning.tune(CALL, "triton", grid, lambda *a: [math.inf, math.inf]) is None
    other = tuning.tune(CALL, "triton", grid, lambda *a: [math.inf, 1.0])
    assert other["default_seconds"] is None


def test_every_shape_until_the_time_is_up(capsys):
    calls = [CALL, dataclasses.replace(CALL, num_rows=1)]

    def timer(call, backend, configs):
        return [1.0] * len(configs)

    options = {"least_gain": 0.03, "max_configs": 3}
    entries = tuning.tune_all(calls, ["triton"], H100, timer, budget_s=60, **options)
    assert [entry["num_rows"] for entry in entries] == [8, 1]
    assert entries[0]["num_tried"] == 3
    assert tuning.tune_all(calls, ["triton"], H100, timer, budget_s=-1, **options) == []
    assert "the rest is not tuned" in capsys.readouterr().out


def run_script(*flags):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_rehearsal_times_kernels_in_the_interpreter(tmp_path):
    result = run_script("--cpu_rehearsal", f"--out={tmp_path}")
    assert result.returncode == 0, result.stdout + result.stderr
    entries = load_table(tmp_path / "rehearsal.json")
    assert [entry["backend"] for entry in entries] == ["mosaic", "triton"]
    assert all(entry["num_failed"] == 0 for entry in entries)
    # A table of another name is no device's.
    assert tuned_config(CALL, H100, backend="triton", folder=tmp_path) is None


def test_no_gpu_is_an_error(tmp_path):
    result = run_script(f"--out={tmp_path}")
    assert result.returncode == 1
    assert "no NVIDIA GPU here: cpu" in result.stdout + result.stderr
