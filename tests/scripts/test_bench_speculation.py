import json

import pytest


@pytest.mark.long
def test_figures(run_program, tmp_path):
    path = tmp_path / "figures.json"
    result = run_program(
        "bench_speculation", "--drafts=3", "--batches=2", "--runs=1", "--max_tokens=8",
        f"--json={path}", is_toy=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())
    assert set(figures) == {"copy, batch 2", "prose, batch 2"}
    for engines in figures.values():
        assert set(engines) == {"plain", "waits only", "k = 3"}
        assert engines["plain"]["speedup"] == 1
        for one in engines.values():
            assert one["tokens_per_second"] > 0
            assert 0 <= one["acceptance_rate"] <= 1
        assert engines["waits only"]["acceptance_rate"] == 0
        assert engines["k = 3"]["steps"] <= engines["plain"]["steps"]
