import json

import pytest


@pytest.mark.long
def test_engines_agree_at_equal_memory(run_program, tmp_path):
    path = tmp_path / "figures.json"
    result = run_program(
        "bench_dense_engine", "--runs=1", "--num_requests=3", "--max_num_seqs=2",
        "--max_model_len=128", f"--json={path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    dense, same_rows, same_bytes = json.loads(path.read_text())
    assert dense["speed"] == 1.0
    assert dense["peak_rows"] == 2
    assert same_bytes["cache_mib"] == same_rows["cache_mib"] == dense["cache_mib"]
    assert [row["equal_requests"] for row in (dense, same_rows, same_bytes)] == [3, 3, 3]
    assert "dense rows of 128 positions" in result.stdout


def test_a_pool_that_holds_no_request_is_refused(run_program):
    result = run_program("bench_dense_engine", "--num_requests=1", "--max_num_seqs=1")
    assert result.returncode != 0
    assert "which must hold the longest request's 128" in result.stdout + result.stderr
