"""The document of a page: what it shows, as JSON, and its columns, in one compressed block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.critical_path import WaitReason
from pipesim.analysis.idle_gaps import Cause
from pipesim.errors import PipeError
from pipesim.graph.compute_tasks import compute_graph
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import (
    COLLECTIVES,
    COMPUTE,
    COPIES,
    EXPERT_EXCHANGES,
    PART_NAMES,
    RECVS,
    SEGMENTED,
    SENDS,
    Op,
)
from pipesim.plot.charts import LOOKS
from pipesim.plot.figure_style import current_style
from pipesim.plot.page.columns import ColumnWriter, Spec, graph_columns
from pipesim.plot.page.timeline_columns import (
    SimulationInputs,
    input_columns,
    timeline_columns,
    unit_costs,
)
from pipesim.plot.palette import outline
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

#: Arrangements of the panels of a page: below each other, or one at a time.
LAYOUTS = ("stack", "steps")
#: Version of the format; pages of other versions are not read.
FORMAT = 1


class Track(NamedTuple):
    """One of the timelines in a panel; ``role`` is "predicted", "measured" or ""."""

    role: str
    content: Timeline | Schedule | TaskGraph


class Panel(NamedTuple):
    """A row of devices: one timeline, or a predicted one over a measured one of the same tasks.

    ``variants`` are the same configuration with other numbers of micro-batches, by this number.
    """

    name: str
    tracks: Sequence[Track]
    variants: dict[int, Timeline]


def packed_document(title: str, layout: str, panels: Sequence[Panel]) -> bytes:
    """Return the document of a page in the zlib format.

    Decompressed, it is the length of a JSON text as 4 bytes, the text, and the columns.
    """
    writer = _DocumentWriter()
    listed = [writer.panel(panel) for panel in panels]
    document: Spec = {
        "format": FORMAT,
        "title": title,
        "layout": layout,
        "panels": listed,
        "graphs": writer.graphs,
        "timelines": writer.timelines,
        "ops": _ops(),
        "causes": [
            {
                "label": str(cause),
                "colour": current_style().palette[LOOKS[cause][0]],
                "hatch": bool(LOOKS[cause][1]),
            }
            for cause in Cause
        ],
        "reasons": [str(reason) for reason in WaitReason],
    }
    return writer.columns.packed(json.dumps(document, separators=(",", ":")).encode())


def _ops() -> list[Spec]:
    roles = dict.fromkeys(COMPUTE, "compute") | dict.fromkeys(COLLECTIVES, "collective")
    roles |= (
        dict.fromkeys(COPIES, "copy") | dict.fromkeys(SENDS, "send") | dict.fromkeys(RECVS, "recv")
    )
    style = current_style()
    return [
        {
            "name": op.name,
            "label": style.operations[op],
            "colour": style.palette[op],
            "outline": outline(style.palette[op]),
            "hatched": bool(style.hatches.get(op)),
            "role": roles[op],
            "parts": list(PART_NAMES.get(op, ())),
            "layer_parts": list(EXPERT_EXCHANGES) if op == Op.ALL_TO_ALL else [],
            "segmented": op in SEGMENTED,
        }
        for op in Op
    ]


class _DocumentWriter:
    """Graphs and timelines of a document; a graph that several timelines share is stored once."""

    def __init__(self) -> None:
        self.columns = ColumnWriter()
        self.graphs: list[Spec] = []
        self.timelines: list[Spec] = []
        self._written: list[TaskGraph] = []

    def panel(self, panel: Panel) -> Spec:
        first = panel.tracks[0].content
        spec: Spec = {"name": panel.name, "tracks": []}
        for track in panel.tracks:
            content = track.content
            if isinstance(content, Schedule):
                number = self._schedule(content)
            elif isinstance(content, TaskGraph):
                number = self._unsimulated(content, content.levels, "level", "")
            else:  # timelines of one panel have the same tasks
                graph = first.graph if isinstance(first, Timeline) else content.graph
                number = self._timeline(content, graph)
            spec["tracks"].append({"role": track.role, "timeline": number})
        if panel.variants:
            spec["variants"] = [
                {"n_microbatches": count, "timeline": self._timeline(variant, variant.graph)}
                for count, variant in sorted(panel.variants.items())
            ]
        return spec

    def _graph(self, graph: TaskGraph) -> int:
        for number, other in enumerate(self._written):
            if other is graph:
                return number
        self._written.append(graph)
        self.graphs.append(graph_columns(self.columns, graph))
        return len(self.graphs) - 1

    def _timeline(self, timeline: Timeline, graph: TaskGraph) -> int:
        """Add a timeline of the tasks of ``graph``; return its number."""
        spec = {"graph": self._graph(graph), **timeline_columns(self.columns, timeline)}
        self.timelines.append(spec)
        return len(self.timelines) - 1

    def _schedule(self, schedule: Schedule) -> int:
        """Add a schedule: an action takes one clock cycle; return the number of its timeline.

        Actions of a schedule that cannot run are at their positions.
        """
        graph = compute_graph(schedule)
        try:
            verify(schedule)
            return self._unsimulated(graph, graph.levels, "cycle", "")
        except PipeError as error:
            queues = graph.queues
            position = np.empty(len(graph), dtype=np.int64)
            position[queues.values] = np.arange(len(graph)) - queues.ptr[queues.rows]
            return self._unsimulated(graph, position, "position", str(error))

    def _unsimulated(
        self, graph: TaskGraph, level: NDArray[np.int64], unit: str, problem: str
    ) -> int:
        """Add tasks at their levels, each of length 1; return the number of the timeline."""
        start = np.where(level < 0, np.nan, level.astype(float))
        computing = graph.kinds.is_op(COMPUTE)
        refusal = "this schedule cannot run" if problem else ""
        inputs = SimulationInputs(
            None if problem else unit_costs(graph, computing),
            np.zeros(len(graph.kinds)), False, False, False, refusal,
        )  # fmt: skip
        self.timelines.append(
            {
                "graph": self._graph(graph),
                "name": graph.name,
                "unit": unit,
                "problem": problem,
                "times": {
                    "type": "exact",
                    "resolution": 0,
                    "start": self.columns.floats(start[graph.queues.values]),
                    "end": self.columns.floats((start + 1)[graph.queues.values]),
                },
                "inputs": input_columns(self.columns, inputs),
            }
        )
        return len(self.timelines) - 1
