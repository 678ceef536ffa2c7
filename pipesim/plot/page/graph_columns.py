"""Columns of task graphs in a page."""

from __future__ import annotations

import numpy as np

from pipesim.graph.graph import TaskGraph
from pipesim.plot.page.columns import ColumnWriter, Spec
from pipesim.plot.style import chunks, shades, text_colours


def graph_columns(writer: ColumnWriter, graph: TaskGraph) -> Spec:
    """Add the tasks of a graph, and all that they wait for; return their places."""
    kinds = graph.kinds
    names = sorted({name for _, name in graph.streams})
    number = {name: k for k, name in enumerate(names)}
    needs = graph.dependencies
    paired = np.flatnonzero(graph.pair >= 0)
    partial = graph.partial_dependency
    spec: Spec = {
        "name": graph.name,
        "n": len(graph),
        "n_devices": graph.n_devices,
        "n_stages": graph.n_stages,
        "n_microbatches": graph.n_microbatches,
        "n_replicas": graph.n_replicas,
        "rendezvous": graph.rendezvous,
        "kinds": {
            name: writer.integers(getattr(kinds, name))
            for name in ("op", "device", "stage", "replica", "overlapped", "peer_stage", "part")
        },
        "look": _looks(writer, graph),
        "stream_of_kind": writer.integers(graph.stream_of_kind),
        "stream_names": names,
        "stream_device": writer.integers(np.array([device for device, _ in graph.streams])),
        "stream_name": writer.integers(np.array([number[name] for _, name in graph.streams])),
        "kind": writer.integers(graph.kind),
        "microbatch": writer.integers(graph.microbatch),
        "n_needs": writer.integers(np.diff(needs.ptr)),
        "needs_back": writer.integers(needs.rows - needs.values),
        "paired": writer.integers(paired),
        "pair_back": writer.integers(paired - graph.pair[paired]),
        "host": writer.integers(graph.host),
    }
    if len(graph.collectives):
        spec["n_members"] = writer.integers(np.diff(graph.collectives.ptr))
        spec["members"] = writer.integers(graph.collectives.values)
    if len(partial) and (partial >= 0).any():
        spec["partial"] = writer.integers(partial)
    return spec


def _looks(writer: ColumnWriter, graph: TaskGraph) -> Spec:
    """Add the colour of each kind, and of text on it; return their places."""
    kinds = graph.kinds
    if not len(kinds):
        return {"fill": [], "text": [], "of_kind": writer.integers(kinds.op)}
    colours, index = np.unique(
        shades(kinds.op, chunks(kinds.device, kinds.stage)), axis=0, return_inverse=True
    )
    return {
        "fill": [
            "#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in colours
        ],
        "text": text_colours(colours),
        "of_kind": writer.integers(index.ravel()),
    }
