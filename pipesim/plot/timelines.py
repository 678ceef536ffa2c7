"""Draw a timeline: when each task ran, a row a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesim.plot.lanes import lanes, rows
from pipesim.plot.paper_figure import (
    add_legend,
    axes_or_new,
    check_drawable,
    end_of_axis,
    set_device_rows,
    set_title,
)
from pipesim.plot.style import time_unit
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["timeline"]


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
        Whether to draw messages under each device, a line a copy stream. A tick is a message that
        takes no time on its link. Messages on the compute stream (``overlap=False``) are always
        drawn there.
    dependencies
        Whether to draw an arrow for each output or gradient that another device needs.
    numbers, legend
        Whether to draw micro-batch numbers, and a legend.
    unit
        Unit of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        No title by default.

    Raises
    ------
    ArgumentError
        If ``timeline`` is no `Timeline`, or ``ax`` no Axes.
    UnknownNameError
        For an unknown unit.
    """
    graph = check_drawable(timeline, Timeline).graph
    sign, scale = time_unit(timeline.makespan, unit)
    ax = axes_or_new(ax, rows(graph, transfers=transfers))
    from pipesim.plot import task_boxes

    set_device_rows(ax, graph.n_devices, end_of_axis(timeline) * scale, sign)
    task_lanes = lanes(graph, transfers=transfers)
    task_boxes.draw_bubbles(ax, task_lanes, timeline.makespan * scale)
    drawn = task_boxes.draw_boxes(ax, timeline, task_lanes, scale=scale, numbers=numbers)
    if dependencies:
        from pipesim.plot.dependency_arrows import draw_dependencies

        draw_dependencies(ax, timeline, task_lanes, scale=scale)
    height = 0.0
    if legend and drawn:
        unfinished = len(timeline.frame) > int(timeline.ran.sum())
        height = add_legend(ax, *task_boxes.legend_entries(graph, drawn, unfinished=unfinished))
    if title:
        set_title(ax, title, height=height)
    return ax
