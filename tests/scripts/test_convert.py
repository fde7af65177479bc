import json

import numpy as np

from models.loading import load_model


def test_a_gguf_file_becomes_a_folder_that_loads(run_program, toy_model, tmp_path):
    target = tmp_path / "hf"
    flags = (f"--source={toy_model}", f"--target={target}", "--to=hf", "--max_shard_mb=1")
    result = run_program("convert", *flags, "--weights_dtype=bfloat16", is_toy=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    model = load_model(target, progress=False)
    assert np.isfinite(np.asarray(model.params["embedding"])).all()
    again = run_program("convert", *flags, is_toy=False)
    assert again.returncode == 2
    assert "exists already and is not overwritten" in again.stderr


def test_mistakes_end_with_one_line(run_program, tmp_path):
    flags = (f"--source={tmp_path / 'no.gguf'}", f"--target={tmp_path / 'x'}")
    result = run_program("convert", *flags, is_toy=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "there is no such file" in result.stderr
