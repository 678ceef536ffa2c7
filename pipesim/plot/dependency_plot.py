"""Draw the dependencies between the tasks of a small graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesim.errors import ArgumentError, check_flag, check_name
from pipesim.graph.graph import TaskGraph
from pipesim.plot.graph_layout import lay_out
from pipesim.plot.paper_figure import (
    add_legend,
    axes_or_new,
    check_drawable,
    set_device_rows,
    set_title,
    thinned_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Most tasks on compute streams of a graph that is drawn.
MOST_NODES = 300


def dependencies(
    graph: TaskGraph,
    *,
    ax: Axes | None = None,
    messages: str = "arrows",
    order: bool = True,
    legend: bool = True,
    title: str | None = None,
) -> Axes:
    """Draw the dependencies of a small graph, as papers do (torchgpipe, arXiv 2004.09910).

    A row is a device, device 0 on top, in its colour. A column is a clock cycle: the distance from
    the first task, counted in tasks of compute streams. A node shows operation and micro-batch,
    ``F0``, and in front of them the stage if devices have several. Data on one device has an arrow
    only if other arrows do not imply it.

    ====== ============================= ==================================================
    text   operation                     node
    ====== ============================= ==================================================
    F0     F                             forward of micro-batch 0
    B0     B                             backward
    I0 W0  I, W                          backward for the input; for the weights
    R0     R                             recompute
    >0 <0  SEND_F, SEND_B; RECV_F,       a message is sent; received (``messages="nodes"``)
           RECV_B
    D0     DISPATCH                      keys are grouped by owner
    c0 k0  ALL_TO_ALL.counts, .keys      counts of keys, and keys, are exchanged
    v0 g0  ALL_TO_ALL.vectors,           vectors, and gradients of keys, are exchanged
           .gradients
    a      ALL_TO_ALL.accumulated        gradients of all micro-batches are exchanged
    V0     REORDER.vectors               vectors are put in the order of the input
    G0     REORDER.gradients             gradients of each key are summed
    RG r1  REDUCE_GRAD                   gradients are reduced; of bucket 1
    ST     STEP                          optimizer step
    US US0 UNSHARD                       weights are gathered
    RS0    RESHARD                       gathered weights are freed
    OF0    OFFLOAD, RELOAD               activations are copied to the host's memory, and back
    RL0
    t0     REDUCE_TIED                   gradients of tied stages are summed; of group 0
    GN     GRAD_NORM                     norm of all gradients
    ====== ============================= ==================================================

    Small nodes without room for the number of the micro-batch leave it out.

    Parameters
    ----------
    graph
        A graph with at most 300 tasks on compute streams.
    ax
        Axes to draw into; its limits are set. New axes by default.
    messages
        ``"arrows"``: an arrow from the producer of a message to its consumer. ``"labels"``: the
        same, with the number of its micro-batch on it. ``"nodes"``: SEND (``>0``) and RECV
        (``<0``) are nodes.
    order
        Whether to draw the order of compute streams, dashed.
    legend
        Whether to draw a legend.
    title
        No title by default.

    Warns
    -----
    LegibilityWarning
        When drawn, if nodes have no room for their texts.
    """
    graph = check_drawable(graph, TaskGraph)
    check_name("messages", messages, ("arrows", "labels", "nodes"))
    check_flag("order", order)
    check_flag("legend", legend)
    _check_size(graph)
    from pipesim.plot import graph_figure

    layout = lay_out(graph, messages=messages == "nodes", order=order)
    per_device = 1.7 if messages != "nodes" else max(2.0, 0.6 + 0.55 * layout.largest_stack)
    ax = axes_or_new(ax, per_device * graph.n_devices)
    set_device_rows(ax, graph.n_devices, 1.0, "")
    dx = layout.width / 2 + 0.1
    ax.set_xlim(
        min(-0.6, float((layout.x - dx).min(initial=0.0))),
        max(layout.n_columns - 0.4, 0.6, float((layout.x + dx).max(initial=0.0))),
    )
    ax.set_xticks(thinned_ticks(layout.n_columns, 20))
    ax.set_xlabel("Clock cycle")
    graph_figure.draw_arrows(ax, graph, layout, labels=messages == "labels")
    graph_figure.draw_nodes(ax, graph, layout)
    height = 0.0
    handles = graph_figure.legend_handles(graph, layout, messages == "labels")
    if legend and handles:
        height = add_legend(ax, list(handles.values()), list(handles))
    if title:
        set_title(ax, title, height=height)
    return ax


def _check_size(graph: TaskGraph) -> None:
    """Raise `ArgumentError` for a graph of more nodes than a figure has room for."""
    n_tasks = int(graph.on_compute.sum())
    if n_tasks > MOST_NODES:
        raise ArgumentError(
            f"a figure of dependencies has at most {MOST_NODES} tasks on compute streams, graph "
            f"{graph.name!r} has {n_tasks}; lower fewer micro-batches or devices, or draw when "
            "tasks run: ps.simulate(graph, costs).plot(dependencies=True)"
        )
