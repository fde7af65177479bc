import json


def test_figures(run_program, tmp_path):
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text(
        '"hello hello hello the 12"\n\n{"id": 1, "text": "the 12"}\n{"prompt": "a"}\n'
    )
    # The toy model's programs all get --max_num_seqs; this one sets it by itself.
    result = run_program(
        "measure_beams", "--undefok=max_num_seqs", "--width=2", "--width=3", "--block_size=2",
        "--max_tokens=9", "--num_prompts=2", f"--prompts={prompts}", f"--json={figures}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "6.09, 37.56 %" in result.stdout
    found = json.loads(figures.read_text())
    assert set(found) == {"2", "3"}
    for kinds in found.values():
        for one in kinds.values():
            assert 0 < one["share"] == one["saved"] / one["entries"] < 1
        assert kinds["beams"]["copied"] > 0


def test_a_line_without_a_prompt_is_refused(run_program, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1}\n')
    result = run_program("measure_beams", "--undefok=max_num_seqs", f"--prompts={path}")
    assert result.returncode == 2
    assert "must be a string or hold 'prompt' or 'text'" in result.stderr
