"""How a run goes: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingDisplay:
    """Shows losses and speed; a ``run.Display``, used as a context manager.

    Args:
      console: where to.
      num_steps: of the whole run.
      tokens_per_step: that an update predicts.
    """

    __slots__ = ("_begin", "_console", "_first", "_progress", "_task", "_tokens")

    def __init__(self, console: Console, *, num_steps: int, tokens_per_step: int) -> None:
        self._console, self._tokens = console, tokens_per_step
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("compiling ...", total=num_steps)
        self._first, self._begin = 0, 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def resumed(self, step: int) -> None:
        """Tell that the run goes on after ``step`` updates."""
        self._console.print(f"resumed after step {step}", highlight=False)

    def updated(self, step: int) -> None:
        """Move the bar."""
        if not self._begin:  # the first update compiled: the speed is of the others
            self._begin, self._first = time.perf_counter(), step
        self._progress.update(self._task, completed=step)

    def recorded(self, metrics: dict[str, float]) -> None:
        """Show a loss beside the bar, an evaluation as a line that stays."""
        step = int(metrics["step"])
        seconds = time.perf_counter() - self._begin
        rate = self._tokens * (step - self._first) / seconds
        if "eval_loss" in metrics:
            line = f"step {step}: held out {metrics['eval_loss']:.4f} nats a token, "
            line += f"perplexity {metrics['perplexity']:.3f}"
            self._console.print(line, style="bold", highlight=False)
            return
        text = f"loss {metrics['loss']:.4f}, {rate:,.0f} tokens/s"
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"step {step}: {text}", highlight=False)
