"""Write the figures of commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pipesim.calibration.calibration import Calibration
    from pipesim.planning.configurations.plans import Plans


#: Width of a figure, and height of a device's row or a bar in it (inches).
_WIDTH, _ROW = 7.16, 0.25
#: Width and height of a figure of measured over predicted seconds (inches).
_SQUARE = 3.5


def write_accuracy(path: Path | None, fitted: Calibration) -> None:
    """Write measured over predicted seconds of left-out steps; nothing without a path."""
    if path is None:
        return
    from pipesim.plot.paper_figure import save
    from pipesim.utils.packages import Figure

    figure = Figure(figsize=(_SQUARE, _SQUARE), layout="constrained")
    fitted.plot(ax=figure.add_subplot())
    save(figure, path)


def write_plans(path: Path | None, plans: Plans) -> None:
    """Write memory over time of the configurations of a plan; nothing without a path."""
    if path is None:
        return
    from pipesim.plot.paper_figure import save
    from pipesim.utils.packages import Figure

    figure = Figure(figsize=(_WIDTH, _SQUARE), layout="constrained")
    plans.plot(ax=figure.add_subplot())
    save(figure, path)


def write_figure(
    path: Path | None,
    timelines: Sequence[Timeline],
    table: pd.DataFrame | None = None,
    *,
    idle: bool = False,
) -> None:
    """Write a figure of timelines below each other, on one time scale; nothing without a path.

    Parameters
    ----------
    path
        File to write, if any.
    timelines
        The first on top.
    table
        Table of `pipesim.compare`: its makespans and peak memories are bars above the timelines.
    idle
        Whether to draw the causes of idle time below the timelines, on their own time scale.
    """
    if path is None:
        return
    from pipesim.plot.charts import bars
    from pipesim.plot.idle_chart import idle as draw_idle
    from pipesim.plot.paper_figure import save
    from pipesim.plot.timelines import timeline as draw_timeline
    from pipesim.utils.packages import Figure

    heights = [0.9 + _ROW * min(timeline.n_devices, 24) for timeline in timelines]
    n_rows = len(heights)
    heights += heights if idle else []
    heights[:0] = [] if table is None else [0.4 + _ROW * len(table)]
    first = 0 if table is None else 1
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if table is not None:
        for position, column in enumerate(("makespan", "peak_memory")):
            bars(table, ax=figure.add_subplot(grid[0, position]), column=column)
    drawn = []
    for row, timeline in enumerate(timelines, first):
        ax = figure.add_subplot(grid[row, :])
        drawn.append(draw_timeline(timeline, ax=ax, unit="ms", title=timeline.name))
    _share_scale(drawn)
    drawn = []
    for row, timeline in enumerate(timelines if idle else (), first + n_rows):
        ax = figure.add_subplot(grid[row, :])
        drawn.append(draw_idle(timeline, ax=ax, unit="ms", title=f"{timeline.name}, idle"))
    _share_scale(drawn)
    save(figure, path)


def _share_scale(axes: Sequence[Axes]) -> None:
    """Set the end of all time axes, which begin at 0, to that of the longest."""
    last = max((ax.get_xlim()[1] for ax in axes), default=0.0)
    for ax in axes:
        ax.set_xlim(0, last)
