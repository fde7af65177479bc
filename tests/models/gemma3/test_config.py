"""What config.json may look like, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from suites.hf_golden import Golden

from models.checkpoints.hf_config import HfConfig
from models.checkpoints.hf_folder import HfFolder
from models.common.rope import LinearScaling
from models.common.weights import tensor_names
from models.gemma3 import GEMMA3, GEMMA3_IMAGE_TEXT, Gemma3Config
from models.loading import load_model
from models.registry import family_of

MODERN = Golden.load("gemma3").config
# The settings of 4.5x: no rotary entries by kind of layer.
OLDER = {key: value for key, value in MODERN.items() if key != "rope_parameters"} | {
    "rope_theta": 1_000.0,
    "rope_local_base_freq": 50.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
# The first ones: a pattern in place of the kinds.
FIRST = {key: value for key, value in OLDER.items() if key != "layer_types"} | {
    "_sliding_window_pattern": None,
    "sliding_window_pattern": 6,
}


def read(tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    hf = HfConfig.read(tmp_path)
    return family_of(hf.model_type, where=hf.path).config_from_hf(hf)


@pytest.mark.parametrize("settings", [MODERN, OLDER, FIRST], ids=["modern", "older", "first"])
def test_all_forms_say_the_same(tmp_path, settings):
    config = read(tmp_path, settings)
    assert config == read(tmp_path, MODERN)
    assert (config.rope_theta, config.local_rope_theta) == (1_000.0, 50.0)
    assert config.rope_scaling == LinearScaling(factor=8.0)
    assert config.windows == (8, 8, 8, 8, 8, None, 8)
    assert config.window is None  # a layer sees everything: no block is freed


def test_older_folders_load(tmp_path):
    golden = Golden.load("gemma3")
    names = set(MODERN) | set(FIRST)
    changes = {name: FIRST.get(name) for name in names}
    old = load_model(golden.write_folder(tmp_path / "old", **changes))
    new = load_model(golden.write_folder(tmp_path / "new"))
    assert old.spec == new.spec
    np.testing.assert_array_equal(old.params["embedding"], new.params["embedding"])


def test_missing_entries_are_those_of_the_published_models(tmp_path):
    text = {  # all that google/gemma-3-4b-it's text_config says
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(tmp_path, {"model_type": "gemma3", "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262_208, 131_072)
    assert (config.query_pre_attn_scalar, config.tie_embeddings) == (256, True)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert config.rope_scaling == LinearScaling(factor=8.0)


def test_an_image_text_model_with_capped_logits_is_refused(tmp_path):
    settings = {"model_type": "gemma3", "text_config": MODERN}
    assert MODERN["final_logit_softcapping"] == 3.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=3\.0 must be None"):
        read(tmp_path, settings)


def test_the_image_part_is_left_alone(tmp_path):
    golden = Golden.load("gemma3_image_text")
    folder = HfFolder(golden.write_folder(tmp_path / "model"))
    names = tensor_names(GEMMA3_IMAGE_TEXT.weights(Gemma3Config.from_image_text_hf(folder.config)))
    others = set(folder.tensor_names) - names
    assert names < set(folder.tensor_names)
    assert others
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 must be None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True must be False"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' must be 'gelu_pytorch_tanh'"),
        ({"layer_types": ["chunked_attention"] * 7}, r"layer_types has \['chunked_attention'\]"),
        ({"layer_types": ["full_attention"]}, r"layer_windows=\(None,\) must be 7 sizes"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 must be > 0"),
        ({"final_logit_softcapping": -2.0}, "final_soft_cap=-2.0 must be > 0"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention=.* must have rope_type='default'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type must be one of 'default'",
        ),
    ],
)
def test_what_the_family_lacks_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, MODERN | change)


def test_json_round_trip():
    config = GEMMA3.config_from_hf(HfConfig(None, MODERN))  # pyright: ignore[reportArgumentType]
    stored = json.loads(json.dumps(config.to_json()))
    assert Gemma3Config.from_json(stored) == config
    assert dataclasses.replace(config, local_rope_theta=7.0) != config


def test_written_settings_are_read_back(tmp_path):
    config = read(tmp_path, MODERN)
    assert read(tmp_path, config.to_hf()) == config
