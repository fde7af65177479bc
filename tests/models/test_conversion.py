"""From any format to a folder of another: round trips, and what goes wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from suites.hf_golden import CASES, Golden

from models.conversion import convert
from models.loading import load_model
from models.registry import FAMILIES
from models.stored import hf_config_of, open_stored

SERVED = [name for name in CASES if FAMILIES[CASES[name]["family"]].config_to_hf is not None]


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture
def hf_folder(tmp_path):
    return Golden.load("qwen2").write_folder(tmp_path / "hf")


class TestRoundTrips:
    @pytest.mark.parametrize("name", SERVED)
    def test_tensors_and_settings_come_back(self, tmp_path, name):
        golden = Golden.load(name)
        source = golden.write_folder(tmp_path / "hf")
        convert(source, tmp_path / "ours", to="orbax")
        convert(tmp_path / "ours", tmp_path / "again", to="hf", max_shard_bytes=9_000)
        assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
        assert_same_bits(tensors_of(tmp_path / "again"), golden.tensors())
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        changed = {"dtype", "torch_dtype", "eos_token_id"}
        assert (
            config.items() >= {k: v for k, v in golden.config.items() if k not in changed}.items()
        )
        assert open_stored(tmp_path / "again").config == open_stored(source).config

    @pytest.mark.parametrize("to", ["orbax", "hf"])
    def test_bfloat16_stays_and_takes_half(self, tmp_path, hf_folder, to):
        convert(hf_folder, tmp_path / "narrow", to="hf", dtype="bfloat16")
        convert(tmp_path / "narrow", tmp_path / "target", to=to)
        convert(tmp_path / "target", tmp_path / "again", to="hf")
        expected = {
            name: value.astype(ml_dtypes.bfloat16)
            for name, value in Golden.load("qwen2").tensors().items()
        }
        assert_same_bits(tensors_of(tmp_path / "again"), expected)
        assert open_stored(tmp_path / "target").dtype == jnp.bfloat16
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert config["torch_dtype"] == "bfloat16"
        model = load_model(tmp_path / "target", progress=False)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}

    def test_mixed_types_become_the_widest(self, tmp_path, hf_folder):
        tensors = Golden.load("qwen2").tensors()
        norms = {name: value for name, value in tensors.items() if value.ndim == 1}
        others = tensors.keys() - norms.keys()
        tensors |= {name: tensors[name].astype(ml_dtypes.bfloat16) for name in others}
        for file in hf_folder.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, hf_folder / "model.safetensors")
        convert(hf_folder, tmp_path / "again", to="hf")
        expected = {name: value.astype(np.float32) for name, value in tensors.items()}
        assert_same_bits(tensors_of(tmp_path / "again"), expected)

    def test_a_gguf_file_becomes_the_same_model(self, write_gguf, tmp_path):
        path = write_gguf()
        convert(path, tmp_path / "hf", to="hf")
        model = load_model(path, cache_dir=tmp_path / "cache", progress=False)
        again = load_model(tmp_path / "hf", progress=False)
        jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
        assert again.eos_token_ids == model.eos_token_ids
        text = "hello 12 <|im_end|> Ж"
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
        assert again.tokenizer.chat_template == model.tokenizer.chat_template

    def test_orbax_alone_restores_a_checkpoint(self, tmp_path, hf_folder):
        convert(hf_folder, tmp_path / "ours", to="orbax")
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "ours" / "params")
        params = load_model(hf_folder, progress=False).params
        jax.tree.map(np.testing.assert_array_equal, restored, params)

    def test_the_tokenizers_files_come_along(self, write_gguf, tmp_path):
        convert(write_gguf(), tmp_path / "hf", to="hf")
        (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        convert(tmp_path / "hf", tmp_path / "ours", to="orbax")
        tokenizer = load_model(tmp_path / "ours", progress=False).tokenizer
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


class TestConfigs:
    @pytest.mark.parametrize("name", SERVED)
    def test_a_config_of_ours_reads_back(self, tmp_path, name):
        stored = open_stored(Golden.load(name).write_folder(tmp_path / "hf"))
        ours = dataclasses.replace(stored, hf_config=None)
        values = hf_config_of(ours)
        assert values["architectures"] == stored.hf_config["architectures"]

    def test_a_config_of_another_model_is_refused(self, tmp_path, hf_folder):
        stored = open_stored(hf_folder)
        wrong = dataclasses.replace(stored, hf_config=stored.hf_config | {"vocab_size": 7})
        with pytest.raises(ValueError, match=r"vocab_size=7.*|config\.json=.*must mean"):
            hf_config_of(wrong)

    def test_a_part_of_a_folder_does_not_become_one(self, tmp_path):
        source = Golden.load("gemma3_image_text").write_folder(tmp_path / "hf")
        convert(source, tmp_path / "ours", to="orbax")
        with pytest.raises(ValueError, match="a gemma3_image_text model cannot become"):
            convert(tmp_path / "ours", tmp_path / "again", to="hf")
        assert not (tmp_path / "again").exists()

    def test_windows_of_several_sizes_are_refused(self, tmp_path):
        stored = open_stored(Golden.load("qwen2_windows").write_folder(tmp_path / "hf"))
        config = dataclasses.replace(stored.config, layer_windows=(4, 8, None))
        with pytest.raises(ValueError, match=r"layer_windows=\(4, 8, None\) must have one size"):
            config.to_hf()


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"to": "torch"}, "to='torch' must be one of 'orbax', 'hf'"),
            ({"to": "hf", "dtype": "int8"}, "dtype='int8' must be one of 'auto'"),
            ({"to": "hf", "max_shard_bytes": 0}, "max_shard_bytes=0 must be >= 1"),
        ],
    )
    def test_arguments(self, tmp_path, hf_folder, options, message):
        with pytest.raises(ValueError, match=message):
            convert(hf_folder, tmp_path / "target", **options)

    def test_a_target_that_exists_is_left_alone(self, tmp_path, hf_folder):
        (tmp_path / "target").mkdir()
        with pytest.raises(FileExistsError, match=r"target: exists already and is not overwr"):
            convert(hf_folder, tmp_path / "target", to="hf")
        assert list((tmp_path / "target").iterdir()) == []

    def test_no_such_source(self, tmp_path):
        with pytest.raises(ValueError, match=r"absent\.gguf: there is no such file or folder"):
            convert(tmp_path / "absent.gguf", tmp_path / "target", to="hf")
        (tmp_path / "odd.txt").touch()
        with pytest.raises(ValueError, match=r"odd\.txt: expected a \.gguf file, or the folder"):
            convert(tmp_path / "odd.txt", tmp_path / "target", to="hf")

    @pytest.mark.parametrize("to", ["orbax", "hf"])
    def test_what_does_not_fit_is_named_and_nothing_stays(self, tmp_path, hf_folder, to):
        for changes, message in (
            (
                {"q_proj": None},
                r"tensor 'model\.layers\.1\.self_attn\.q_proj\.weight': expected sh",
            ),
            ({"q_proj": np.zeros((3, 32), np.float32)}, r"q_proj\.weight': .*found \(3, 32\)"),
            ({"z_proj": np.zeros(3, np.float32)}, r"z_proj\.weight': expected no such tensor"),
        ):
            tensors = Golden.load("qwen2").tensors()
            for module, value in changes.items():
                name = f"model.layers.1.self_attn.{module}.weight"
                tensors.pop(name, None)
                tensors |= {} if value is None else {name: value}
            for file in hf_folder.glob("*.safetensors*"):
                file.unlink()
            save_file(tensors, hf_folder / "model.safetensors")
            with pytest.raises(ValueError, match=message):
                convert(hf_folder, tmp_path / "target", to=to)
            assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def test_another_architecture_is_named(self, tmp_path):
        folder = Golden.load("qwen2").write_folder(tmp_path / "hf", model_type="mamba")
        with pytest.raises(ValueError, match=r"config\.json: model_type='mamba' must be one of"):
            convert(folder, tmp_path / "target", to="orbax")

    def test_pickled_weights_are_refused(self, tmp_path, hf_folder):
        for file in hf_folder.glob("*.safetensors*"):
            file.unlink()
        (hf_folder / "pytorch_model.bin").touch()
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: pickled weights can run code"):
            convert(hf_folder, tmp_path / "target", to="orbax")

    def test_a_damaged_checkpoint_makes_nothing(self, tmp_path, hf_folder):
        convert(hf_folder, tmp_path / "ours", to="orbax")
        (file,) = (tmp_path / "ours" / "params" / "embedding").glob("0.0")
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"tensor 'embedding': expected .*CRC-32"):
            convert(tmp_path / "ours", tmp_path / "again", to="hf")
        with pytest.raises(ValueError, match=r"tensor 'embedding': expected .*CRC-32"):
            load_model(tmp_path / "ours", progress=False)
        assert not (tmp_path / "again").exists()
