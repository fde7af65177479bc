"""GPT-2 and OPT up to their last position, where padding is beyond it; old folders of GPT-2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from suites.hf_golden import Golden

from models.loading import load_model
from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.uncached import UncachedAttention


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def model(request, tmp_path_factory):
    folder = Golden.load(request.param).write_folder(tmp_path_factory.mktemp(request.param))
    return load_model(folder, progress=False)


def continue_uncached(model, tokens, num_tokens):
    """Greedy, every token from the whole text anew."""

    @jax.jit
    def logits_of(ids, last):
        places = jnp.arange(ids.shape[1])[None]
        cache = UncachedAttention()
        return model.apply(model.params, ids, places, cache, logits_at=last)[0][0, 0]

    tokens = list(tokens)
    for _ in range(num_tokens):
        ids = np.zeros((1, model.spec.max_position), np.int32)
        ids[0, : len(tokens)] = tokens
        tokens.append(int(logits_of(jnp.asarray(ids), jnp.array([[len(tokens) - 1]])).argmax()))
    return tokens


def test_the_engine_serves_every_position_and_none_beyond(model):
    config = EngineConfig(num_blocks=40, block_size=4, prefill_row_len=20, max_num_seqs=2)
    engine = Engine(model, config=config)
    assert engine.max_model_len == model.spec.max_position == 96
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, 48, 83)]  # rows to 100
    params = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    expected = continue_uncached(model, prompt, 13)
    assert prompt + list(output.outputs[0].token_ids) == expected
    with pytest.raises(ValueError, match="96"):
        engine.generate([list(range(40)) * 3], params)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_masks_of_old_gpt2_folders_are_ignored(tmp_path, prefix):
    golden = Golden.load("gpt2")
    folder = golden.write_folder(tmp_path, num_shards=1)
    (folder / "model.safetensors.index.json").unlink()
    (file,) = folder.glob("*.safetensors")
    tensors = {
        prefix + name.removeprefix("transformer."): value for name, value in load_file(file).items()
    }
    expected = load_model(folder, progress=False).params["layers"]["qkv"]["weight"]
    masks = {
        f"{prefix}h.{layer}.attn.{name}": np.ones(1, np.float32)
        for layer in range(2)
        for name in ("bias", "masked_bias")
    }
    save_file(tensors | masks, file)
    found = load_model(folder, progress=False).params["layers"]["qkv"]["weight"]
    np.testing.assert_array_equal(found, expected)
    save_file(tensors | {f"{prefix}h.0.attn.other": np.ones(1, np.float32)}, file)
    with pytest.raises(ValueError, match=r"h\.0\.attn\.other"):
        load_model(folder, progress=False)
