"""The programs run as users run them: in a process of their own, at toy size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from suites.toy_gguf import write_toy_gguf


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> Path:
    return write_toy_gguf(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture
def run_program(tmp_path_factory, toy_model):
    """``run_program("generate", "--flag", stdin="...")``: a CompletedProcess, on the toy model."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def run(name: str, *args: str, stdin: str = "", is_toy: bool = True):
        flags, env = [], {**os.environ, "COLUMNS": "100"}
        if is_toy:
            flags = [f"--model={toy_model}", "--max_num_seqs=4"]
            env["PAGED_JAX_CACHE"] = str(cache)
        return subprocess.run(
            [sys.executable, "-m", f"paged_jax_scripts.{name}", *flags, *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=env,
        )

    return run
