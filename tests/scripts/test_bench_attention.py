import os
import pathlib
import re
import subprocess
import sys

import pytest

from paged_jax_scripts.attention_timing import Form, check_in_place
from scripts import bench_attention

ROOT = pathlib.Path(bench_attention.__file__).parent.parent


def test_quick_run_prints_every_form():
    result = subprocess.run(
        [sys.executable, "-m", "scripts.bench_attention", "--quick"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("paged", "scan", "unrolled", "jit a layer"):
        assert re.search(rf"    {name} +\d+\.\d\d \[.*\] ms   alias 1\d\d%", result.stdout)
    assert "geometric mean of 1 ratios" in result.stdout
    assert "table 32 times wider: ratio" in result.stdout


def test_unexpected_arguments_are_refused():
    result = subprocess.run(
        [sys.executable, "-m", "scripts.bench_attention", "extra"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "unexpected arguments ['extra']" in result.stdout + result.stderr


def test_a_form_that_copies_its_cache_is_refused():
    with pytest.raises(RuntimeError, match="dense: alias 90, temp 1; must be at least 100"):
        check_in_place("dense", Form(max, None, alias_bytes=90, temp_bytes=1), 100)
    with pytest.raises(RuntimeError, match="dense: alias 100, temp 5"):
        check_in_place("dense", Form(max, None, alias_bytes=100, temp_bytes=5), 100)
    check_in_place("paged", Form(max, None, alias_bytes=100, temp_bytes=5), 100, temp_bytes=6)
