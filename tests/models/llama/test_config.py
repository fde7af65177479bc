"""Presets, JSON and refusals."""

import dataclasses

import pytest

from models.llama import LlamaConfig, RopeScaling

PRESETS = [
    LlamaConfig.smollm2_135m,
    LlamaConfig.llama3_8b,
    LlamaConfig.llama3_1_8b,
    LlamaConfig.tiny,
]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_json(preset):
    config = preset()
    assert LlamaConfig.from_json(config.to_json()) == config
    assert config.spec.num_layers == config.num_layers
    assert hash(config) == hash(preset())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be an integer >= 1"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be an integer >= 1"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_layers": 0}, "num_layers=0 must be an integer >= 1"),
    ],
)
def test_impossible_geometry_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.tiny(**changes)


@pytest.mark.parametrize("values", [{}, {"rope_scaling": None}, {"rope_scaling": {"other": 1}}])
def test_json_that_is_no_config_is_refused(values):
    with pytest.raises(ValueError, match="must be a LlamaConfig's fields"):
        LlamaConfig.from_json(values)


def test_impossible_scaling_is_refused():
    with pytest.raises(ValueError, match=r"factor=0\.5 must be >= 1"):
        RopeScaling(factor=0.5)
    with pytest.raises(ValueError, match=r"low_freq_factor=4\.0 must lie between 0 and"):
        RopeScaling(factor=8.0, low_freq_factor=4.0)


def test_presets_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlamaConfig.tiny().num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]
