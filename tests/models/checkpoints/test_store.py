"""Checkpoint folders: round trip, and errors that name file and tensor."""

import json

import numpy as np
import pytest

from models.checkpoints import read_config, read_params, write_checkpoint

PARAMS = {
    "embedding": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers": {"out": {"weight": np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4)}},
}
SHAPES = {"embedding": (3, 4), "layers": {"out": {"weight": (2, 3, 4)}}}
TENSOR = "layers.out.weight"


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "checkpoint"
    target.mkdir()
    write_checkpoint(target, PARAMS, config={"size": 3}, source={"sha256": "0" * 64})
    return target


def data_file(folder):
    (path,) = [path for path in (folder / "params" / TENSOR).iterdir() if path.name[0].isdigit()]
    return path


def test_round_trip(folder):
    params = read_params(folder, SHAPES)
    np.testing.assert_array_equal(params["embedding"], PARAMS["embedding"])
    np.testing.assert_array_equal(
        params["layers"]["out"]["weight"], PARAMS["layers"]["out"]["weight"]
    )
    assert read_config(folder) == {"size": 3}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == {"sha256": "0" * 64}


def test_a_flipped_bit_is_found(folder):
    content = bytearray(data_file(folder).read_bytes())
    content[17] ^= 1
    data_file(folder).write_bytes(content)
    with pytest.raises(ValueError, match=rf"checkpoint/params/{TENSOR}: .*expected .*CRC-32"):
        read_params(folder, SHAPES)


def test_a_removed_data_file_is_named(folder):
    data_file(folder).unlink()
    message = rf"params/{TENSOR}/0.0.0: tensor '{TENSOR}': expected 96 bytes, found no such file"
    with pytest.raises(ValueError, match=message):
        read_params(folder, SHAPES)


def test_a_truncated_data_file_is_named(folder):
    data_file(folder).write_bytes(data_file(folder).read_bytes()[:40])
    message = rf"params/{TENSOR}/0.0.0: tensor '{TENSOR}': expected 96 bytes, found 40; delete"
    with pytest.raises(ValueError, match=message):
        read_params(folder, SHAPES)


def test_damaged_orbax_metadata_are_named(folder):
    path = folder / "params" / "_METADATA"
    path.write_bytes(b"#" * path.stat().st_size)
    message = rf"checkpoint/params: tensor 'embedding', '{TENSOR}': expected a readable orbax"
    with pytest.raises(ValueError, match=message):
        read_params(folder, SHAPES)


def test_another_shape_is_named(folder):
    shapes = SHAPES | {"embedding": (4, 4)}
    with pytest.raises(ValueError, match=r"'embedding': expected \(4, 4\), found \(3, 4\)"):
        read_params(folder, shapes)


def test_a_missing_tensor_is_named(folder):
    shapes = SHAPES | {"head": (3, 4)}
    with pytest.raises(ValueError, match=r"'head': expected \(3, 4\), found no such tensor"):
        read_params(folder, shapes)


def test_a_left_over_tensor_is_named(folder):
    with pytest.raises(
        ValueError, match=rf"'{TENSOR}': expected no such tensor, found \(2, 3, 4\)"
    ):
        read_params(folder, {"embedding": (3, 4)})


def test_another_format_version_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format_version": 99}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json: format_version=99 must be 1"):
        read_params(folder, SHAPES)


@pytest.mark.parametrize("content", [None, "", '{"size"', "[1]"])
def test_a_damaged_config_is_named(folder, content):
    path = folder / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=r"checkpoint/config\.json: expected a JSON object"):
        read_config(folder)


def test_a_damaged_manifest_is_named(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(ValueError, match=r"manifest\.json: expected a JSON object"):
        read_params(folder, SHAPES)
    path.write_text('{"format_version": 1}')
    with pytest.raises(ValueError, match=r"manifest\.json: expected the tensors' shapes"):
        read_params(folder, SHAPES)
