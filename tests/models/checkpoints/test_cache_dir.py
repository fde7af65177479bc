"""Where the cache is, and that a folder appears there whole or not at all."""

from pathlib import Path

import pytest

from models.checkpoints import build_once, cache_root


def test_the_cache_follows_argument_variable_and_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(tmp_path / "argument") == tmp_path / "argument"
    assert cache_root() == tmp_path / "variable"
    monkeypatch.delenv("PAGED_JAX_CACHE")
    assert cache_root() == tmp_path / "xdg" / "paged_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("~/.cache/paged_jax").expanduser()


def test_a_folder_is_built_once(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("content")

    for _ in range(2):
        build_once(tmp_path / "deep" / "target", build)
    assert len(calls) == 1
    assert (tmp_path / "deep" / "target" / "file").read_text() == "content"


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("content")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "target", build)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_leftovers_of_this_target_only_are_removed(tmp_path):
    (tmp_path / "target.tmp-dead").mkdir()
    (tmp_path / "other.tmp-alive").mkdir()
    build_once(tmp_path / "target", lambda folder: None)
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"target", "other.tmp-alive"}
