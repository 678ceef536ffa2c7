"""Measure the bytes that OFFLOADs move, and the link to host memory, in steps that offload.

Copies run beside compute tasks, as in the steps that are to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeexec.profiling.link_fit import fit
from pipeexec.profiling.shape_classes import ShapeClasses
from pipesim.errors import ArgumentError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.network.host_link import HostLink
from pipesim.ops import COPIES, Op
from pipesim.timeline.timeline import Timeline

#: Sizes for which the link is fitted, each by the median of its copies; more add no knowledge.
_MOST_SIZES = 32


def graphs_that_offload(graphs: Sequence[TaskGraph]) -> list[TaskGraph]:
    """Return the graphs with OFFLOADs."""
    return [graph for graph in graphs if graph.is_op(COPIES).any()]


def check_shares(graphs: Sequence[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs that offload different shares of one stage.

    Whole tensors are moved, so that bytes are measured for one share.
    """
    shares: dict[int, tuple[float, str]] = {}
    for graph in graphs_that_offload(graphs):
        whole = (graph.op == Op.OFFLOAD) & (graph.part < 0)
        for stage in np.unique(graph.stage[whole]).tolist():
            share = float(graph.offload_shares[stage])
            first, name = shares.setdefault(stage, (share, graph.name))
            if first != share:
                raise ArgumentError(
                    f"graph {graph.name!r} offloads the share {share:g} of stage {stage}, graph "
                    f"{name!r} {first:g}: whole tensors are moved, and one Costs has the bytes of "
                    "one share; measure each with its own pipeline"
                )


def check_microbatches(graph: TaskGraph, graphs: Sequence[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs that cannot run the `Microbatches` of another graph."""
    for other in graphs:
        if other.n_microbatches != graph.n_microbatches:
            raise ArgumentError(
                f"graph {other.name!r} offloads and has {other.n_microbatches} micro-batches, the "
                f"pipeline {graph.n_microbatches}: offloads are measured in steps of that graph, "
                "which cannot run the given Microbatches; measure each with its own pipeline"
            )


def offload_bytes(
    timelines: Sequence[Timeline], n_stages: int, classes: ShapeClasses | None = None
) -> dict[str, Any]:
    """Return ``offload_bytes`` of `Costs`: the most that an OFFLOAD of each stage moved.

    With ``classes`` of `Microbatches`, the most of each class; shape ``(n_stages, n_shares *
    n_microbatches)``. Empty if no activations were offloaded, but inputs alone, or nothing.
    """
    shape = (1, 1) if classes is None else classes.number.shape
    nbytes = np.zeros((n_stages, *shape))
    moved = False
    for timeline in timelines:
        graph = timeline.graph
        whole = np.flatnonzero((graph.op == Op.OFFLOAD) & (graph.part < 0))
        share, microbatch = np.zeros((2, len(whole)), dtype=np.int64)
        if classes is not None:
            share = copy_of_replicas(graph.homes)[graph.replica[whole]]
            microbatch = graph.microbatch[whole].astype(np.int64)
        np.maximum.at(nbytes, (graph.stage[whole], share, microbatch), timeline.nbytes[whole])
        moved |= len(whole) > 0
    if not moved:
        return {}
    flat = nbytes.reshape(n_stages, -1)
    return {"offload_bytes": tuple(flat[:, 0].tolist()) if classes is None else classes.most(flat)}


def host_link(timelines: Sequence[Timeline]) -> HostLink | None:
    """Return the link that fits the copies of all timelines; None without copies."""
    sizes, seconds = [], []
    for timeline in timelines:
        copies = np.flatnonzero(timeline.graph.is_op(COPIES))
        sizes.append(timeline.nbytes[copies])
        seconds.append(timeline.duration[copies])
    nbytes = np.concatenate(sizes) if sizes else np.empty(0)
    if not len(nbytes):
        return None
    lasted = np.maximum(np.concatenate(seconds), 1e-9)
    different = np.unique(nbytes)
    different = different[np.linspace(0, len(different) - 1, _MOST_SIZES).astype(int)]
    different = np.unique(different)
    line = fit(different, [float(np.median(lasted[nbytes == size])) for size in different])
    return HostLink(line.latency, line.bandwidth)
