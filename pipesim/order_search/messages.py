"""Messages between the lanes of an order: their channels, latency and time on a channel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import CostTable
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]


def kind_numbers(graph: TaskGraph) -> Ints:
    """Return the kind of each operation, path and stage of a graph; -1 for none."""
    kinds = graph.kinds
    numbers = np.full((len(Op), graph.n_replicas, graph.n_stages), -1, dtype=np.int64)
    numbers[kinds.op, kinds.replica, kinds.stage] = np.arange(len(kinds))
    return numbers


def _received(graph: TaskGraph, needs: Ints, kind: Ints) -> Ints:
    """Return the lanes whose need a message delivers."""
    device = graph.kinds.device[kind]
    return np.flatnonzero((needs[:, 0] >= 0) & (device[needs[:, 0]] != device))


def channels(graph: TaskGraph, needs: Ints, kind: Ints) -> Ints:
    """Return the channel of the messages that deliver the needs."""
    device, channel = graph.kinds.device[kind], np.full_like(needs, -1)
    lanes = _received(graph, needs, kind)
    pairs = device[needs[lanes, 0]].astype(np.int64) * graph.n_devices + device[lanes]
    channel[lanes, 0] = np.unique(pairs, return_inverse=True)[1]
    return channel


def messages(graph: TaskGraph, table: CostTable, needs: Ints, kind: Ints) -> tuple[Floats, Floats]:
    """Return latency and hold of the messages that deliver the needs."""
    kinds, numbers = graph.kinds, kind_numbers(graph)
    replica, stage = (x[kind] for x in (kinds.replica, kinds.stage))
    latency, hold = np.zeros(needs.shape), np.zeros(needs.shape)
    lanes = _received(graph, needs, kind)
    source = needs[lanes, 0]
    send = np.where(kinds.op[kind[lanes]] == Op.F, Op.SEND_F, Op.SEND_B)
    message = numbers[send, replica[source], stage[source]]
    latency[lanes, 0], hold[lanes, 0] = table.latency[message], table.duration[message]
    return latency, hold
