import json


def test_figures_of_a_toy_run(run_program, tmp_path):
    path = tmp_path / "figures.json"
    result = run_program(
        "bench_prefix", "--num_requests=2", "--rounds=1", "--prefix_len=20", f"--json={path}"
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())
    assert figures["alone, cached / cold"] > 0
    assert figures["register the prefix, seconds"] > 0
    assert "20 shared" in result.stdout
