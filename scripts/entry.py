"""Console entry points; programs run as ``__main__``, so that absl's --help shows their flags."""

from __future__ import annotations

import runpy


def generate() -> None:
    """``paged-jax-generate``."""
    _run("generate")


def compare_dense() -> None:
    """``paged-jax-compare-dense``."""
    _run("compare_dense")


def _run(name: str) -> None:
    runpy.run_module(f"paged_jax_scripts.{name}", run_name="__main__", alter_sys=True)
