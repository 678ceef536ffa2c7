"""Figures: timelines, predictions over measurements, memory over time, bars.

Every function draws into the axes that it is given, or else into a new pyplot figure two columns
wide, and returns the axes. None shows or saves anything; `save` does. matplotlib is imported when
something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipesim.analysis.compare import Comparison
from pipesim.errors import ArgumentError, number
from pipesim.ops import Op
from pipesim.plot.charts import bars, memory
from pipesim.plot.dependency_plot import dependencies
from pipesim.plot.figure import (
    ONE_COLUMN,
    TWO_COLUMNS,
    add_legend,
    axes_or_new,
    checked,
    end_of_axis,
    figure,
    fits,
    legend_options,
    rows_of_devices,
    save,
    set_title,
    sized,
)
from pipesim.plot.html import figure_html, graph_html, note_html, schedule_html, table_html
from pipesim.plot.idle import idle
from pipesim.plot.lanes import lanes, rows
from pipesim.plot.style import (
    INK,
    LABELS,
    PALETTE,
    format_bytes,
    format_error,
    format_time,
    n_chunks,
    time_unit,
)
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ONE_COLUMN",
    "PALETTE",
    "TWO_COLUMNS",
    "bars",
    "comparison",
    "comparison_html",
    "dependencies",
    "figure",
    "graph_html",
    "idle",
    "memory",
    "overlay",
    "save",
    "schedule_html",
    "timeline",
    "timeline_html",
]

#: What a prediction mixes in of white; it is outlined in the full colour.
TINT = 0.6
#: Rows of a timeline that a row of a comparison takes.
COMPARED = 1.5


def timeline(
    timeline: Timeline,
    *,
    ax: Axes | None = None,
    transfers: bool = False,
    dependencies: bool = False,
    numbers: bool = True,
    legend: bool = True,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw when each task ran, as papers do: a row a device, device 0 on top.

    Cells are coloured by operation and carry the number of their micro-batch where it fits. Of
    several stages on one device, later ones are lighter. Grey is bubble. Tasks that began and
    did not end are dashed.

    Parameters
    ----------
    timeline
        What to draw, simulated or measured, whole or not.
    ax
        Where to draw; its limits are set.
    transfers
        Whether to draw messages under each device, a line a copy stream; a tick is one of pure
        latency. Messages on the compute stream (``overlap=False``) are drawn there in any case.
    dependencies
        Whether to draw an arrow for each output or gradient that another device needs.
    numbers, legend
        Whether to have these.
    unit
        Of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        None by default.

    Raises
    ------
    ArgumentError
        If ``timeline`` or ``ax`` is something else.
    UnknownNameError
        For an unknown unit.
    """
    graph = checked(timeline, Timeline).graph
    sign, scale = time_unit(timeline.makespan, unit)
    ax = axes_or_new(ax, rows(graph, transfers=transfers))
    from pipesim.plot import task_boxes as cells

    rows_of_devices(ax, graph.n_devices, end_of_axis(timeline) * scale, sign)
    where = lanes(graph, transfers=transfers)
    cells.draw_bubbles(ax, where, timeline.makespan * scale)
    drawn = cells.draw_cells(ax, timeline, where, scale=scale, numbers=numbers)
    if dependencies:
        cells.draw_dependencies(ax, timeline, where, scale=scale)
    height = 0.0
    if legend and drawn:
        cut = len(timeline.frame) > int(timeline.ran.sum())
        height = add_legend(ax, *cells.legend_entries(graph, drawn, unfinished=cut))
    if title:
        set_title(ax, title, height=height)
    return ax


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
    """Draw the predicted timeline over the measured one: two lanes a device, one axis of time.

    Predictions are pale and outlined, measurements full. A dashed and a solid line mark the two
    makespans; the error (predicted over measured, minus 1) is at the right of the title.

    Parameters
    ----------
    comparison
        What to draw.
    ax, transfers, numbers, legend, unit
        As for `timeline`.
    title
        By default the measured timeline's name.

    Raises
    ------
    ArgumentError
        If ``comparison`` or ``ax`` is something else.
    UnknownNameError
        For an unknown unit.
    """
    graph = checked(comparison, Comparison).predicted.graph
    ax = axes_or_new(ax, COMPARED * rows(graph, transfers=transfers))
    drawn = _draw_comparison(ax, comparison, _latest([comparison]), transfers, numbers, unit)
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
    """Draw comparisons below each other, on one axis of time and under one legend.

    Parameters
    ----------
    comparisons
        By title, the first on top.
    width
        Inches.
    transfers, numbers, unit
        As for `timeline`.

    Returns
    -------
    matplotlib.figure.Figure
        Not one of pyplot's: there is nothing to close.

    Raises
    ------
    ArgumentError
        If there is nothing to draw, something that is no `Comparison`, or no such width.
    UnknownNameError
        For an unknown unit.
    """
    from matplotlib.figure import Figure

    from pipesim.plot.task_boxes import legend_entries

    if not isinstance(comparisons, Mapping) or not comparisons:
        raise ArgumentError(
            f"overlay takes a mapping of titles to at least one comparison, got {comparisons!r}"
        )
    all_of = [checked(each, Comparison) for each in comparisons.values()]
    if (number(width) or 0.0) <= 0:
        raise ArgumentError(f"width must be inches > 0, got {width!r}")
    graphs = [each.predicted.graph for each in all_of]
    heights = [0.36 * rows(graph, transfers=transfers) for graph in graphs]
    height = 0.7 + sum(heights) + 0.22 * len(heights)
    whole = Figure(figsize=(width, height), layout="constrained")
    axes = whole.subplots(len(graphs), 1, sharex=True, squeeze=False, height_ratios=heights)
    stacked = axes[:, 0]
    drawn: dict[Op, str | None] = {}
    for ax, (title, each) in zip(stacked, comparisons.items(), strict=True):
        drawn |= _draw_comparison(ax, each, _latest(all_of), transfers, numbers, unit)
        _draw_heading(ax, each, title, 0.0)
        if ax is not stacked[-1]:
            ax.set_xlabel("")
    deepest = max(graphs, key=n_chunks)
    handles, labels = legend_entries(deepest, drawn, compared=True)
    options = legend_options(labels, width * 72)
    whole.legend(handles, labels, loc="outside upper center", **options)
    return whole


def timeline_html(timeline: Timeline) -> str:
    """Return the timeline as an inline figure, and a line of numbers."""
    from matplotlib.figure import Figure

    line = (
        f"{timeline.name}: makespan {format_time(timeline.makespan)}, bubble "
        f"{timeline.bubble_fraction:.1%}, {timeline.throughput:.4g} micro-batches/s"
    )
    if timeline.costs is not None:
        line += f", peak memory {format_bytes(float(timeline.peak_memory.max()))}"
    if not timeline.complete:
        line += f"; {int(timeline.ran.sum())} of {len(timeline)} tasks ran"
    whole, ax = sized(Figure, TWO_COLUMNS, timeline.n_devices)
    timeline.plot(ax=ax)
    return figure_html(whole, line) + note_html(line)


def comparison_html(comparison: Comparison) -> str:
    """Return the comparison as an inline figure, and a table of its operations."""
    from matplotlib.figure import Figure

    whole, ax = sized(Figure, TWO_COLUMNS, comparison.predicted.n_devices * COMPARED)
    comparison.plot(ax=ax)
    rows = [
        [
            f"{op} {LABELS[Op[str(op)]]}",
            str(int(row["count"])),
            format_time(row["predicted"]),
            format_time(row["measured"]),
            format_error(row["error"]),
        ]
        for op, row in comparison.by_op.iterrows()
    ]
    head = ["mean of each operation", "tasks", "predicted", "measured", "error"]
    return figure_html(whole, repr(comparison)) + table_html(head, rows)


def _latest(comparisons: Iterable[Comparison]) -> float:
    """Return where a time axis ends that all of them share."""
    return max(
        end_of_axis(each) for both in comparisons for each in (both.predicted, both.measured)
    )


def _draw_comparison(
    ax: Axes,
    comparison: Comparison,
    until: float,
    transfers: bool,
    numbers: bool,
    unit: str | None,
) -> dict[Op, str | None]:
    """Draw both timelines and their makespans; return the operations, each with its hatch."""
    from pipesim.plot import task_boxes as cells

    graph = comparison.predicted.graph
    sign, scale = time_unit(until, unit)
    rows_of_devices(ax, graph.n_devices, until * scale, sign)
    drawn: dict[Op, str | None] = {}
    for name, each, half, tint, style in (
        ("predicted", comparison.predicted, -1, TINT, cells.DASHES),
        ("measured", comparison.measured, 1, 0.0, "-"),
    ):
        where = lanes(graph, transfers=transfers, half=half)
        cells.draw_bubbles(ax, where, each.makespan * scale)
        drawn |= cells.draw_cells(
            ax, each, where, scale=scale, name=name, tint=tint, numbers=numbers
        )
        line = ax.axvline(
            each.makespan * scale, color=INK, linestyle=style, linewidth=0.8, zorder=1.5
        )
        line.set_gid(f"{name}:makespan")
    return drawn


def _draw_heading(ax: Axes, comparison: Comparison, title: str, height: float) -> None:
    """Put the title, both makespans and the error above the axes, or what there is room for."""
    predicted, measured = comparison.predicted.makespan, comparison.measured.makespan
    if not measured:
        set_title(ax, title, "nothing ran", height)
        return
    error = f"error {format_error(comparison.makespan_error)}"
    both = f"predicted {format_time(predicted)}, measured {format_time(measured)}, {error}"
    set_title(ax, title, both if fits(ax, title, both) else error, height)
