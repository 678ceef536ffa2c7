"""Latency and bandwidth of the messages of a timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.measured_collectives import Average
from pipesim.analysis.replay import message_times
from pipesim.costs.costs import Costs
from pipesim.costs.pricing import message_bytes
from pipesim.graph.graph import TaskGraph
from pipesim.network.network import Network
from pipesim.ops import SENDS
from pipesim.timeline.timeline import Timeline


def message_waits(timelines: Iterable[Timeline]) -> NDArray[np.float64]:
    """Return the seconds from SEND to use of each message that delayed its consumer."""
    seconds = [message_times(values, waited_only=True) for values in timelines]
    return np.concatenate([values[~np.isnan(values)] for values in seconds])


def measured_network(timeline: Timeline, average: Average) -> Network:
    """Return latency and bandwidth of the messages, the same for all pairs."""
    graph = timeline.graph
    sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
    if not len(sends):
        return Network()
    recvs = graph.pair[sends]
    nbytes, fixed = timeline.nbytes[sends], np.zeros(len(sends))
    if timeline.costs is not None:
        fixed = _fixed_seconds(graph, timeline.costs)[graph.kind[sends]]
    # Without a size, the time of a SEND cannot be bandwidth: it counts as latency.
    held = np.where(nbytes > 0, np.maximum(0.0, timeline.duration[sends] - fixed), 0.0)
    # A RECV that its stream and host had reached before its message came shows the message's time.
    ready = _reached(timeline, recvs) < timeline.end[recvs]
    rest = message_times(timeline, waited_only=True)[recvs] - held - fixed
    counted = ready & ~np.isnan(rest)
    if not counted.any():  # no consumer waited
        rest, counted = message_times(timeline)[recvs] - held - fixed, ready
    latency = float(average(rest[counted]) if counted.any() else rest.min())
    bandwidth = float(nbytes.sum() / held.sum()) if held.any() else math.inf
    return Network(latency=max(latency, 0.0), bandwidth=bandwidth)


def _fixed_seconds(graph: TaskGraph, costs: Costs) -> NDArray[np.float64]:
    """Return the seconds of each kind of message that do not depend on its bytes."""
    return message_bytes(graph.kinds, costs.averaged().per_stage("output_seconds", graph.n_stages))


def _reached(timeline: Timeline, recvs: NDArray[Any]) -> NDArray[np.float64]:
    """Return the time at which the stream of each RECV was free and its host had issued it (s).

    Minus infinity for the first task of a stream, if it was issued at once.
    """
    before = timeline.graph.queue_predecessor[recvs]
    free = np.where(before < 0, -math.inf, timeline.end[before])
    issued = timeline.issue_times[recvs]
    return np.where(issued > 0, np.maximum(free, issued), free)
