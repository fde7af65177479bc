"""Draws an experiment's panels with matplotlib (``pip install 'paged-jax[experiments]'``)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from paged_jax_scripts.experiments.records import Bars, Experiment, Lines

_PANEL_SIZE = (4.2, 3.2)  # inches
_LEAST_WIDTH = 7.2  # inches, for the title
_MAX_COLUMNS = 3
_DPI = 72


def draw(experiment: Experiment, path: Path) -> None:
    """Write the panels as one PNG.

    Args:
      experiment: with at least one panel.
      path: of the file.
    """
    num_columns = min(len(experiment.panels), _MAX_COLUMNS)
    num_rows = -(-len(experiment.panels) // num_columns)
    size = (max(_PANEL_SIZE[0] * num_columns, _LEAST_WIDTH), _PANEL_SIZE[1] * num_rows + 0.4)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False)
    for axes in grid.flat[len(experiment.panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, experiment.panels, strict=False):
        if isinstance(panel, Lines):
            _draw_lines(axes, panel)
        else:
            _draw_bars(axes, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.legend(fontsize=7, framealpha=0.7)
    figure.suptitle(f"{experiment.title} ({experiment.kind})", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    for name, points in panel.series.items():
        points = sorted(points)
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="grey", linestyle=":", linewidth=1)
    if panel.is_log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.is_log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, panel.y_max)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    places = range(len(panel.groups))
    num_beside = 1 if panel.is_stacked else len(panel.series)
    width = 0.8 / num_beside
    bottoms = [0.0] * len(panel.groups)
    for number, (name, heights) in enumerate(panel.series.items()):
        shift = 0.0 if panel.is_stacked else (number - (num_beside - 1) / 2) * width
        drawn = [0.0 if height is None else height for height in heights]
        axes.bar([place + shift for place in places], drawn, width, bottoms, label=name)
        if panel.is_stacked:
            bottoms = [below + height for below, height in zip(bottoms, drawn, strict=True)]
    axes.set_xticks(places, panel.groups, fontsize=7)
    axes.set_ylabel(panel.y_label)
