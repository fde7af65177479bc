"""Loading and converting hold the weights once, and little besides."""

import math

import pytest
from suites import big_model
from suites.toy_gguf import TOY_CONFIG

from models.conversion import convert

LIMIT = 1.3
CONFIGS = {"layered": big_model.LAYERED, "mostly_table": big_model.MOSTLY_TABLE}


def num_bytes(config):
    return 4 * sum(map(math.prod, big_model.shapes_of(config).values()))


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("hf", "load"),
        ("orbax", "load"),
        ("gguf", "load"),  # which converts first
        ("hf", "orbax"),
        ("orbax", "hf"),
        ("gguf", "hf"),
    ],
)
def test_the_peak_is_little_more_than_the_weights(tmp_path, kind, source, use):
    config = CONFIGS[kind]
    paths = {}
    for size, one in (("small", TOY_CONFIG), ("big", config)):
        if source == "gguf":
            paths[size] = big_model.write_gguf(tmp_path / f"{size}.gguf", one)
            continue
        paths[size] = big_model.write_hf(tmp_path / size, one)
        if source == "orbax":
            convert(paths[size], tmp_path / f"{size}_orbax", to="orbax")
            paths[size] = tmp_path / f"{size}_orbax"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = big_model.peak_share(
        paths["small"], paths["big"], scratch, use=use, size=num_bytes(config)
    )
    print(f"{source} -> {use}, {kind}: {found:.2f} of {num_bytes(config) / 1e6:.0f} MB")
    # Converting holds nothing but the part that is written.
    assert 0.01 < found < (LIMIT if use == "load" else 0.5)
