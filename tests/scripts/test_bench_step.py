import dataclasses
import json

import jax
import numpy as np

from models import load_model
from models.common.weights import unstack_layers
from paged_jax_scripts import step_forms


def test_figures(run_program, toy_model, tmp_path):
    file = tmp_path / "figures.json"
    cache = f"--cache_dir={tmp_path}"
    options = [cache, "--batches=2", "--context=20", "--rounds=2", f"--json={file}"]
    result = run_program("bench_step", f"--model={toy_model}", *options, is_toy=False)
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert len(figures["steps"]) == 5
    assert all(len(step["seconds"]) == 2 and step["floor"] > 0 for step in figures["steps"])
    assert figures["machine"]["bytes_per_second"] > 0


def test_all_forms_say_the_same(toy_model, tmp_path):
    stacked = load_model(toy_model, cache_dir=tmp_path, progress=False)
    layers = unstack_layers(
        jax.tree.map(lambda leaf: leaf, stacked.params), num_layers=stacked.spec.num_layers
    )
    unrolled = dataclasses.replace(stacked, params=layers)
    forms = [
        step_forms.paged_form(stacked, 2, 20, block_size=4, dtype="float32"),
        step_forms.paged_form(unrolled, 2, 20, block_size=4, dtype="float32", num_rows=4),
        step_forms.dense_form(stacked, 2, 20, dtype="float32"),
        step_forms.unrolled_form(unrolled, 2, 20, dtype="float32"),
    ]
    tokens = []
    for form in forms:  # rows begin alike, over keys and values that are zero
        form.tokens = form.tokens.at[1].set(5)
        for _ in range(3):
            form.step()
        tokens.append(np.asarray(form.tokens[:2]))
    assert tokens[0][0] != tokens[0][1]
    for found in tokens[1:]:
        np.testing.assert_array_equal(found, tokens[0])
