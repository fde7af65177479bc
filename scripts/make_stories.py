"""Write the corpus that the small model learns: stories from templates of this project.

    python scripts/make_stories.py --out=stories.txt

The text is the project's own, under its licence (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from paged_jax_scripts import cli
from paged_jax_scripts.training.stories import make_corpus

_OUT = flags.DEFINE_string("out", "stories.txt", "the file")
_NUM_STORIES = flags.DEFINE_integer("num_stories", 6000, "stories", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the choices")


def main(argv: Sequence[str]) -> None:
    """Run with parsed flags."""
    del argv
    path = Path(_OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_corpus(_NUM_STORIES.value, seed=_SEED.value), encoding="utf-8")
    print(f"{path}: {_NUM_STORIES.value} stories, {path.stat().st_size:,} bytes")


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
