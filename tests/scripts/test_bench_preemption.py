import json

import pytest


@pytest.mark.long
def test_a_row_for_each_block_size(run_program, tmp_path):
    path = tmp_path / "figures.json"
    result = run_program(
        "bench_preemption", "--block_sizes=1,8", "--num_tokens=20", "--runs=1", f"--json={path}"
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())
    assert [(row["block_size"], row["num_blocks"]) for row in figures] == [(1, 20), (8, 3)]
    for row in figures:
        assert row["recompute_over_swap"] == row["recompute_seconds"] / row["swap_seconds"] > 0
    assert "recompute / swap" in result.stdout
