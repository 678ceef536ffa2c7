"""Find conflicts: pairs of tasks that must not run at the same time.

Two tasks conflict if both use the same data and one of them writes it. `data_uses` lists the data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.audit.data_table import DATA_NAMES, Milestones
from pipesim.analysis.audit.data_uses import data_uses
from pipesim.graph.graph import TaskGraph
from pipesim.utils.csr import Ints


class Conflicts(NamedTuple):
    """Pairs of nodes that must be ordered: both use the same data, and one of them writes it.

    The pairs of some data are each write with the write before it, each read with the write before
    it, and each write with the reads since that write. If these are ordered, so are all other
    pairs.
    """

    first: Ints
    second: Ints
    data: Ints

    def text(self, graph: TaskGraph, row: int) -> str:
        """Return a text with the two tasks of a conflict and the data that they use."""
        milestones = Milestones.from_graph(graph)
        tasks = []
        for node in (int(self.first[row]), int(self.second[row])):
            if node >= len(graph):
                node = int(milestones.backward[node - len(graph)])
            tasks.append(f"{graph.task(node)}")
        name, stage, microbatch = self.data[row].tolist()
        what = list(DATA_NAMES.values())[name].format(stage=stage, microbatch=microbatch)
        return f"{tasks[0]} and {tasks[1]}: {what}"


def conflicts(graph: TaskGraph, position: Ints) -> Conflicts:
    """Return the pairs of tasks and milestones that conflict.

    Parameters
    ----------
    graph
        Graph with the tasks.
    position
        Position of each task and milestone in a topological order; shape
        ``(n_tasks + n_milestones,)``.
    """
    *data, node, writes = data_uses(graph)
    key = np.unique(np.stack(data), axis=1, return_inverse=True)[1].ravel()
    # One entry for each node and data. It writes if any of its uses does.
    order = np.lexsort((-writes, position[node], key))
    key, node, writes = key[order], node[order], writes[order]
    data = [column[order] for column in data]
    again = np.r_[False, (key[1:] == key[:-1]) & (node[1:] == node[:-1])]
    kept = np.flatnonzero(~again)
    pairs = _adjacent(key[kept].tolist(), writes[kept].tolist())
    first, second = (kept[column] for column in pairs)
    columns = np.stack([data[0][second], data[2][second], data[3][second]], axis=1)
    return Conflicts(node[first], node[second], columns)


def _adjacent(key: list[int], writes: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs of uses of the same data that `Conflicts` lists, as ordered indices."""
    first, second = [], []
    current, write, reads = -1, -1, list[int]()
    for use in range(len(key)):
        if key[use] != current:
            current, write, reads = key[use], -1, []
        before = [*reads, write] if writes[use] else [write]
        for other in before:
            if other >= 0:
                first.append(other)
                second.append(use)
        if writes[use]:
            write, reads = use, []
        else:
            reads.append(use)
    return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)
