"""Where the tasks of a graph stand in its figure: a column a clock cycle, a row a device.

The column of a task is its distance from the first, counted in tasks of compute streams. Messages
and collectives beside these stand in the gap between two columns, above each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.ancestors import Edges, ancestors
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import COMPUTE, EXCHANGES, OF_STAGES, RECVS, REORDERED, SENDS, TRANSFERS, Op
from pipesim.utils.csr import Ints

__all__ = ["CODES", "Arrow", "Layout", "layout"]

Floats = NDArray[np.float64]

#: Width and height of a node on a compute stream, its width where there are nodes beside it, and
#: the most of those; in columns and rows.
WIDTH, HEIGHT, NARROW = 0.64, 0.56, 0.54
SMALL_WIDTH, SMALL_HEIGHT = 0.3, 0.28
#: What nodes call operations, by operation and part; others have the operation's own letter.
CODES: dict[tuple[Op, int], str] = {
    **{(op, -1): ">" for op in SENDS},
    **{(op, -1): "<" for op in RECVS},
    (Op.DISPATCH, -1): "D",
    **{(Op.ALL_TO_ALL, part): name[0] for part, name in enumerate(EXCHANGES)},
    **{(Op.REORDER, EXCHANGES.index(name)): name[0].upper() for name in REORDERED},
    (Op.REDUCE_GRAD, -1): "RG",
    (Op.STEP, -1): "ST",
    (Op.UNSHARD, -1): "US",
}
#: Rows that the nodes in a gap share.
ROOM = 0.92


class Arrow(NamedTuple):
    """An arrow between two tasks.

    ``sort`` is ``"message"`` between devices, ``"data"`` on one device, or ``"order"`` of a stream.
    """

    sort: str
    before: int
    after: int


@dataclass(frozen=True)
class Layout:
    """Where the nodes are; arrays have one entry a node.

    Attributes
    ----------
    tasks
        Ids of the tasks that have a node.
    x, y, width, height
        Centre and size, in columns and rows.
    is_main
        Whether it is on a compute stream, in a column of its own.
    texts
        Of each node, as `pipesim.plot.dependencies` lists them.
    codes
        The texts without the number of the micro-batch, for small nodes.
    arrows
        All arrows.
    n_columns
        Number of columns.
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
    n_columns: int

    @property
    def most_in_a_gap(self) -> int:
        """The most nodes that stand above each other."""
        cells = np.stack([np.round(2 * self.x), np.round(self.y)])[:, ~self.is_main]
        return int(np.unique(cells, axis=1, return_counts=True)[1].max(initial=1))


def layout(graph: TaskGraph, *, messages: bool, order: bool) -> Layout:
    """Place the tasks of a graph.

    Parameters
    ----------
    graph
        What is drawn.
    messages
        Whether messages are nodes; else an arrow leads from what makes the content of each to what
        needs it.
    order
        Whether there are arrows for the order of compute streams.
    """
    is_message = graph.is_op(TRANSFERS)
    main = graph.is_op(COMPUTE) | (graph.on_compute & (messages | ~is_message))
    shown = main | ~is_message | messages
    column = _columns(graph, main)
    tasks = np.flatnonzero(shown)
    x, y = column.astype(np.float64), graph.device.astype(np.float64)
    height = np.where(main, HEIGHT, SMALL_HEIGHT)
    beside = np.flatnonzero(shown & ~main)
    x[beside] = _gaps(graph, column, beside)
    _stack(graph, beside, x, y, height)
    several = len(np.unique(np.stack([graph.device, graph.stage]), axis=1).T) > graph.n_devices
    return Layout(
        tasks=tasks,
        x=x[tasks],
        y=y[tasks],
        width=np.where(main, NARROW if len(beside) else WIDTH, SMALL_WIDTH)[tasks],
        height=height[tasks],
        is_main=main[tasks],
        texts=[_text(graph.task(task), several) for task in tasks.tolist()],
        codes=[_code(graph.task(task)) for task in tasks.tolist()],
        arrows=_arrows(graph, shown, main, order),
        n_columns=int(column[main].max(initial=-1)) + 1,
    )


def _columns(graph: TaskGraph, main: NDArray[np.bool_]) -> Ints:
    """Return the column of each task; of those that have none, the last before it, or -1."""
    column = np.full(len(graph), -1, dtype=np.int64)
    waits = graph.precedence
    for task in range(len(graph)):
        needed = waits[task]
        last = int(column[needed].max(initial=-1))
        column[task] = last + 1 if main[task] else last
    return column


def _gaps(graph: TaskGraph, column: Ints, beside: Ints) -> Floats:
    """Return the gap of each node beside the columns: a RECV right before what needs it."""
    x = column[beside] + 0.5
    needs = graph.dependencies
    consumer = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(consumer, needs.values, column[needs.rows])
    for k, task in enumerate(beside.tolist()):
        if graph.op[task] in RECVS and consumer[task] < np.iinfo(np.int64).max:
            x[k] = max(x[k], consumer[task] - 0.5)
        elif len(needs[task]):
            x[k] = column[needs[task]].max() + 0.5
    return x


def _stack(graph: TaskGraph, beside: Ints, x: Floats, y: Floats, height: Floats) -> None:
    """Put the nodes in one gap above each other: those to and from devices above come first."""
    peer = graph.device.astype(np.int64)
    paired = np.flatnonzero(graph.pair >= 0)
    peer[paired] = graph.device[graph.pair[paired]]
    cells: dict[tuple[int, float], list[int]] = {}
    for task in beside.tolist():
        cells.setdefault((int(graph.device[task]), float(x[task])), []).append(task)
    for (device, _), tasks in cells.items():
        tasks.sort(key=lambda task: (int(np.sign(peer[task] - device)), int(peer[task]), task))
        size = ROOM / len(tasks)
        alone = len(tasks) == 1
        for place, task in enumerate(tasks):
            offset = np.sign(peer[task] - device) * ROOM / 4
            y[task] = device + (offset if alone else size * (place + 0.5) - ROOM / 2)
            height[task] = min(SMALL_HEIGHT, 0.86 * size)


def _arrows(
    graph: TaskGraph, shown: NDArray[np.bool_], main: NDArray[np.bool_], order: bool
) -> list[Arrow]:
    """Return the arrows: data through what is not shown, and the order of compute streams.

    Data on one device is left out where other arrows imply it.
    """
    sources: list[set[int]] = []  # of each task, the nodes whose data it has
    data: list[Arrow] = []
    for task in range(len(graph)):
        needed = graph.dependencies[task].tolist()
        if graph.op[task] in RECVS:
            needed.append(int(graph.pair[task]))
        before = set().union(*(sources[other] for other in needed))
        sources.append({task} if shown[task] else before)
        for other in sorted(before) if shown[task] else ():
            across = graph.device[other] != graph.device[task]
            data.append(Arrow("message" if across else "data", other, task))
    queue = graph.queue_predecessor
    queued = np.flatnonzero(main & (queue >= 0)) if order else np.empty(0, dtype=np.int64)
    steps = [Arrow("order", _shown_before(queue, shown, task), task) for task in queued.tolist()]
    steps = [step for step in steps if step.before >= 0]
    there = {arrow[1:] for arrow in data}
    every = data + [step for step in steps if step[1:] not in there]
    ends = np.array([arrow[1:] for arrow in every], dtype=np.int64).reshape(-1, 2).T
    _, is_implied = ancestors(Edges(*ends), len(graph))
    kept = [
        arrow
        for arrow, extra in zip(data, is_implied.tolist()[: len(data)], strict=True)
        if arrow.sort == "message" or not extra
    ]
    there = {arrow[1:] for arrow in kept}
    return kept + [step for step in steps if step[1:] not in there]


def _shown_before(queue: Ints, shown: NDArray[np.bool_], task: int) -> int:
    """Return the last node before a task on its stream, or -1."""
    before = int(queue[task])
    while before >= 0 and not shown[before]:
        before = int(queue[before])
    return before


def _text(task: Task, several: bool) -> str:
    """Return a node's text: code and micro-batch; before them the stage, of several.

    Messages and exchanges have no stage, which their neighbours have.
    """
    number = "" if task.microbatch is None else str(task.microbatch)
    if task.op in TRANSFERS or task.op == Op.ALL_TO_ALL:
        return f"{_code(task)}{number}"
    stage = str(task.stage) if several else ""
    # Of a reduction after each group of micro-batches, the number is not in the text.
    return f"{stage}{_code(task)}{'' if task.op in OF_STAGES else number}"


def _code(task: Task) -> str:
    """Return what a node calls an operation; a bucket has its number."""
    if task.op == Op.REDUCE_GRAD and task.part >= 0:
        return f"r{task.part}"
    part = task.part if task.op in (Op.ALL_TO_ALL, Op.REORDER) else -1
    return CODES.get((task.op, part), task.op.name)
