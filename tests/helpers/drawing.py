"""Timelines of whole seconds as text, for comparison with grids that were drawn by hand."""

from __future__ import annotations

import re
import textwrap

import numpy as np

import pipesim as ps
from pipesim.graph import Task
from pipesim.ops import EXCHANGES, part_letter


def draw(timeline: ps.Timeline, *, transfers: bool = True, rows: str = "") -> str:
    """Return a row a stream and a cell a second: ``F0`` while it runs, ``..`` while nothing does.

    Cells carry the stage where a device holds several. Messages are drawn by their letter, ``F``
    or ``B``, since the stream says who sends or receives; on streams of several uses (``compute``,
    ``copy``) they are ``>F0`` where sent and ``<F0`` where received. ``R1`` reduces bucket 1,
    ``k0`` exchanges the keys of micro-batch 0, ``US`` gathers parameters, ``U0`` those for
    micro-batch 0. Tasks that take no time do not show. ``rows`` keeps the rows whose label matches
    it.
    """
    graph = timeline.graph
    places = np.stack([graph.kinds.replica, graph.kinds.device, graph.kinds.stage])
    homes = np.unique(places, axis=1)
    several = np.unique(homes[:2], axis=1).shape[1] < homes.shape[1]
    width = round(timeline.makespan)
    drawn = []
    order = sorted(enumerate(graph.streams), key=lambda s: (s[1][0], s[1][1] != "compute"))
    for number, (device, stream) in order:
        name = f"{device}" if stream == "compute" else f"{device} {stream}"
        if (stream != "compute" and not transfers) or not re.search(rows, name):
            continue
        cells = [".."] * width
        for task in graph.queues[number]:
            start, end = timeline.start[task], timeline.end[task]
            assert start == round(start), f"{graph.task(task)} starts at {start}"
            assert end == round(end), f"{graph.task(task)} ends at {end}"
            cells[round(start) : round(end)] = [_cell(graph.task(int(task)), several)] * round(
                end - start
            )
        drawn.append((name, cells))
    pad = max(len(cell) for _, cells in drawn for cell in cells)
    label = max(len(name) for name, _ in drawn)
    return "\n".join(
        f"{name:<{label}} | " + " ".join(f"{cell:<{pad}}" for cell in cells).rstrip()
        for name, cells in drawn
    )


def draw_replica(timeline: ps.Timeline, devices: str = "0") -> str:
    """Draw the compute and collective streams of some devices, such as ``"01"``."""
    return draw(timeline, rows=f"^[{devices}]( collective)?$")


def _cell(task: Task, several: bool) -> str:
    letter = task.op.name.removeprefix("SEND_").removeprefix("RECV_")
    if letter == "REDUCE_GRAD":
        return "RG" if task.part < 0 else f"R{task.part}"
    if letter == "ALL_TO_ALL":
        number = "" if task.microbatch is None else task.microbatch
        return f"{part_letter(task.op, task.part)}{number}"
    if letter == "DISPATCH":
        return f"D{task.microbatch}"
    if letter == "REORDER":
        return f"{EXCHANGES[task.part][0].upper()}{task.microbatch}"
    stage = str(task.stage) if several else ""
    if letter == "UNSHARD":
        return "US" if task.part < 0 else f"{stage}U{task.microbatch}"
    if letter == "STEP":
        return "ST"
    end = ""
    if task.stream in ("compute", "copy") and task.op.name != letter:
        end = ">" if task.op.name.startswith("SEND") else "<"
    return f"{end}{stage}{letter}{task.microbatch}"


def grid(text: str) -> str:
    """Return a drawing as `draw` would print it: no indentation, cells set apart evenly."""
    rows = [line.split("|") for line in textwrap.dedent(text).strip().splitlines()]
    pad = max(len(cell) for _, cells in rows for cell in cells.split())
    label = max(len(label.strip()) for label, _ in rows)
    assert len({len(cells.split()) for _, cells in rows}) == 1, "rows differ in length"
    return "\n".join(
        f"{label_.strip():<{label}} | "
        + " ".join(f"{cell:<{pad}}" for cell in cells.split()).rstrip()
        for label_, cells in rows
    )


def times(timeline: ps.Timeline, action: str) -> tuple[float, float]:
    """Return start and end of the task whose action prints as ``action``."""
    graph = timeline.graph
    (task,) = np.flatnonzero([str(graph.task(k)) == action for k in range(len(graph))])
    return float(timeline.start[task]), float(timeline.end[task])
