"""Imports point one way, and the host side works without jax."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# From the bottom up: a package may import itself and those before it.
ORDER = ["pallas_kernels", "paged_jax", "models", "scripts"]
FILES = [path for name in ORDER for path in sorted((ROOT / name).rglob("*.py"))]


def imported_packages(path: pathlib.Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            # scripts/ has two names: its own, and the installed one.
            assert path.is_relative_to(ROOT / "scripts" / "gpu"), f"{path}: relative import"
            assert node.level == 1
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    # The installed name of scripts/.
    return {"scripts" if name == "paged_jax_scripts" else name for name in found}


def test_imports_point_one_way():
    assert len(FILES) > 40
    for path in FILES:
        place = ORDER.index(path.relative_to(ROOT).parts[0])
        upwards = imported_packages(path) & set(ORDER[place + 1 :])
        assert not upwards, f"{path} imports {upwards}"


@pytest.mark.parametrize("folder", ["blocks", "scheduling"])
def test_host_folders_never_name_jax(folder):
    files = sorted((ROOT / "paged_jax" / folder).glob("*.py"))
    assert files
    for path in files:
        assert not imported_packages(path) & {"jax", "jaxlib", "jaxtyping", "flax"}, path


def test_the_host_side_imports_without_jax():
    code = """
import importlib, pathlib, sys
sys.modules["jax"] = sys.modules["jaxlib"] = None  # an import of either now fails
import paged_jax
for folder in ("blocks", "scheduling"):
    for path in sorted(pathlib.Path(paged_jax.__file__).parent.joinpath(folder).glob("*.py")):
        importlib.import_module(f"paged_jax.{folder}.{path.stem}")
from paged_jax.blocks.block_manager import BlockManager
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
manager = BlockManager(num_blocks=8, block_size=4)
scheduler = Scheduler(
    manager, max_num_seqs=2, max_num_batched_tokens=8, prefill_row_len=4, max_model_len=16
)
scheduler.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=2)))
assert len(scheduler.schedule().prefill_rows) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
