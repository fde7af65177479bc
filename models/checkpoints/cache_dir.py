"""Where converted checkpoints live, and how a folder appears there whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

CACHE_VARIABLE = "PAGED_JAX_CACHE"


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache folder: the argument, ``$PAGED_JAX_CACHE``, or XDG's ``paged_jax``."""
    chosen = cache_dir or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "paged_jax"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Make ``folder`` with ``build`` unless it exists; others see it only when it is whole.

    One process builds, others wait for it. The work happens in a temporary folder beside the
    target, which is renamed at the end. What a killed process left behind is removed by the next.

    Args:
      folder: the target; its parent is made as needed.
      build: fills the folder that it is given.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{folder.name}.tmp-"
    with FileLock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return
        # Whoever made these held the lock, and it is ours now: they are dead.
        for leftover in folder.parent.glob(glob.escape(prefix) + "*"):
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            build(temporary)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
