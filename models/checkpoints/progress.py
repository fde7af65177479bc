"""A progress display on standard error, so that standard output stays the program's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[float], None]


@contextlib.contextmanager
def track(text: str, total: float, *, enabled: bool) -> Iterator[Report]:
    """Show a bar while the block runs; the block reports how far it has come.

    Args:
      text: what is being done.
      total: the value of a finished task.
      enabled: False shows nothing.

    Yields:
      ``report(done)``, to be called with values up to ``total``.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not enabled) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
