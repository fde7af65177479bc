"""GGUF files: what is read, and what damaged files say."""

import gguf
import numpy as np
import pytest

from models.checkpoints import GgufFile, unpermute_rows


def test_reads_metadata_and_tensors(write_gguf):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = GgufFile(write_gguf(tensors={"extra": values}))
    assert file.architecture == "llama"
    assert file.metadata("llama.block_count") == 2
    assert file.metadata("llama.nothing", 7) == 7
    assert file.has("general.name")
    assert not file.has("llama.nothing")
    assert "extra" in file.tensor_names
    np.testing.assert_array_equal(file.tensor("extra", (2, 3)), values)


def test_dequantises(write_gguf):
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    path = write_gguf(tensors={"half": values.astype(np.float16)})
    np.testing.assert_allclose(GgufFile(path).tensor("half", (2, 32)), values, atol=1e-3)


def test_unpermute_rows_undoes_the_converter():
    weight = np.arange(24).reshape(12, 2)
    permuted = weight.reshape(3, 2, 2, 2).swapaxes(1, 2).reshape(12, 2)
    np.testing.assert_array_equal(unpermute_rows(permuted, num_heads=3), weight)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        GgufFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"x" * 4096, b"GGUF" + b"\xff" * 60])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.gguf: expected a whole GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2])
def test_a_file_cut_in_its_header_is_refused(write_gguf, share):
    path = write_gguf()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"toy\.gguf: expected a whole GGUF file.*the file"):
        GgufFile(path)


def test_a_file_cut_in_its_tensors_names_the_tensor_and_its_size(write_gguf):
    path = write_gguf(tensors={"last": np.zeros((64, 64), np.float32)})
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ValueError, match=r"toy\.gguf.*tensor 'last': expected 16384 bytes"):
        GgufFile(path)


def test_an_absurd_count_is_refused_at_once(write_gguf):
    path = write_gguf()
    content = bytearray(path.read_bytes())
    content[16:24] = (2**60).to_bytes(8, "little")  # the number of metadata entries
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a whole GGUF file"):
        GgufFile(path)


def test_a_missing_key_is_named(write_gguf):
    file = GgufFile(write_gguf())
    with pytest.raises(ValueError, match=r"toy\.gguf: expected the metadata key 'llama\.nothing'"):
        file.metadata("llama.nothing")


def test_a_value_that_is_no_text_is_named(write_gguf):
    path = write_gguf()
    path.write_bytes(path.read_bytes().replace(b"a toy for tests", b"\xff\xfe for tests..."))
    with pytest.raises(ValueError, match=r"metadata key 'general\.name' must be UTF-8"):
        GgufFile(path).metadata("general.name")


def test_a_missing_tensor_is_named(write_gguf):
    file = GgufFile(write_gguf())
    with pytest.raises(ValueError, match=r"toy\.gguf: tensor 'nope': expected shape \(2, 3\)"):
        file.tensor("nope", (2, 3))


def test_another_shape_is_named(write_gguf):
    file = GgufFile(write_gguf(tensors={"extra": np.zeros((2, 3), np.float32)}))
    with pytest.raises(ValueError, match=r"'extra': expected shape \(3, 2\), found \(2, 3\)"):
        file.tensor("extra", (3, 2))


def test_an_unreadable_type_is_named(write_gguf):
    file = GgufFile(write_gguf(tensors={"extra": np.zeros(4, np.int32)}))
    with pytest.raises(ValueError, match=r"'extra': expected a type that .* found I32"):
        file.tensor("extra", (4,))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(write_gguf, bad):
    file = GgufFile(write_gguf(tensors={"extra": np.array([0, bad], np.float32)}))
    with pytest.raises(ValueError, match="'extra': expected finite numbers"):
        file.tensor("extra", (2,))


def test_quantised_blocks_have_the_numpy_shape(write_gguf, tmp_path):
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    path = tmp_path / "quantised.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_allclose(GgufFile(path).tensor("w", (2, 64)), values, atol=0.01)
