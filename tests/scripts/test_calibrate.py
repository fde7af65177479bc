"""The calibration at toy size."""

import json


def test_it_prints_predicted_beside_measured(run_program, tmp_path):
    path = tmp_path / "figures.json"
    done = run_program(
        "calibrate", "--num_requests=3", "--max_num_batched_tokens=32", f"--json={path}"
    )
    assert done.returncode == 0, done.stderr
    assert "steps kept aside: median error" in done.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["steps"] > 20
    assert figures["the whole run, simulated"] > 0
    assert figures["steps kept aside: median error, %"] < 100
