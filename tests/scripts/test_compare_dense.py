import json

SMALL = ("--num_blocks=65",)


def test_paged_equals_dense(run_program, tmp_path):
    path = tmp_path / "figures.json"
    result = run_program(
        "compare_dense", "--prompt=hello", "--prompt=the 12 hell", "--max_tokens=8",
        f"--json={path}", *SMALL,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(path.read_text())
    assert (figures["num_requests"], figures["num_equal"], figures["num_tokens"]) == (2, 2, 16)
    assert figures["max_logit_difference"] < 1e-4
    assert figures["dense_max_bytes"] > figures["dense_bytes"]
    assert "Equal tokens: 2 of 2" in result.stdout


def test_bad_flags(run_program):
    result = run_program("compare_dense", "--prompt=hello", "--max_tokens=0")
    assert result.returncode != 0
    assert "max_tokens" in result.stdout + result.stderr
