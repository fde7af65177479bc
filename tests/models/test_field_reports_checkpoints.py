"""Reported failures of other systems around checkpoints (tests/data/field_reports.json)."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from suites.hf_golden import Golden

from models.checkpoints import read_config, write_checkpoint
from models.conversion import convert
from models.loading import load_model
from paged_jax import Engine, EngineConfig, SamplingParams


def structure(params):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), params)


def test_b91_a_checkpoint_holds_weights_alone_before_and_after_generating(tmp_path):
    source = Golden.load("llama").write_folder(tmp_path / "hf")
    convert(source, tmp_path / "before", to="orbax")
    model = load_model(tmp_path / "before", progress=False)
    fresh = structure(model.params)
    assert set(fresh) == {"embedding", "final_norm", "layers"}  # no cache collection
    engine = Engine(model, config=EngineConfig(num_blocks=9, max_num_seqs=2, max_model_len=32))
    prompts = [[1, 2, 3], [4, 5]]
    first = engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    assert structure(model.params) == fresh
    # What is saved after generating loads again, here and in orbax alone, and says the same.
    folder = tmp_path / "after"
    folder.mkdir()
    stored = {"family": "llama", "config": {}, "eos_token_ids": []}
    config = read_config(tmp_path / "before")["config"]
    write_checkpoint(folder, model.params, config=stored | {"config": config}, source={})
    again = load_model(folder, progress=False)
    assert structure(again.params) == fresh
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    with ocp.StandardCheckpointer() as checkpointer:
        assert structure(checkpointer.restore(folder / "params")) == fresh
    other = Engine(again, config=EngineConfig(num_blocks=9, max_num_seqs=2, max_model_len=32))
    second = other.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    tokens = [[one.outputs[0].token_ids for one in outputs] for outputs in (first, second)]
    assert tokens[0] == tokens[1]
