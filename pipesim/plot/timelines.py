"""Draw timelines, a row a device: when each task ran, and predicted over measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.compare import Comparison
from pipesim.analysis.prediction_interval import ends_text
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.plot.figure_style import Inches, current_style
from pipesim.plot.palette import INK, format_error, n_chunks
from pipesim.plot.paper_figure import (
    ROW,
    LegendPlace,
    add_legend,
    axes_or_new,
    check_drawable,
    end_of_axis,
    set_device_rows,
    set_title,
    titles_fit,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import Positive, checked
from pipesim.utils.texts import format_time, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Positions of tasks: rows of devices, and the lanes in them

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Rows of a device with its transfers.
WITH_TRANSFERS = 1.9


@dataclass(frozen=True)
class TaskLanes:
    """Lane of each task, in rows: centre ``y`` and ``height``; ``y`` is NaN for tasks left out.

    ``bands`` holds centre and height of each device's compute lane, shape ``(n_devices, 2)``.
    """

    y: Floats
    height: Floats
    bands: Floats


def rows(graph: TaskGraph, *, transfers: bool) -> float:
    """Return the number of rows of all devices: more if transfers have their own lanes."""
    return graph.n_devices * (WITH_TRANSFERS if _has_copies(graph, transfers) else 1.0)


def lanes(
    graph: TaskGraph, *, transfers: bool, half: int = 0, streams: Flags | None = None
) -> TaskLanes:
    """Return the lanes of a timeline.

    With ``transfers``, copy streams have lanes: all, or those that ``streams`` marks, shape
    ``(len(graph.streams),)``. ``half`` is the part of a device's row: -1 the upper half, 1 the
    lower half, 0 the whole row.
    """
    if _has_copies(graph, transfers):
        return _with_copies(graph, 0.23 * half, 0.48 if half else 1.0, streams)
    return _one_lane(graph, 0.2 * half, 0.36 if half else 0.8)


def _has_copies(graph: TaskGraph, transfers: bool) -> bool:
    return transfers and not graph.on_compute.all()


def _one_lane(graph: TaskGraph, offset: float, height: float) -> TaskLanes:
    """Put compute streams into one lane a device, ``offset`` rows below the middle of its row."""
    centres = np.arange(graph.n_devices) + offset
    return TaskLanes(
        y=np.where(graph.on_compute, centres[graph.device], np.nan),
        height=np.full(len(graph), height),
        bands=np.column_stack([centres, np.full_like(centres, height)]),
    )


def _with_copies(graph: TaskGraph, offset: float, room: float, streams: Flags | None) -> TaskLanes:
    """Put compute streams on top, and below them a thin lane for each of the ``streams``.

    All lanes of a device take ``room`` rows, ``offset`` rows below the middle of its row.
    """
    compute = _one_lane(graph, offset - 0.17 * room, 0.5 * room)
    copy_streams: list[list[int]] = [[] for _ in range(graph.n_devices)]
    for stream, (device, name) in enumerate(graph.streams):
        if name != "compute" and (streams is None or streams[stream]):
            copy_streams[device].append(stream)
    lane_height = 0.3 * room / max(1, *map(len, copy_streams))
    y = np.full(len(graph.streams), np.nan)
    for device, indices in enumerate(copy_streams):
        y[indices] = device + offset + 0.11 * room + lane_height * (np.arange(len(indices)) + 0.5)
    return TaskLanes(
        y=np.where(graph.on_compute, compute.y, y[graph.stream]),
        height=np.where(graph.on_compute, compute.height, lane_height * 0.86),
        bands=compute.bands,
    )


# Timelines


#: Height of the title of a panel, and of legend and time axis of all (inches).
_TITLE, _AROUND = 0.22, 0.65


@checked
def timeline(
    timeline: Timeline,
    *,
    ax: Axes | None = None,
    transfers: bool = False,
    dependencies: bool = False,
    numbers: bool | Positive = True,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw when each task ran, as papers do: a row a device, device 0 on top.

    Boxes are coloured by operation and carry the number of their micro-batch. Of several stages on
    one device, later ones are lighter. Grey is bubble. Tasks that began and did not end are dashed.

    Parameters
    ----------
    timeline
        Simulated or measured, complete or not.
    ax
        Axes to draw into; its limits are set. New axes by default.
    transfers
        Whether to draw messages under each device, a line a copy stream. Streams whose messages
        take no time have no line, unless no message takes time. A tick is a message that takes no
        time. Messages on the compute stream (``overlap=False``) are always drawn there.
    dependencies
        Whether to draw an arrow for each output or gradient that another device needs.
    numbers
        Whether to draw micro-batch numbers, or their smallest size (points; 5 by default). Where
        they do not fit, every second, fifth, ... micro-batch has them, in the whole figure.
    legend
        Whether to draw a legend, or where: ``"top"``, ``"bottom"`` or ``"right"``.
    height
        Height of the new figure (inches); by default it suits the rows.
    unit
        Unit of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        No title by default.

    Warns
    -----
    LegibilityWarning
        When drawn, if numbers do not fit, of every few micro-batches neither.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    graph = timeline.graph
    sign, scale = time_unit(timeline.makespan, unit)
    ax = axes_or_new(ax, rows(graph, transfers=transfers), height)
    from pipesim.plot.task_boxes import legend_entries

    set_device_rows(ax, graph.n_devices, end_of_axis(timeline) * scale, sign)
    drawn = _draw_tasks(ax, timeline, scale, transfers, dependencies, numbers)
    entries = legend_entries(graph, drawn, unfinished=_is_unfinished(timeline))
    above = add_legend(ax, *entries, legend)
    if title:
        set_title(ax, title, height=above)
    return ax


@checked
def panels(
    timelines: Mapping[str, Timeline],
    *,
    columns: int | None = None,
    height: Inches | None = None,
    transfers: bool = False,
    dependencies: bool = False,
    numbers: bool | Positive = True,
    legend: bool | LegendPlace = True,
    unit: str | None = None,
) -> Figure:
    """Draw timelines below each other, on one time axis and under one legend.

    Parameters
    ----------
    timelines
        Timelines by title, the first on top.
    columns
        Width of the figure in columns, 1 or 2; by default that of the style, or else 2.
    height
        Height of the figure (inches); by default it suits the rows.
    transfers, dependencies, numbers, legend, unit
        As for `timeline`.

    Returns
    -------
    matplotlib.figure.Figure
        A pyplot figure. Its axes are in the order of ``timelines``.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim import plot
    >>> costs = ps.Costs(forward=1, backward=2)
    >>> graphs = {name: ps.lower(ps.schedule(name, 4, 8)) for name in ("gpipe", "1f1b")}
    >>> steps = {name: ps.simulate(graph, costs) for name, graph in graphs.items()}
    >>> fig = plot.panels(steps)
    >>> [ax.get_title("left") for ax in fig.axes]
    ['GPipe', '1F1B']
    """
    if not isinstance(timelines, Mapping) or not timelines:
        raise ArgumentError(
            f"panels takes a mapping of titles to at least one timeline, got {timelines!r}"
        )
    items = [check_drawable(item, Timeline) for item in timelines.values()]
    width = current_style().width(columns)
    end = max(map(end_of_axis, items))
    sign, scale = time_unit(end, unit)
    from pipesim.utils.packages import pyplot as plt

    lasting = [_lasting_transfers(item).any() for item in items]
    # A panel without messages that take time has no lanes for them beside one that has.
    with_lanes = [transfers and bool(has or not any(lasting)) for has in lasting]
    heights = [
        ROW * rows(item.graph, transfers=lanes_too)
        for item, lanes_too in zip(items, with_lanes, strict=True)
    ]
    height = height or current_style().height or _AROUND + sum(heights) + _TITLE * len(items)
    whole = plt.figure(figsize=(width, height), layout="constrained")
    axes = whole.subplots(len(items), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    drawn: dict[Op, str | None] = {}
    for ax, lanes_too, (title, item) in zip(axes, with_lanes, timelines.items(), strict=True):
        set_device_rows(ax, item.graph.n_devices, end * scale, sign if ax is axes[-1] else "")
        drawn |= _draw_tasks(ax, item, scale, lanes_too, dependencies, numbers)
        set_title(ax, title)
        if ax is not axes[-1]:
            ax.set_xlabel("")
    entries = _entries_of_all(items, drawn)
    add_legend(whole, [*entries.values()], [*entries], legend)
    return whole


def _entries_of_all(timelines: list[Timeline], drawn: Mapping[Op, str | None]) -> dict[str, Any]:
    """Return handles of a legend by label; shades of chunks are those of the most chunks."""
    from pipesim.plot.task_boxes import frame_entry, legend_entries

    deepest = max(timelines, key=lambda item: n_chunks(item.graph)).graph
    unfinished = any(map(_is_unfinished, timelines))
    handles, labels = legend_entries(deepest, drawn, unfinished=unfinished)
    entries: dict[str, Any] = dict(zip(labels, handles, strict=True))
    for item in timelines:
        entries |= frame_entry(item.graph)
    return entries


def _is_unfinished(timeline: Timeline) -> bool:
    return len(timeline.frame) > int(timeline.ran.sum())


def _streams_to_draw(timeline: Timeline) -> Flags:
    """Return whether each copy stream has a lane; shape ``(len(graph.streams),)``.

    Ticks of messages between stages would distract from collectives, if these alone take time.
    """
    streams = np.zeros(len(timeline.graph.streams), bool)
    lasting = _lasting_transfers(timeline)
    streams[timeline.graph.stream[lasting]] = True
    return streams if lasting.any() else ~streams


def _lasting_transfers(timeline: Timeline) -> Flags:
    """Return whether a task is on a copy stream and took time; shape ``(len(graph),)``."""
    took_none = timeline.end <= timeline.start  # False for tasks that did not end
    return ~timeline.graph.on_compute & ~took_none


def _draw_tasks(
    ax: Axes,
    timeline: Timeline,
    scale: float,
    transfers: bool,
    dependencies: bool,
    numbers: bool | float,
) -> dict[Op, str | None]:
    """Draw tasks into axes whose limits are set; return the operations, each with its hatch."""
    from pipesim.plot import task_boxes

    task_lanes = lanes(timeline.graph, transfers=transfers, streams=_streams_to_draw(timeline))
    task_boxes.draw_bubbles(ax, task_lanes, timeline.makespan * scale)
    drawn = task_boxes.draw_boxes(ax, timeline, task_lanes, scale=scale, numbers=numbers)
    if dependencies:
        task_boxes.draw_dependencies(ax, timeline, task_lanes, scale=scale)
    return drawn


# Predicted timelines over measured ones

#: Share of white in the colours of a prediction; its outline has the full colour.
TINT = 0.6
#: Height of a device in a comparison, in rows of a timeline.
ROWS_PER_DEVICE = 1.5


@checked
def comparison(
    comparison: Comparison,
    *,
    ax: Axes | None = None,
    transfers: bool = False,
    numbers: bool | Positive = True,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
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
    ax, transfers, numbers, legend, height, unit
        As for `timeline`.
    title
        By default the measured timeline's name.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    graph = comparison.predicted.graph
    ax = axes_or_new(ax, ROWS_PER_DEVICE * rows(graph, transfers=transfers), height)
    drawn = _draw_comparison(ax, comparison, _end_of_axes([comparison]), transfers, numbers, unit)
    from pipesim.plot.task_boxes import legend_entries

    above = add_legend(ax, *legend_entries(graph, drawn, compared=True), legend)
    _draw_heading(ax, comparison, comparison.measured.name if title is None else title, above)
    return ax


@checked
def overlay(
    comparisons: Mapping[str, Comparison],
    *,
    width: Inches | None = None,
    height: Inches | None = None,
    transfers: bool = False,
    numbers: bool | Positive = True,
    legend: bool | LegendPlace = True,
    unit: str | None = None,
) -> Figure:
    """Draw comparisons below each other, on one time axis and under one legend.

    Parameters
    ----------
    comparisons
        Comparisons by title, the first on top.
    width
        Width of the figure (inches); by default two columns.
    height
        Height of the figure (inches); by default it suits the rows.
    transfers, numbers, legend, unit
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
    graphs = [item.predicted.graph for item in items]
    heights = [0.36 * rows(graph, transfers=transfers) for graph in graphs]
    style = current_style()
    height = height or style.height or 0.7 + sum(heights) + 0.22 * len(heights)
    whole = Figure(figsize=(width or style.width(None), height), layout="constrained")
    axes = whole.subplots(len(graphs), 1, sharex=True, squeeze=False, height_ratios=heights)
    stacked = axes[:, 0]
    drawn: dict[Op, str | None] = {}
    for ax, (title, item) in zip(stacked, comparisons.items(), strict=True):
        drawn |= _draw_comparison(ax, item, _end_of_axes(items), transfers, numbers, unit)
        _draw_heading(ax, item, title, 0.0)
        if ax is not stacked[-1]:
            ax.set_xlabel("")
    deepest = max(graphs, key=n_chunks)
    add_legend(whole, *legend_entries(deepest, drawn, compared=True), legend)
    return whole


def _end_of_axes(comparisons: Iterable[Comparison]) -> float:
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
    numbers: bool | float,
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
    forecast = f"predicted {format_time(predicted)}{ends_text(comparison.predicted)}"
    makespans = f"{forecast}, measured {format_time(measured)}, {error}"
    set_title(ax, title, makespans if titles_fit(ax, title, makespans) else error, height)
