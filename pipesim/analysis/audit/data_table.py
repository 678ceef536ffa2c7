"""`DataUses`: a table of the data that each task reads and writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.utils.csr import Ints

#: Text of each kind of data: data of a stage, with or without a micro-batch.
DATA_NAMES = {
    "weights": "weights of stage {stage}",
    "gradients": "gradients of the weights of stage {stage}",
    "total": "reduced gradients of stage {stage}",
    "activations": "activations of stage {stage}, micro-batch {microbatch}",
    "input": "input of stage {stage}, micro-batch {microbatch}",
    "output": "output of stage {stage}, micro-batch {microbatch}",
    "skip": "skip into stage {stage}, micro-batch {microbatch}",
    "message": "message",
    "gradient": "gradient of the output of stage {stage}, micro-batch {microbatch}",
    "input_gradient": "gradient of the input of stage {stage}, micro-batch {microbatch}",
    "skip_gradient": "gradient of a skip from stage {stage}, micro-batch {microbatch}",
    "groups": "groups of keys of stage {stage}, micro-batch {microbatch}",
    "counts": "counts of keys of stage {stage}, micro-batch {microbatch}",
    "keys": "keys of stage {stage}, micro-batch {microbatch}",
    "rows": "rows of stage {stage}, micro-batch {microbatch}",
    "vectors": "vectors of stage {stage}, micro-batch {microbatch}",
    "sums": "sums of gradients of keys of stage {stage}, micro-batch {microbatch}",
    "row_gradients": "gradients of rows of stage {stage}, micro-batch {microbatch}",
    "norm": "norm of all gradients",
    "host": "activations in host memory of stage {stage}, micro-batch {microbatch}",
    "tokens": "tokens for experts of stage {stage}, micro-batch {microbatch}",
    "routed": "exchanged tokens of stage {stage}, micro-batch {microbatch}",
    "token_gradients": "gradients of tokens for experts of stage {stage}, micro-batch {microbatch}",
    "routed_gradients": "exchanged gradients of tokens of stage {stage}, micro-batch {microbatch}",
    "keys_values": "keys and values of stage {stage}, micro-batch {microbatch}",
    "keys_values_gradient": "gradient of keys and values of stage {stage}, micro-batch "
    "{microbatch}",
}
_NUMBERS = {name: number for number, name in enumerate(DATA_NAMES)}


class Milestones(NamedTuple):
    """Backward that reaches each milestone, and the bucket that is then complete."""

    backward: Ints
    part: Ints

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> Milestones:
        """Return the milestones of a graph; milestone ``k`` is node ``len(graph) + k``."""
        buckets = np.flatnonzero(graph.partial_dependency >= 0)
        pairs = np.stack([graph.partial_dependency[buckets], graph.part[buckets]])
        backward, part = np.unique(pairs, axis=1).astype(np.int64)
        return cls(backward, part)


class DataUses:
    """Table of the data that each node uses, filled row by row."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self._columns: list[tuple[Ints, ...]] = []
        shape = graph.n_replicas, graph.n_stages, graph.n_microbatches + 1
        self.task_of = {}  # the task of each operation, replica, stage and micro-batch, or -1
        for op in (Op.F, Op.B, Op.I):
            tasks = np.flatnonzero(graph.op == op)
            self.task_of[op] = np.full(shape, -1, dtype=np.int64)
            self.task_of[op][graph.replica[tasks], graph.stage[tasks], graph.microbatch[tasks]] = (
                tasks
            )

    def tasks(self, *ops: Op) -> Ints:
        """Return the tasks of some operations."""
        return np.flatnonzero(self.graph.is_op(frozenset(ops)))

    def note(
        self, tasks: Ints, uses: str, *names: str, nodes: Ints | None = None, **other: Ints | int
    ) -> None:
        """Add rows: tasks read (``r``), write (``w``), or read and write (``rw``) some data.

        The data belong to the replica, stage and micro-batch of each task, unless ``other`` names
        another replica, stage, micro-batch or part.
        """
        graph = self.graph
        where = {"replica": graph.replica[tasks], "stage": graph.stage[tasks],
                 "microbatch": graph.microbatch[tasks], "part": 0, **other}  # fmt: skip
        columns = [np.broadcast_to(column, tasks.shape) for column in where.values()]
        nodes = tasks if nodes is None else nodes
        for name in names:
            data = np.full(len(tasks), _NUMBERS[name])
            self._columns.append((data, *columns, nodes, np.full(len(tasks), "w" in uses)))

    def columns(self) -> Ints:
        """Return rows: data, replica, stage, micro-batch, part, node, and whether it writes."""
        columns = zip(*self._columns, strict=True)
        return np.stack([np.concatenate(column).astype(np.int64) for column in columns])


def local_inputs(
    uses: DataUses, tasks: Ints, step: int, replica: int | None = None
) -> tuple[Ints, Ints]:
    """Return the tasks on the same device as the stage at offset ``step``, and that stage.

    The devices are those of the replica of each task, unless ``replica`` is given.
    """
    graph = uses.graph
    stage = graph.stage[tasks].astype(np.int64)
    homes = graph.homes[graph.replica[tasks] if replica is None else replica]
    homes = np.broadcast_to(homes, (len(tasks), graph.n_stages))
    other = (stage + step).clip(0, graph.n_stages - 1)
    rows = np.arange(len(tasks))
    local = (other != stage) & (homes[rows, other] == homes[rows, stage])
    return tasks[local], other[local]


def gradient_parts(graph: TaskGraph) -> list[int]:
    """Return the numbers of the buckets of gradients, or [-1] without buckets."""
    return np.unique(graph.part[graph.is_op(frozenset({Op.REDUCE_GRAD}))]).tolist() or [-1]
