"""What an experiment gives back: rows, comparisons with the paper, and what to draw."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from paged_jax.simulation.assumptions import DEFAULT, Assumptions

Kind = Literal["simulated", "executed", "executed and simulated"]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One figure of ours beside the paper's.

    Attributes:
      what: is compared.
      paper: lowest and highest figure of the paper; a single one twice.
      ours: measured.
      margin: how far outside of these still counts as near: relative, or points.
      unit: of the figures.
      in_points: differences are differences, not ratios.

    >>> Comparison(what="ratio", paper=(1.7, 2.7), ours=3.0).verdict
    'within 20 %'
    >>> Comparison(what="share", paper=(38.2, 38.2), ours=48.0, margin=8, in_points=True).verdict
    'outside'
    """

    what: str
    paper: tuple[float, float]
    ours: float
    margin: float = 0.2
    unit: str = ""
    in_points: bool = False

    @property
    def difference(self) -> float:
        """Ours less the nearest figure of the paper's range: in points, or relative to it."""
        nearest = min(max(self.ours, self.paper[0]), self.paper[1])
        return self.ours - nearest if self.in_points else self.ours / nearest - 1

    @property
    def verdict(self) -> str:
        """'inside', 'within' the margin, or 'outside'."""
        if self.paper[0] <= self.ours <= self.paper[1]:
            return "inside"
        if abs(self.difference) <= self.margin:
            margin = f"{self.margin:g} points" if self.in_points else f"{100 * self.margin:g} %"
            return f"within {margin}"
        return "outside"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """A panel of curves.

    Attributes:
      title: above it.
      x_label: what is varied.
      y_label: what is measured.
      series: points of each curve by its name.
      y_max: where the axis ends; None: where the points do.
      limit: a level to mark, or None.
      is_log_x: equal distances are equal ratios.
      is_log_y: the same, upwards.
    """

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    y_max: float | None = None
    limit: float | None = None
    is_log_x: bool = False
    is_log_y: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A panel of bars.

    Attributes:
      title: above it.
      y_label: what is measured.
      groups: names along the axis.
      series: a height for each group by the bars' name; None: no bar.
      is_stacked: on top of each other, else side by side.
    """

    title: str
    y_label: str
    groups: tuple[str, ...]
    series: dict[str, tuple[float | None, ...]]
    is_stacked: bool = False


Panel = Lines | Bars


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """Results of one of the paper's figures.

    Attributes:
      name: of the command.
      title: what it shows.
      kind: how ours came about.
      how: what was run, in a sentence or two.
      rows: what was measured, as printed.
      points: more of it, for the JSON file alone.
      comparisons: with what the paper prints.
      panels: what to draw.
    """

    name: str
    title: str
    kind: Kind
    how: str
    rows: tuple[Row, ...]
    points: tuple[Row, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    panels: tuple[Panel, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How an experiment is run.

    Attributes:
      minutes: length of the simulated traces of ShareGPT; those of Alpaca, whose outputs are a
        sixth as long, take a sixth of it.
      seed: of lengths and arrivals.
      num_processes: that simulate at a time; 1: this one.
      assumptions: all that the paper does not say.
      model: of executed parts, a known name or a .gguf file; None: only what needs no model.

    Raises:
      ValueError: minutes is not above 0, or num_processes below 1.
    """

    minutes: float = 20.0
    seed: int = 0
    num_processes: int = 2
    assumptions: Assumptions = DEFAULT
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes} must be > 0")
        if self.num_processes < 1:
            raise ValueError(f"num_processes={self.num_processes} must be >= 1")
