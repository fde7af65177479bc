"""Gemma 2's settings: null and missing entries differ."""

from pathlib import Path

import pytest
from suites.hf_golden import Golden

from models.checkpoints.hf_config import HfConfig
from models.gemma2 import Gemma2Config

STORED = Golden.load("gemma2").config
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def read(settings):
    return Gemma2Config.from_hf(HfConfig(Path("config.json"), settings))


def test_windows_alternate_where_the_layers_kinds_are_not_listed():
    unlisted = {key: value for key, value in STORED.items() if key != "layer_types"}
    assert read(unlisted) == read(STORED)
    assert read(unlisted).windows == (8, None, 8, None)


@pytest.mark.parametrize(
    ("settings", "caps"),
    [
        (STORED, (4.0, 3.0)),
        (STORED | dict.fromkeys(CAPS), (None, None)),
        ({key: value for key, value in STORED.items() if key not in CAPS}, (50.0, 30.0)),
    ],
    ids=["stated", "null", "missing"],
)
def test_caps(settings, caps):
    config = read(settings)
    assert (config.attn_soft_cap, config.final_soft_cap) == caps


@pytest.mark.parametrize("caps", [(4.0, 3.0), (None, None)])
def test_written_settings_are_read_back(caps):
    config = read(STORED | dict(zip(CAPS, caps, strict=True)))
    assert read(config.to_hf()) == config


def test_longrope_is_refused():
    size = STORED["head_dim"] // 2
    rope = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * size, "long_factor": [2.0] * size}
    with pytest.raises(ValueError, match="rope_scaling must not be 'longrope'"):
        read(STORED | {"rope_parameters": rope})
