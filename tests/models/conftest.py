"""Toy GGUF files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from suites.toy_gguf import write_toy_gguf

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """``write_gguf("name.gguf", tensors={...}, metadata={...})``: see ``write_toy_gguf``."""

    def write(name: str = "toy.gguf", **changes) -> Path:
        return write_toy_gguf(tmp_path / name, **changes)

    return write
