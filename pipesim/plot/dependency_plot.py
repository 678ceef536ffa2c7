"""Draw the dependencies between the tasks of a small graph.

With a row a device, columns are clock cycles: the column of a task is its distance from the first
task, counted in tasks of compute streams. With a row a micro-batch, each operation of a stage has a
column. Messages and collectives on other streams are side nodes: they are stacked in the gap
between two columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_name
from pipesim.graph.graph import TaskGraph
from pipesim.graph.precedence import Edges, ancestors
from pipesim.graph.tasks import Task
from pipesim.ops import (
    COMPUTE,
    EXCHANGES,
    OF_STAGES,
    RECVS,
    REORDERED,
    SENDS,
    TRANSFERS,
    Action,
    Op,
    is_expert_exchange,
    part_letter,
)
from pipesim.plot.figure_style import Inches
from pipesim.plot.paper_figure import (
    LegendPlace,
    add_legend,
    axes_or_new,
    label,
    set_device_rows,
    set_title,
    thinned_ticks,
)
from pipesim.utils.checks import checked
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Positions of the tasks

Floats = NDArray[np.float64]

#: Width and height of a node on a compute stream, and its width if the figure has side nodes; in
#: columns and rows. Then the width and the largest height of a side node.
WIDTH, HEIGHT, NARROW = 0.64, 0.56, 0.54
SMALL_WIDTH, SMALL_HEIGHT = 0.3, 0.28
#: Codes of operations in nodes, by operation and part; others have the operation's own letter.
CODES: dict[tuple[Op, int], str] = {
    **{(op, -1): ">" for op in SENDS},
    **{(op, -1): "<" for op in RECVS},
    (Op.DISPATCH, -1): "D",
    **{(Op.ALL_TO_ALL, part): name[0] for part, name in enumerate(EXCHANGES)},
    **{(Op.REORDER, EXCHANGES.index(name)): name[0].upper() for name in REORDERED},
    (Op.REDUCE_GRAD, -1): "RG",
    (Op.STEP, -1): "ST",
    (Op.UNSHARD, -1): "US",
    (Op.GRAD_NORM, -1): "GN",
    **dict.fromkeys(((Op.UNSHARD, 0), (Op.UNSHARD, 1)), "US"),
    **dict.fromkeys(((Op.RESHARD, 0), (Op.RESHARD, 1)), "RS"),
    (Op.OFFLOAD, -1): "OF",
    (Op.RELOAD, -1): "RL",
}
#: Codes of operations whose nodes have a number.
NUMBERED_CODES: dict[Op, str] = {Op.REDUCE_GRAD: "r", Op.REDUCE_TIED: "t"}
#: Height of all side nodes in a gap together (rows).
ROOM = 0.92


class Arrow(NamedTuple):
    """An arrow between two tasks.

    ``sort`` is ``"message"`` between devices, ``"data"`` on one device, or ``"order"`` of a stream.
    """

    sort: str
    source: int
    target: int


@dataclass(frozen=True)
class GraphLayout:
    """Nodes and arrows of a figure; arrays have one entry a node.

    ``tasks`` are the ids of the tasks that have a node. ``x``, ``y``, ``width`` and ``height`` are
    in columns and rows. ``is_main`` tells a node in a column, on a compute stream, from a side
    node. ``texts`` are as `pipesim.plot.dependencies` lists them, ``codes`` without the number of
    the micro-batch, for small nodes. ``rows`` are the names of the rows; ``columns`` those of the
    columns, empty for clock cycles.
    """

    tasks: Ints
    x: Floats
    y: Floats
    width: Floats
    height: Floats
    is_main: NDArray[np.bool_]
    texts: list[str]
    codes: list[str]
    arrows: list[Arrow]
    rows: list[str]
    columns: list[str]

    @property
    def largest_stack(self) -> int:
        """The largest number of side nodes that are stacked in one gap."""
        gaps = np.stack([np.round(2 * self.x), np.round(self.y)])[:, ~self.is_main]
        return int(np.unique(gaps, axis=1, return_counts=True)[1].max(initial=1))


def lay_out(graph: TaskGraph, *, messages: bool, order: bool, by_microbatch: bool) -> GraphLayout:
    """Return the positions of a graph's nodes and arrows.

    With ``messages``, messages are nodes; else an arrow leads from the producer of each to its
    consumer. With ``order``, there are arrows for the order of compute streams. ``by_microbatch``
    makes a row of each micro-batch.
    """
    is_message = graph.is_op(TRANSFERS)
    main = graph.is_op(COMPUTE) | (graph.on_compute & (messages | ~is_message))
    shown = main | ~is_message | messages
    if by_microbatch:
        row, rows = _microbatch_rows(graph)
        column, columns = _operation_columns(graph, main, row)
    else:
        row, rows = graph.device, [str(device) for device in range(graph.n_devices)]
        column = _columns(graph, main)
        columns = []
    tasks = np.flatnonzero(shown)
    x, y = column.astype(np.float64), row.astype(np.float64)
    height = np.where(main, HEIGHT, SMALL_HEIGHT)
    side = np.flatnonzero(shown & ~main)
    x[side] = _gaps(graph, column, side)
    _stack(graph, side, x, y, height)
    several = len(np.unique(np.stack([graph.device, graph.stage]), axis=1).T) > graph.n_devices
    several = several or by_microbatch
    return GraphLayout(
        tasks=tasks,
        x=x[tasks],
        y=y[tasks],
        width=np.where(main, NARROW if len(side) else WIDTH, SMALL_WIDTH)[tasks],
        height=height[tasks],
        is_main=main[tasks],
        texts=[_text(graph.task(task), several) for task in tasks.tolist()],
        codes=[_code(graph.task(task)) for task in tasks.tolist()],
        arrows=_arrows(graph, shown, main, order, by_microbatch),
        rows=rows,
        columns=columns,
    )


def _microbatch_rows(graph: TaskGraph) -> tuple[Ints, list[str]]:
    """Return the row of each task, and the names of rows; tasks of whole stages are in the last."""
    has_own = graph.microbatch >= 0
    pairs = np.stack([graph.replica, graph.microbatch])
    lanes, of_task = np.unique(pairs[:, has_own], axis=1, return_inverse=True)
    replicas, numbers = lanes.tolist()
    row = np.full(len(graph), len(numbers))
    row[has_own] = of_task.ravel()
    is_unique = len(set(numbers)) == len(numbers)
    names = [
        f"{number}" if is_unique else f"{number} of replica {replica}"
        for replica, number in zip(replicas, numbers, strict=True)
    ]
    return row, names + ["all"] * (not has_own.all())


def _operation_columns(
    graph: TaskGraph, main: NDArray[np.bool_], row: Ints
) -> tuple[Ints, list[str]]:
    """Return the column of each task if an operation of a stage has a column, and their names.

    An operation has the last column in which it is before all that need it: R right before B. A
    task of a whole stage is below the last task that it needs, or behind one in its own row.
    """
    has_own = graph.microbatch >= 0
    needed = [
        [*graph.dependencies[task].tolist(), *([pair] if op in RECVS else [])]
        for task, (op, pair) in enumerate(zip(graph.op.tolist(), graph.pair.tolist(), strict=True))
    ]
    n_after = np.zeros(len(graph), dtype=np.int64)  # of the same micro-batch
    for task in range(len(graph) - 1, -1, -1):
        for other in needed[task]:
            if row[other] == row[task]:
                n_after[other] = max(n_after[other], n_after[task] + main[task])
    keys = np.stack([graph.stage, graph.op, graph.part, graph.peer_stage]).T
    distance: dict[tuple[int, ...], int] = {}
    for task in np.flatnonzero(main & has_own).tolist():
        key = tuple(keys[task].tolist())
        distance[key] = max(distance.get(key, 0), int(n_after[task]))
    ranked = sorted(distance, key=lambda key: (-distance[key], -key[0], *key[1:]))
    number = {key: place for place, key in enumerate(ranked)}
    column = np.full(len(graph), -1, dtype=np.int64)
    cells = set()
    for task in range(len(graph)):
        place = max((int(column[k] + (main[task] > has_own[k])) for k in needed[task]), default=-1)
        if main[task] and has_own[task]:
            place = number[tuple(keys[task].tolist())]
        while main[task] and (row[task], place) in cells:
            place += 1
        cells.add((row[task], place))
        column[task] = place
    return column, [str(Action(key[0], Op(key[1]), None, key[3], key[2])) for key in ranked]


def _columns(graph: TaskGraph, main: NDArray[np.bool_]) -> Ints:
    """Return the column of each task; for a task without one, the last column before it, or -1."""
    column = np.full(len(graph), -1, dtype=np.int64)
    precedence = graph.precedence
    for task in range(len(graph)):
        needed = precedence[task]
        last = int(column[needed].max(initial=-1))
        column[task] = last + 1 if main[task] else last
    return column


def _gaps(graph: TaskGraph, column: Ints, side: Ints) -> Floats:
    """Return the gap of each side node: that right before its consumer, for a RECV."""
    x = column[side] + 0.5
    needs = graph.dependencies
    consumer = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(consumer, needs.values, column[needs.rows])
    for k, task in enumerate(side.tolist()):
        if graph.op[task] in RECVS and consumer[task] < np.iinfo(np.int64).max:
            x[k] = max(x[k], consumer[task] - 0.5)
        elif len(needs[task]):
            x[k] = column[needs[task]].max() + 0.5
    return x


def _stack(graph: TaskGraph, side: Ints, x: Floats, y: Floats, height: Floats) -> None:
    """Stack the nodes in each gap: messages to and from devices above come first."""
    peer = graph.device.astype(np.int64)
    paired = np.flatnonzero(graph.pair >= 0)
    peer[paired] = graph.device[graph.pair[paired]]
    gaps: dict[tuple[int, float], list[int]] = {}
    for task in side.tolist():
        gaps.setdefault((int(y[task]), float(x[task])), []).append(task)
    for (row, _), tasks in gaps.items():
        sign = dict(zip(tasks, np.sign(peer - graph.device)[tasks].tolist(), strict=True))
        tasks.sort(key=lambda task: (sign[task], int(peer[task]), task))
        size = ROOM / len(tasks)
        alone = len(tasks) == 1
        for position, task in enumerate(tasks):
            offset = sign[task] * ROOM / 4
            y[task] = row + (offset if alone else size * (position + 0.5) - ROOM / 2)
            height[task] = min(SMALL_HEIGHT, 0.86 * size)


def _arrows(
    graph: TaskGraph,
    shown: NDArray[np.bool_],
    main: NDArray[np.bool_],
    order: bool,
    by_microbatch: bool,
) -> list[Arrow]:
    """Return the arrows: data, also through tasks without a node, and order of compute streams.

    Arrows for data on one device are left out if other arrows imply them. So are those for the
    order, if rows are micro-batches: they would cross many rows.
    """
    sources: list[set[int]] = []  # of each task, the nodes whose data it passes on
    data: list[Arrow] = []
    for task in range(len(graph)):
        needed = graph.dependencies[task].tolist()
        if graph.op[task] in RECVS:
            needed.append(int(graph.pair[task]))
        producers = set().union(*(sources[other] for other in needed))
        sources.append({task} if shown[task] else producers)
        for other in sorted(producers) if shown[task] else ():
            across = graph.device[other] != graph.device[task]
            data.append(Arrow("message" if across else "data", other, task))
    queue = graph.queue_predecessor
    queued = np.flatnonzero(main & (queue >= 0)) if order else np.empty(0, dtype=np.int64)
    steps = [Arrow("order", _previous_node(queue, shown, task), task) for task in queued.tolist()]
    steps = [step for step in steps if step.source >= 0]
    connected = {arrow[1:] for arrow in data}
    arrows = data + [step for step in steps if step[1:] not in connected]
    ends = np.array([arrow[1:] for arrow in arrows], dtype=np.int64).reshape(-1, 2).T
    _, is_implied = ancestors(Edges(*ends), len(graph))
    implied = {x[1:]: extra for x, extra in zip(arrows, is_implied.tolist(), strict=True)}
    kept = [x for x in data if x.sort == "message" or not implied[x[1:]]]
    connected = {arrow[1:] for arrow in kept}
    if by_microbatch:
        connected |= {pair for pair, extra in implied.items() if extra}
    return kept + [step for step in steps if step[1:] not in connected]


def _previous_node(queue: Ints, shown: NDArray[np.bool_], task: int) -> int:
    """Return the previous task with a node on a task's stream, or -1."""
    previous = int(queue[task])
    while previous >= 0 and not shown[previous]:
        previous = int(queue[previous])
    return previous


def _text(task: Task, several: bool) -> str:
    """Return a node's text: stage if its device has ``several``, code, micro-batch.

    Messages and exchanges have no stage; their neighbours have it.
    """
    number = "" if task.microbatch is None else str(task.microbatch)
    if task.op in TRANSFERS or task.op == Op.ALL_TO_ALL:
        return f"{_code(task)}{number}"
    stage = str(task.stage) if several else ""
    # The text of a reduction after each group of micro-batches leaves out the number.
    return f"{stage}{_code(task)}{'' if task.op in OF_STAGES else number}"


def _code(task: Task) -> str:
    """Return the code of a node's operation; a bucket or a group of tied stages has its number."""
    if task.op in NUMBERED_CODES and task.part >= 0:
        return f"{NUMBERED_CODES[task.op]}{task.part}"
    if is_expert_exchange(task.op, task.part):
        return f"x{part_letter(task.op, task.part)}"
    part = task.part if task.op in (Op.ALL_TO_ALL, Op.REORDER) else -1
    return CODES.get((task.op, part), task.op.name)


# The figure

#: Most tasks on compute streams of a graph that is drawn.
MOST_NODES = 300


@checked
def dependencies(
    graph: TaskGraph,
    *,
    ax: Axes | None = None,
    rows: str = "device",
    messages: str = "arrows",
    order: bool = True,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the dependencies of a small graph, as papers do (torchgpipe, arXiv 2004.09910).

    A row is a device, device 0 on top, in its colour. A column is a clock cycle: the distance from
    the first task, counted in tasks of compute streams. A node shows operation and micro-batch,
    ``F0``, and in front of them the stage if devices have several. Data on one device has an arrow
    only if other arrows do not imply it. ``rows="microbatch"`` has rows and columns as the paper's
    figure 2.

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
    rows
        - ``"device"``: as above.
        - ``"microbatch"``: a row is a micro-batch, and a column an operation of a stage, such as
          0F 1F 2F 2B 1B 0B. Colours are still those of devices, and a node shows its stage too.
          Tasks of whole stages, such as STEP, are in a last row. The order of a stream has an arrow
          only if other arrows do not imply it.
    messages
        ``"arrows"``: an arrow from the producer of a message to its consumer. ``"labels"``: the
        same, with the number of its micro-batch on it. ``"nodes"``: SEND (``>0``) and RECV
        (``<0``) are nodes.
    order
        Whether to draw the order of compute streams, dashed.
    legend, height, title
        As for `pipesim.plot.timeline`.

    Warns
    -----
    LegibilityWarning
        When drawn, if nodes have no room for their texts.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    check_name("messages", messages, ("arrows", "labels", "nodes"))
    by_microbatch = check_name("rows", rows, ("device", "microbatch")) == "microbatch"
    n_tasks = int(graph.on_compute.sum())
    if n_tasks > MOST_NODES:
        raise ArgumentError(
            f"a figure of dependencies has at most {MOST_NODES} tasks on compute streams, graph "
            f"{graph.name!r} has {n_tasks}; lower fewer micro-batches or devices, or draw when "
            "tasks run: ps.simulate(graph, costs).plot(dependencies=True)"
        )
    from pipesim.plot import graph_figure

    layout = lay_out(graph, messages=messages == "nodes", order=order, by_microbatch=by_microbatch)
    per_row = 1.7 if messages != "nodes" else max(2.0, 0.6 + 0.55 * layout.largest_stack)
    ax = axes_or_new(ax, per_row * len(layout.rows), height)
    set_device_rows(ax, len(layout.rows), 1.0, "")
    dx, n_columns = layout.width / 2 + 0.1, int(layout.x[layout.is_main].max(initial=-1)) + 1
    ax.set_xlim(
        min(-0.6, float((layout.x - dx).min(initial=0.0))),
        max(n_columns - 0.4, 0.6, float((layout.x + dx).max(initial=0.0))),
    )
    if by_microbatch:
        ax.set_xticks(range(len(layout.columns)), layout.columns)
        ax.set_yticks(range(len(layout.rows)), layout.rows)
        label(ax, "Stage and operation", "Micro-batch")
    else:
        ax.set_xticks(thinned_ticks(n_columns, 20))
        ax.set_xlabel("Clock cycle")
    graph_figure.draw_arrows(ax, graph, layout, labels=messages == "labels")
    graph_figure.draw_nodes(ax, graph, layout)
    handles = graph_figure.legend_handles(graph, layout, messages == "labels")
    above = add_legend(ax, list(handles.values()), list(handles), legend)
    if title:
        set_title(ax, title, height=above)
    return ax
