"""Draw timelines: when each task ran, a row a device; several below each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.ops import Op
from pipesim.plot.lanes import lanes, rows
from pipesim.plot.paper_figure import (
    ROW,
    add_legend,
    axes_or_new,
    check_drawable,
    end_of_axis,
    legend_options,
    set_device_rows,
    set_title,
    width_of,
)
from pipesim.plot.style import n_chunks
from pipesim.timeline.timeline import Timeline
from pipesim.utils.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Flags = NDArray[np.bool_]

#: Height of the title of a panel, and of legend and time axis of all (inches).
_TITLE, _AROUND = 0.22, 0.65


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

    Boxes are coloured by operation and carry the number of their micro-batch if it fits. Of
    several stages on one device, later ones are lighter. Grey is bubble. Tasks that began and
    did not end are dashed.

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
    numbers, legend
        Whether to draw micro-batch numbers, and a legend.
    unit
        Unit of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        No title by default.
    """
    graph = check_drawable(timeline, Timeline).graph
    sign, scale = time_unit(timeline.makespan, unit)
    ax = axes_or_new(ax, rows(graph, transfers=transfers))
    from pipesim.plot.task_boxes import legend_entries

    set_device_rows(ax, graph.n_devices, end_of_axis(timeline) * scale, sign)
    drawn = _draw_tasks(ax, timeline, scale, transfers, dependencies, numbers)
    height = 0.0
    if legend and drawn:
        unfinished = _is_unfinished(timeline)
        height = add_legend(ax, *legend_entries(graph, drawn, unfinished=unfinished))
    if title:
        set_title(ax, title, height=height)
    return ax


def panels(
    timelines: Mapping[str, Timeline],
    *,
    columns: int = 2,
    transfers: bool = False,
    dependencies: bool = False,
    numbers: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw timelines below each other, on one time axis and under one legend.

    Parameters
    ----------
    timelines
        Timelines by title, the first on top.
    columns
        Width of the figure in columns of a paper, 1 or 2.
    transfers, dependencies, numbers, unit
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
    ['gpipe', '1f1b']
    """
    if not isinstance(timelines, Mapping) or not timelines:
        raise ArgumentError(
            f"panels takes a mapping of titles to at least one timeline, got {timelines!r}"
        )
    items = [check_drawable(item, Timeline) for item in timelines.values()]
    width = width_of(columns)
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
    height = _AROUND + sum(heights) + _TITLE * len(items)
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
    if entries:
        options = legend_options(list(entries), width * 72)
        whole.legend([*entries.values()], [*entries], loc="outside upper center", **options)
    return whole


def _entries_of_all(timelines: list[Timeline], drawn: Mapping[Op, str | None]) -> dict[str, Any]:
    """Return handles of a legend by label; shades of chunks are those of the most chunks."""
    from pipesim.plot.overlap_frames import frame_entry
    from pipesim.plot.task_boxes import legend_entries

    deepest = max(timelines, key=lambda item: n_chunks(item.graph)).graph
    unfinished = any(map(_is_unfinished, timelines))
    handles, labels = legend_entries(deepest, drawn, unfinished=unfinished)
    entries: dict[str, Any] = dict(zip(labels, handles, strict=True))
    for item in timelines:
        entries |= frame_entry(item.graph)
    return entries


def _is_unfinished(timeline: Timeline) -> bool:
    """Return whether a task began and did not end."""
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
    numbers: bool,
) -> dict[Op, str | None]:
    """Draw tasks into axes whose limits are set; return the operations, each with its hatch."""
    from pipesim.plot import task_boxes

    task_lanes = lanes(timeline.graph, transfers=transfers, streams=_streams_to_draw(timeline))
    task_boxes.draw_bubbles(ax, task_lanes, timeline.makespan * scale)
    drawn = task_boxes.draw_boxes(ax, timeline, task_lanes, scale=scale, numbers=numbers)
    if dependencies:
        from pipesim.plot.dependency_arrows import draw_dependencies

        draw_dependencies(ax, timeline, task_lanes, scale=scale)
    return drawn
