"""Draw predicted timelines over measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipesim.analysis.compare import Comparison
from pipesim.errors import ArgumentError, number
from pipesim.ops import Op
from pipesim.plot.lanes import lanes, rows
from pipesim.plot.paper_figure import (
    TWO_COLUMNS,
    add_legend,
    axes_or_new,
    check_drawable,
    end_of_axis,
    legend_options,
    set_device_rows,
    set_title,
    titles_fit,
)
from pipesim.plot.style import INK, format_error, n_chunks
from pipesim.utils.units import format_time, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Share of white in the colours of a prediction; its outline has the full colour.
TINT = 0.6
#: Height of a device in a comparison, in rows of a timeline.
ROWS_PER_DEVICE = 1.5


def comparison(
    comparison: Comparison,
    *,
    ax: Axes | None = None,
    transfers: bool = False,
    numbers: bool = True,
    legend: bool = True,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the predicted timeline over the measured one: two lanes a device, one time axis.

    Predictions are pale and outlined, measurements full. A dashed and a solid line mark the two
    makespans. The error (predicted over measured, minus 1) is to the right of the title.

    Parameters
    ----------
    comparison
        The comparison to draw.
    ax, transfers, numbers, legend, unit
        As for `timeline`.
    title
        By default the measured timeline's name.
    """
    graph = check_drawable(comparison, Comparison).predicted.graph
    ax = axes_or_new(ax, ROWS_PER_DEVICE * rows(graph, transfers=transfers))
    drawn = _draw_comparison(ax, comparison, _end_of_axes([comparison]), transfers, numbers, unit)
    height = 0.0
    if legend:
        from pipesim.plot.task_boxes import legend_entries

        height = add_legend(ax, *legend_entries(graph, drawn, compared=True))
    _draw_heading(ax, comparison, comparison.measured.name if title is None else title, height)
    return ax


def overlay(
    comparisons: Mapping[str, Comparison],
    *,
    width: float = TWO_COLUMNS,
    transfers: bool = False,
    numbers: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw comparisons below each other, on one time axis and under one legend.

    Parameters
    ----------
    comparisons
        Comparisons by title, the first on top.
    width
        Width of the figure (inches).
    transfers, numbers, unit
        As for `timeline`.

    Returns
    -------
    matplotlib.figure.Figure
        Not managed by pyplot: there is nothing to close.
    """
    from pipesim.plot.task_boxes import legend_entries
    from pipesim.utils.packages import Figure

    if not isinstance(comparisons, Mapping) or not comparisons:
        raise ArgumentError(
            f"overlay takes a mapping of titles to at least one comparison, got {comparisons!r}"
        )
    items = [check_drawable(item, Comparison) for item in comparisons.values()]
    if (number(width) or 0.0) <= 0:
        raise ArgumentError(f"width must be inches > 0, got {width!r}")
    graphs = [item.predicted.graph for item in items]
    heights = [0.36 * rows(graph, transfers=transfers) for graph in graphs]
    height = 0.7 + sum(heights) + 0.22 * len(heights)
    whole = Figure(figsize=(width, height), layout="constrained")
    axes = whole.subplots(len(graphs), 1, sharex=True, squeeze=False, height_ratios=heights)
    stacked = axes[:, 0]
    drawn: dict[Op, str | None] = {}
    for ax, (title, item) in zip(stacked, comparisons.items(), strict=True):
        drawn |= _draw_comparison(ax, item, _end_of_axes(items), transfers, numbers, unit)
        _draw_heading(ax, item, title, 0.0)
        if ax is not stacked[-1]:
            ax.set_xlabel("")
    deepest = max(graphs, key=n_chunks)
    handles, labels = legend_entries(deepest, drawn, compared=True)
    options = legend_options(labels, width * 72)
    whole.legend(handles, labels, loc="outside upper center", **options)
    return whole


def _end_of_axes(comparisons: Iterable[Comparison]) -> float:
    """Return the end of the time axis that all comparisons share (s)."""
    return max(
        end_of_axis(timeline)
        for comparison in comparisons
        for timeline in (comparison.predicted, comparison.measured)
    )


def _draw_comparison(
    ax: Axes,
    comparison: Comparison,
    end: float,
    transfers: bool,
    numbers: bool,
    unit: str | None,
) -> dict[Op, str | None]:
    """Draw both timelines and their makespans; return the operations, each with its hatch."""
    from pipesim.plot import task_boxes

    graph = comparison.predicted.graph
    sign, scale = time_unit(end, unit)
    set_device_rows(ax, graph.n_devices, end * scale, sign)
    drawn: dict[Op, str | None] = {}
    for name, timeline, half, tint, style in (
        ("predicted", comparison.predicted, -1, TINT, task_boxes.DASHES),
        ("measured", comparison.matched, 1, 0.0, "-"),
    ):
        task_lanes = lanes(graph, transfers=transfers, half=half)
        task_boxes.draw_bubbles(ax, task_lanes, timeline.makespan * scale)
        drawn |= task_boxes.draw_boxes(
            ax, timeline, task_lanes, scale=scale, name=name, tint=tint, numbers=numbers
        )
        line = ax.axvline(
            timeline.makespan * scale, color=INK, linestyle=style, linewidth=0.8, zorder=1.5
        )
        line.set_gid(f"{name}:makespan")
    return drawn


def _draw_heading(ax: Axes, comparison: Comparison, title: str, height: float) -> None:
    """Put title, makespans and error above the axes; without the makespans if space is short."""
    predicted, measured = comparison.predicted.makespan, comparison.measured.makespan
    if not measured:
        set_title(ax, title, "nothing ran", height)
        return
    error = f"error {format_error(comparison.makespan_error)}"
    makespans = f"predicted {format_time(predicted)}, measured {format_time(measured)}, {error}"
    set_title(ax, title, makespans if titles_fit(ax, title, makespans) else error, height)
