"""A training run: updates, evaluations and checkpoints until the last step, from wherever it is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from paged_jax.config import require
from paged_jax_scripts.training.saving import Checkpoints, export_model
from paged_jax_scripts.training.settings import Cadence, TrainSettings
from paged_jax_scripts.training.start import Start
from paged_jax_scripts.training.text import TokenRows
from paged_jax_scripts.training.update import (
    TrainState,
    UpdateStats,
    learning_rates,
    make_evaluation,
    make_update,
    new_state,
)

MODEL_FOLDER, CHECKPOINT_FOLDER, METRICS_FILE = "model", "checkpoints", "metrics.jsonl"


class Display(Protocol):
    """Who is told how a run goes."""

    def resumed(self, step: int) -> None:
        """Tell that the run goes on after ``step`` updates."""
        ...

    def updated(self, step: int) -> None:
        """Tell that ``step`` updates are made or under way."""
        ...

    def recorded(self, metrics: dict[str, float]) -> None:
        """Show figures: ``step`` and ``loss`` or ``eval_loss`` among them."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, on what, and where to.

    Attributes:
      start: the model before the first update.
      train: rows to learn.
      held_out: rows to evaluate on.
      settings: what the weights depend on.
      cadence: what happens beside.
      out: the folder of the run.

    Raises:
      ValueError: these do not fit together.
    """

    start: Start
    train: TokenRows
    held_out: TokenRows
    settings: TrainSettings
    cadence: Cadence
    out: Path

    def __post_init__(self) -> None:
        settings, longest = self.settings, self.start.config.spec.max_position
        require(
            settings.seq_len <= longest,
            f"seq_len={settings.seq_len} must be at most the model's max_position={longest}",
        )
        require(
            settings.batch_size <= len(self.train),
            f"batch_size={settings.batch_size} must be at most {len(self.train)}: {self.train.name}"
            f" has {len(self.train.stream)} tokens, in rows of seq_len={settings.seq_len}",
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What a run must share with a checkpoint to resume from it, JSON-ready."""
        return {
            **self.settings.to_json(),
            "model": self.start.name,
            "family": self.start.family.name,
            "config": json.loads(json.dumps(self.start.config.to_json())),
            "train text (sha256 of its tokens)": self.train.digest,
        }


def train(run: Run, display: Display) -> Path:
    """Train to the last step, from the newest checkpoint where there is one; export the model.

    Returns:
      The model's folder.

    Raises:
      ValueError: a checkpoint is of a run with other settings or damaged, or the loss is not
        finite.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    settings, cadence = run.settings, run.cadence
    apply = run.start.apply_fn(settings.compute_dtype)
    update, evaluate = make_update(apply, settings), make_evaluation(apply, settings)
    rate_of = learning_rates(settings)
    state = new_state(run.start.params, settings)
    with Checkpoints(run.out / CHECKPOINT_FOLDER, max_to_keep=cadence.max_to_keep) as checkpoints:
        restored = checkpoints.restore(state, identity=run.identity)
        state = state if restored is None else restored
        first = int(state.step)
        metrics = _Metrics(run.out / METRICS_FILE, display, first_step=first)
        if restored is not None:
            display.resumed(first)
        for step in range(first, settings.num_steps):
            rows = run.train.batch_of(step, batch_size=settings.batch_size, seed=settings.seed)
            state, stats = update(state, jnp.asarray(rows))
            done = step + 1
            display.updated(done)
            is_last = done == settings.num_steps
            is_due = lambda every: done % every == 0 or is_last  # noqa: B023, E731
            if is_due(cadence.log_every) or is_due(cadence.save_every):
                _require_finite(stats, done, settings)
            if is_due(cadence.log_every):
                metrics.add(
                    step=done,
                    loss=float(stats.loss),
                    grad_norm=float(stats.grad_norm),
                    learning_rate=float(jnp.asarray(rate_of(step))),
                )
            if is_due(cadence.eval_every):
                metrics.add(step=done, **_evaluation(evaluate, state, run))
            if is_due(cadence.save_every):
                checkpoints.save(state, identity=run.identity)
    source = {
        "file": run.start.name,
        "sha256": run.train.digest,
        "licence": "that of what it was trained on",
        "num_steps": settings.num_steps,
    }
    export_model(run.out / MODEL_FOLDER, run.start, state.params, source=source)
    return run.out / MODEL_FOLDER


def _evaluation(evaluate: Any, state: TrainState, run: Run) -> dict[str, float]:
    """Mean loss and perplexity over all rows that are held out."""
    size = run.settings.batch_size // run.settings.num_microbatches
    sums = [evaluate(state.params, jnp.asarray(rows)) for rows in run.held_out.batches(size)]
    loss = sum(map(float, sums)) / (len(run.held_out) * run.settings.seq_len)
    return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def _require_finite(stats: UpdateStats, step: int, settings: TrainSettings) -> None:
    loss, norm = jax.device_get((stats.loss, stats.grad_norm))
    require(
        math.isfinite(loss) and math.isfinite(norm),
        f"learning_rate={settings.learning_rate} must be smaller: at step {step} the loss is "
        f"{loss} and the gradient's norm {norm}",
    )


class _Metrics:
    """The run's figures: shown, and appended to a file of JSON lines."""

    def __init__(self, path: Path, display: Display, *, first_step: int) -> None:
        self._path, self._display = path, display
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        # A killed run may have gone on after its last checkpoint: those steps come again.
        kept = [line for line in lines if _step_of(line) <= first_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def add(self, **metrics: float) -> None:
        """Show and append one line."""
        self._display.recorded(metrics)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; infinity where it was cut off."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
