import json

import pytest


@pytest.mark.weights
@pytest.mark.long
def test_figures(run_program, tmp_path, smollm2):
    del smollm2  # fetched, or skipped
    path = tmp_path / "figures.json"
    result = run_program(
        "bench_throughput", "--dtypes=float32", "--runs=1", "--num_requests=3", f"--json={path}",
        is_toy=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())["float32"]
    assert figures["tokens_per_second"] > 0
    assert 0 < figures["scheduling_share"] < 1
    assert figures["compilations_later"] == 0
