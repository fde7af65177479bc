"""The paper's experiments: a table with its figures beside ours, a picture, a JSON file each.

    python scripts/paper.py fig13
    python scripts/paper.py all --minutes=5

docs/experiments.md says how each is done and what came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging
from rich.console import Console

from paged_jax_scripts import cli
from paged_jax_scripts.experiments.catalogue import resolve_names, run_named
from paged_jax_scripts.experiments.records import Options

_OUT = flags.DEFINE_string("out", "results", "folder of the pictures and JSON files")
_MINUTES = flags.DEFINE_float(
    "minutes", 20.0, "length of the simulated traces (the paper's: 60)", lower_bound=0.01
)
_SEED = flags.DEFINE_integer("seed", 0, "of lengths and arrivals")
_JOBS = flags.DEFINE_integer("jobs", 2, "processes that simulate", lower_bound=1)
_WITH_MODEL = flags.DEFINE_bool(
    "with_model", True, "also what is executed with a model (--model); its weights may be fetched"
)


def main(argv: Sequence[str]) -> None:
    """Run the named experiments.

    Raises:
      ValueError: there is no such experiment.
      SystemExit: some failed; the others ran.
    """
    names = resolve_names(argv[1:])
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    cli.enable_compilation_cache(cli.CACHE_DIR.value)
    options = Options(
        minutes=_MINUTES.value,
        seed=_SEED.value,
        num_processes=_JOBS.value,
        model=cli.MODEL.value if _WITH_MODEL.value else None,
    )
    failed = run_named(names, options, out=Path(_OUT.value), console=Console())
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def run() -> None:
    """Entry point."""
    cli.run_program(main)


if __name__ == "__main__":
    run()
