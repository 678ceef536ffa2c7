"""List the data that each task of a graph reads and writes.

The data of a step are, for each replica, the weights of a stage, their gradients, activations,
outputs, gradients of outputs, and messages. If weights have versions, a backward reads its own.

A bucket of gradients is complete before its backward ends. A *milestone* accesses it: a node of its
own, between the predecessors of the backward and the end of the backward.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op
from pipesim.utils.csr import Ints

__all__ = ["DATA_NAMES", "Milestones", "data_uses"]

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


class _Uses:
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


def data_uses(graph: TaskGraph) -> Ints:
    """Return rows: data, replica, stage, micro-batch, part, node, and whether it writes."""
    uses = _Uses(graph)
    _forwards(uses)
    _backwards(uses)
    _messages(uses)
    _exchanges(uses)
    _updates(uses)
    _device_collectives(uses)
    return uses.columns()


def _local_inputs(
    uses: _Uses, tasks: Ints, step: int, replica: int | None = None
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


def _forwards(uses: _Uses) -> None:
    graph = uses.graph
    forward, recompute = uses.tasks(Op.F), uses.tasks(Op.R)
    sharded = np.isin(graph.stage[forward], graph.sharded)
    uses.note(forward, "r", "weights", microbatch=0)
    uses.note(forward, "r", "input", "keys")
    uses.note(forward, "w", "activations")
    uses.note(forward[~sharded], "w", "output")
    uses.note(forward[sharded], "w", "rows")
    uses.note(recompute, "r", "input")
    uses.note(recompute, "rw", "activations")
    for tasks in (forward, recompute):
        local, stage = _local_inputs(uses, tasks, -1)
        uses.note(local, "r", "output", stage=stage)
    if graph.weight_versions == "one":
        uses.note(recompute, "r", "weights", microbatch=0)


def _backwards(uses: _Uses) -> None:
    graph = uses.graph
    backward, weights = uses.tasks(Op.B, Op.I), uses.tasks(Op.W)
    uses.note(backward, "r", "gradient", "row_gradients")
    uses.note(backward, "rw", "activations")
    uses.note(backward, "w", "input_gradient")
    uses.note(weights, "rw", "activations")
    local, stage = _local_inputs(uses, backward, +1)
    uses.note(local, "r", "input_gradient", stage=stage)
    if graph.weight_versions == "one":
        uses.note(backward, "r", "weights", microbatch=0)


def _messages(uses: _Uses) -> None:
    graph = uses.graph
    for output, arrived, skip, sends, recvs, users in (
        ("output", "input", "skip", Op.SEND_F, Op.RECV_F, (Op.F,)),
        ("input_gradient", "gradient", "skip_gradient", Op.SEND_B, Op.RECV_B, (Op.B, Op.I)),
    ):
        send, recv = uses.tasks(sends), uses.tasks(recvs)
        uses.note(send, "r", output)
        uses.note(send, "w", "message", replica=0, stage=0, microbatch=send)
        uses.note(recv, "r", "message", replica=0, stage=0, microbatch=graph.pair[recv])
        is_skip = graph.peer_stage[recv] >= 0
        uses.note(recv[~is_skip], "w", arrived)
        skipped = recv[is_skip]
        uses.note(skipped, "w", skip, part=graph.peer_stage[skipped])
        place = graph.replica[skipped], graph.stage[skipped], graph.microbatch[skipped]
        user = np.max([uses.task_of[op][place] for op in users], axis=0)
        uses.note(user[user >= 0], "r", skip, part=graph.peer_stage[skipped][user >= 0])
    for source, target in graph.skips if graph.portals else ():
        same = graph.homes[:, source] == graph.homes[:, target]  # handed over on one device
        for ops, end, other, output in (
            ((Op.F,), target, source, "output"),
            ((Op.B, Op.I), source, target, "input_gradient"),
        ):
            user = uses.tasks(*ops)
            user = user[(graph.stage[user] == end) & same[graph.replica[user]]]
            uses.note(user, "r", output, stage=other)


def _exchanges(uses: _Uses) -> None:
    """Add uses of exchanges: a member reads the data of every replica (rule 9)."""
    graph = uses.graph
    replicas = range(graph.n_replicas)
    exchange, dispatch = uses.tasks(Op.ALL_TO_ALL), uses.tasks(Op.DISPATCH)
    counts, keys, vectors, gradients, accumulated = (
        exchange[graph.part[exchange] == number] for number in range(len(EXCHANGES))
    )
    reorder = uses.tasks(Op.REORDER)
    puts, sums = (
        reorder[graph.part[reorder] == EXCHANGES.index(name)] for name in ("vectors", "gradients")
    )
    # Keys are grouped, and vectors put in order, by tasks of their own or by the exchange.
    _read(uses, dispatch, -1, "input", "output")
    uses.note(dispatch, "w", "groups")
    for tasks, replica in itertools.product((counts, keys), replicas):
        uses.note(tasks, "r", "groups", replica=replica)
        if not len(dispatch):
            _read(uses, tasks, -1, "input", "output", replica)
    uses.note(counts, "w", "counts")
    uses.note(keys, "r", "counts")
    uses.note(keys, "w", "keys")
    for replica in replicas:
        uses.note(vectors, "r", "rows", replica=replica)
    uses.note(vectors, "w", "vectors" if len(puts) else "output")
    uses.note(puts, "r", "vectors")
    uses.note(puts, "w", "output")
    _read(uses, sums, +1, "gradient", "input_gradient")
    uses.note(sums, "w", "sums")
    for replica in replicas:
        uses.note(gradients, "r", "sums", replica=replica)
        if not len(sums):
            _read(uses, gradients, +1, "gradient", "input_gradient", replica)
    uses.note(gradients, "w", "row_gradients")
    backward = uses.tasks(Op.B, Op.I)
    uses.note(backward, "r", "sums")
    for part in _parts(graph):
        uses.note(accumulated, "rw", "gradients", microbatch=0, part=part)
        for replica in replicas:
            uses.note(accumulated, "r", "gradients", microbatch=0, part=part, replica=replica)


def _read(
    uses: _Uses, tasks: Ints, step: int, arrived: str, output: str, replica: int | None = None
) -> None:
    """Add reads of data from the stage at offset ``step``, by message or on the same device."""
    replicas = uses.graph.replica if replica is None else np.full(len(uses.graph), replica)
    uses.note(tasks, "r", arrived, replica=replicas[tasks])
    local, stage = _local_inputs(uses, tasks, step, replica)
    uses.note(local, "r", output, stage=stage, replica=replicas[local])


def _parts(graph: TaskGraph) -> list[int]:
    """Return the numbers of the buckets of gradients, or [-1] without buckets."""
    return np.unique(graph.part[graph.is_op(frozenset({Op.REDUCE_GRAD}))]).tolist() or [-1]


def _updates(uses: _Uses) -> None:
    """Add uses of gradients and weights by B, W, REDUCE_GRAD, STEP and UNSHARD."""
    graph = uses.graph
    adds, reduces, steps = uses.tasks(Op.B, Op.W), uses.tasks(Op.REDUCE_GRAD), uses.tasks(Op.STEP)
    groups = graph.reduction_groups
    apart = np.isin(graph.stage[adds], graph.stage[reduces]) & (groups[graph.stage[adds]] > 0)
    # Gradients that are reduced after each group of micro-batches are the group's own until then.
    grouped = adds[apart]
    size = groups[graph.stage[grouped]]
    of_group = (graph.microbatch[grouped] // np.maximum(size, 1) + 1) * size - 1
    uses.note(grouped, "rw", "gradients", microbatch=of_group, part=-2)
    of_groups = reduces[groups[graph.stage[reduces]] > 0]
    uses.note(of_groups, "rw", "total", microbatch=0)
    uses.note(steps, "rw", "total", microbatch=0)
    milestones = Milestones.from_graph(graph)
    for part in _parts(graph):
        nodes = adds.copy()
        selected = np.flatnonzero(milestones.part == part)
        of_backward = np.full(len(graph), -1, dtype=np.int64)
        of_backward[milestones.backward[selected]] = len(graph) + selected
        nodes = np.where(of_backward[adds] >= 0, of_backward[adds], adds)
        uses.note(adds[~apart], "rw", "gradients", nodes=nodes[~apart], microbatch=0, part=part)
        uses.note(steps, "rw", "gradients", microbatch=0, part=part)
    uses.note(steps, "rw", "weights", microbatch=0)
    for op, name in ((Op.REDUCE_GRAD, "gradients"), (Op.UNSHARD, "weights")):
        tasks = uses.tasks(op)
        in_groups = (groups[graph.stage[tasks]] > 0) & (op == Op.REDUCE_GRAD)
        of_batch = np.where(in_groups, graph.microbatch[tasks], 0)
        parts = np.where(in_groups, -2, graph.part[tasks] if op == Op.REDUCE_GRAD else 0)
        uses.note(tasks, "rw", name, microbatch=of_batch, part=parts)
        for replica in range(graph.n_replicas):
            uses.note(tasks, "r", name, microbatch=of_batch, part=parts, replica=replica)


def _device_collectives(uses: _Uses) -> None:
    """Add uses of gradients by REDUCE_TIED and GRAD_NORM, and of the norm by STEP."""
    graph = uses.graph
    for task in uses.tasks(Op.REDUCE_TIED):
        own = np.array([task])
        for stage in graph.tied[graph.part[task]]:
            is_local = graph.homes[graph.replica[task], stage] == graph.device[task]
            _use_gradients(uses, own, "rw" if is_local else "r", stage, graph.replica[own])
    norms, steps = uses.tasks(Op.GRAD_NORM), uses.tasks(Op.STEP)
    if not len(norms):
        return
    for replica, stage in np.ndindex(graph.homes.shape):
        _use_gradients(uses, norms, "r", stage, replica)
    uses.note(norms, "rw", "norm", microbatch=0)
    of_device = np.zeros(graph.n_devices, dtype=np.int64)
    of_device[graph.device[norms]] = norms
    member = of_device[graph.device[steps]]
    uses.note(steps, "r", "norm", microbatch=0, stage=graph.stage[member],
              replica=graph.replica[member])  # fmt: skip


def _use_gradients(uses: _Uses, tasks: Ints, how: str, stage: int, replica: Ints | int) -> None:
    """Add uses of all gradients of a stage after its reductions."""
    where: dict[str, Any] = {"microbatch": 0, "stage": stage, "replica": replica}
    uses.note(tasks, how, "total", **where)
    for part in _parts(uses.graph):
        uses.note(tasks, how, "gradients", part=part, **where)
