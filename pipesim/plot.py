"""Figures: timelines, predictions over measurements, memory over time, bars.

Every function draws into the axes that it is given, or else into a new pyplot figure two columns
wide, and returns the axes. None shows or saves anything; `save` does. matplotlib is imported when
something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipesim.compare import Comparison
from pipesim.errors import ArgumentError, check_name, number
from pipesim.graph import TaskGraph
from pipesim.html import figure_html, graph_html, note_html, schedule_html, table_html
from pipesim.ops import Op
from pipesim.page import (
    FONT,
    ONE_COLUMN,
    SMALL,
    TWO_COLUMNS,
    add_legend,
    axes_or_new,
    figure,
    fits,
    label,
    legend_options,
    rows_of_devices,
    save,
    set_title,
    sized,
    some_of,
)
from pipesim.style import (
    LABELS,
    PALETTE,
    byte_unit,
    chunks,
    format_bytes,
    format_error,
    format_time,
    shades,
    time_unit,
)
from pipesim.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ONE_COLUMN",
    "PALETTE",
    "TWO_COLUMNS",
    "bars",
    "comparison",
    "comparison_html",
    "figure",
    "graph_html",
    "memory",
    "overlay",
    "save",
    "schedule_html",
    "timeline",
    "timeline_html",
]

#: What a prediction mixes in of white; it is outlined in the full colour.
TINT = 0.6
#: Rows of a timeline that a device takes with its transfers, and in a comparison.
WITH_TRANSFERS, COMPARED = 1.9, 1.5
INK, DASHES = "#1C1C1C", (0, (3, 2))
_T = TypeVar("_T")


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
    graph = _checked(timeline, Timeline).graph
    sign, scale = time_unit(timeline.makespan, unit)
    copies = transfers and not graph.on_compute.all()
    ax = axes_or_new(ax, graph.n_devices * (WITH_TRANSFERS if copies else 1.0))
    from pipesim import cells

    rows_of_devices(ax, graph.n_devices, _until(timeline) * scale, sign)
    lanes = cells.with_transfers(graph) if copies else cells.one_lane(graph, 0.0, 0.8)
    cells.draw_bubbles(ax, lanes, timeline.makespan * scale)
    drawn = cells.draw_cells(ax, timeline, lanes, scale=scale, numbers=numbers)
    if dependencies:
        cells.draw_dependencies(ax, timeline, lanes, scale=scale)
    height = 0.0
    if legend and drawn:
        height = add_legend(ax, *_handles(graph, drawn))
    if title:
        set_title(ax, title, height=height)
    return ax


def comparison(
    comparison: Comparison,
    *,
    ax: Axes | None = None,
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
    ax, numbers, legend, unit
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
    graph = _checked(comparison, Comparison).predicted.graph
    ax = axes_or_new(ax, graph.n_devices * COMPARED)
    drawn = _draw_comparison(ax, comparison, _latest([comparison]), numbers, unit)
    height = add_legend(ax, *_handles(graph, drawn, compared=True)) if legend else 0.0
    _draw_heading(ax, comparison, comparison.measured.name if title is None else title, height)
    return ax


def overlay(
    comparisons: Mapping[str, Comparison],
    *,
    width: float = TWO_COLUMNS,
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
    numbers, unit
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

    if not isinstance(comparisons, Mapping) or not comparisons:
        raise ArgumentError(
            f"overlay takes a mapping of titles to at least one comparison, got {comparisons!r}"
        )
    all_of = [_checked(each, Comparison) for each in comparisons.values()]
    if (number(width) or 0.0) <= 0:
        raise ArgumentError(f"width must be inches > 0, got {width!r}")
    rows = [0.36 * each.predicted.graph.n_devices for each in all_of]
    height = 0.7 + sum(rows) + 0.22 * len(rows)
    whole = Figure(figsize=(width, height), layout="constrained")
    stacked = whole.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    drawn: dict[Op, str | None] = {}
    for ax, (title, each) in zip(stacked, comparisons.items(), strict=True):
        drawn |= _draw_comparison(ax, each, _latest(all_of), numbers, unit)
        _draw_heading(ax, each, title, 0.0)
        if ax is not stacked[-1]:
            ax.set_xlabel("")
    deepest = max((each.predicted.graph for each in all_of), key=_n_chunks)
    handles, labels = _handles(deepest, drawn, compared=True)
    options = legend_options(labels, width * 72)
    whole.legend(handles, labels, loc="outside upper center", **options)
    return whole


def memory(timeline: Timeline, *, ax: Axes | None = None, unit: str | None = None) -> Axes:
    """Draw the bytes that each device holds over time; later devices are lighter.

    Parameters
    ----------
    timeline
        With costs.
    ax
        Where to draw.
    unit
        Of the time axis, as for `timeline`.

    Raises
    ------
    ArgumentError
        If ``timeline`` or ``ax`` is something else.
    TimelineError
        If the timeline has no costs.
    UnknownNameError
        For an unknown unit.
    """
    held = _checked(timeline, Timeline).memory()
    sign, scale = time_unit(timeline.makespan, unit)
    size_sign, size = byte_unit(float(held["nbytes"].max()))
    ax = axes_or_new(ax, 6)
    from matplotlib import colormaps

    n_devices = timeline.n_devices
    few = n_devices <= 8
    styles: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))
    for device in range(n_devices):
        rows = held[held["device"] == device]
        time = np.append(rows["time"], timeline.makespan) * scale
        nbytes = np.append(rows["nbytes"], rows["nbytes"].iloc[-1]) / size
        (line,) = ax.step(
            time,
            nbytes,
            where="post",
            color=colormaps["viridis"](0.88 * device / max(1, n_devices - 1)),
            linestyle=styles[device % 4] if few else "-",
            linewidth=1.4 if few else 0.8,
            label=f"device {device}" if device in some_of(n_devices, 8) else "_",
        )
        line.set_gid(f"memory:{device}")
    ax.set_xlim(0, _until(timeline) * scale)
    ax.set_ylim(bottom=0)
    label(ax, f"Time ({sign})", f"Memory held ({size_sign})")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL,
              handlelength=2.4, borderaxespad=0.3)  # fmt: skip
    return ax


#: Title of each column of `pipesim.compare`, and how its values are written.
_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "makespan": ("Makespan", format_time),
    "relative": ("Makespan, relative to the first", lambda value: f"{value:.2f}"),
    "bubble_fraction": ("Bubble", lambda value: f"{value:.1%}"),
    "throughput": ("Throughput (micro-batches/s)", lambda value: f"{value:.4g}"),
    "peak_memory": ("Peak memory of the fullest device", format_bytes),
}


def bars(table: pd.DataFrame, *, ax: Axes | None = None, column: str = "makespan") -> Axes:
    """Draw a column of what `pipesim.compare` returns: a bar a schedule, the first on top.

    Parameters
    ----------
    table
        From `pipesim.compare`.
    ax
        Where to draw.
    column
        ``"makespan"``, ``"relative"``, ``"bubble_fraction"``, ``"throughput"`` or
        ``"peak_memory"``. A value that is not known has no bar and is marked ``n/a``.

    Raises
    ------
    ArgumentError
        If ``table`` or ``ax`` is something else, or the table is empty.
    UnknownNameError
        For an unknown column.
    """
    title, write = _COLUMNS[check_name("column", column, _COLUMNS)]
    if column not in getattr(table, "columns", ()) or not len(table):
        raise ArgumentError(
            f"bars takes a table from pipesim.compare with a column {column!r} and at least one "
            f"row, got {type(table).__name__}"
        )
    ax = axes_or_new(ax, len(table))
    values = table[column].to_numpy(float)
    drawn = ax.barh(np.arange(len(values)), np.nan_to_num(values), 0.7, color=PALETTE[Op.F])
    texts = ["n/a" if np.isnan(value) else write(value) for value in values.tolist()]
    ax.bar_label(drawn, texts, padding=3, fontsize=SMALL)
    ax.set_xlim(0, 1.12 * (np.nanmax(values) if (values > 0).any() else 1.0))
    ax.set_ylim(len(values) - 0.5, -0.5)
    label(ax, "", "")
    ax.set_yticks(np.arange(len(values)), [str(name) for name in table.index], fontsize=FONT)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines["bottom"].set_visible(False)
    set_title(ax, title)
    return ax


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


def _checked(what: object, kind: type[_T]) -> _T:
    """Return ``what`` if it is of the kind that is drawn."""
    if isinstance(what, kind):
        return what
    raise ArgumentError(f"cannot draw {what!r}: it is no {kind.__name__}")


def _until(timeline: Timeline) -> float:
    """Return the end of the time axis: right after the last event; 1 if nothing happened."""
    began = timeline.start[~np.isnan(timeline.start)]
    last = max(timeline.makespan, float(began.max(initial=0.0)))
    # Tasks that never ended need room to be seen.
    return last * (1.005 if timeline.complete else 1.05) or 1.0


def _latest(comparisons: Iterable[Comparison]) -> float:
    """Return where a time axis ends that all of them share."""
    return max(_until(each) for both in comparisons for each in (both.predicted, both.measured))


def _n_chunks(graph: TaskGraph) -> int:
    return 1 + int(chunks(graph.device, graph.stage).max(initial=0))


def _handles(
    graph: TaskGraph, drawn: Mapping[Op, str | None], *, compared: bool = False
) -> tuple[list[Any], list[str]]:
    """Return a legend's handles and labels: what is compared, operations, chunks."""
    from matplotlib.patches import Patch

    entries: list[tuple[Any, str]] = []
    if compared:
        entries += [
            (
                Patch(facecolor="#E6E6E6", edgecolor=INK, linewidth=0.7, linestyle=DASHES),
                "predicted",
            ),
            (Patch(facecolor="#A8A8A8", edgecolor=INK, linewidth=0.7), "measured"),
        ]
    for op in sorted(drawn):
        patch = Patch(facecolor=PALETTE[op], edgecolor="white", linewidth=0, hatch=drawn[op])
        entries.append((patch, LABELS[op]))
    last = _n_chunks(graph) - 1
    for chunk in dict.fromkeys((0, last)) if last else ():
        grey = shades(np.array([Op.STEP]), np.array([chunk]), deepest=last)[0]
        entries.append((Patch(facecolor=grey, linewidth=0), f"chunk {chunk}"))
    return [handle for handle, _ in entries], [text for _, text in entries]


def _draw_comparison(
    ax: Axes, comparison: Comparison, until: float, numbers: bool, unit: str | None
) -> dict[Op, str | None]:
    """Draw both timelines and their makespans; return the operations, each with its hatch."""
    from pipesim import cells

    graph = comparison.predicted.graph
    sign, scale = time_unit(until, unit)
    rows_of_devices(ax, graph.n_devices, until * scale, sign)
    drawn: dict[Op, str | None] = {}
    for name, each, offset, tint, style in (
        ("predicted", comparison.predicted, -0.2, TINT, DASHES),
        ("measured", comparison.measured, 0.2, 0.0, "-"),
    ):
        lanes = cells.one_lane(graph, offset, 0.36)
        cells.draw_bubbles(ax, lanes, each.makespan * scale)
        drawn |= cells.draw_cells(
            ax, each, lanes, scale=scale, name=name, tint=tint, numbers=numbers
        )
        line = ax.axvline(each.makespan * scale, color=INK, linestyle=style, linewidth=0.8)
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
