"""Data that each task of a graph reads and writes, and the conflicts that follow.

The data of a step are, for each replica, the weights of a stage, their gradients, activations,
outputs, gradients of outputs, and messages. If weights have versions, a backward reads its own.

A bucket of gradients is complete before its backward ends. A *milestone* accesses it: a node of its
own, between the predecessors of the backward and the end of the backward.

Two tasks conflict, and must not run at the same time, if both use the same data and one of them
writes it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, EXPERT_EXCHANGES, KEPT, Op
from pipesim.scheduling.placement import neighbors
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
    other = neighbors(graph.edges, graph.n_stages, step)[stage]
    rows = np.arange(len(tasks))
    local = (other != stage) & (homes[rows, other] == homes[rows, stage])
    return tasks[local], other[local]


def gradient_parts(graph: TaskGraph) -> list[int]:
    """Return the numbers of the buckets of gradients, or [-1] without buckets."""
    return np.unique(graph.part[graph.is_op(frozenset({Op.REDUCE_GRAD}))]).tolist() or [-1]


# Exchanges of sharded embeddings, and of tokens for experts.


def embedding_exchanges(uses: DataUses) -> None:
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
    _read_neighbour(uses, dispatch, -1, "input", "output")
    uses.note(dispatch, "w", "groups")
    for tasks, replica in itertools.product((counts, keys), replicas):
        uses.note(tasks, "r", "groups", replica=replica)
        if not len(dispatch):
            _read_neighbour(uses, tasks, -1, "input", "output", replica)
    uses.note(counts, "w", "counts")
    uses.note(keys, "r", "counts")
    uses.note(keys, "w", "keys")
    for replica in replicas:
        uses.note(vectors, "r", "rows", replica=replica)
    uses.note(vectors, "w", "vectors" if len(puts) else "output")
    uses.note(puts, "r", "vectors")
    uses.note(puts, "w", "output")
    _read_neighbour(uses, sums, +1, "gradient", "input_gradient")
    uses.note(sums, "w", "sums")
    for replica in replicas:
        uses.note(gradients, "r", "sums", replica=replica)
        if not len(sums):
            _read_neighbour(uses, gradients, +1, "gradient", "input_gradient", replica)
    uses.note(gradients, "w", "row_gradients")
    backward = uses.tasks(Op.B, Op.I)
    uses.note(backward, "r", "sums")
    for part in gradient_parts(graph):
        uses.note(accumulated, "rw", "gradients", microbatch=0, part=part)
        for replica in replicas:
            uses.note(accumulated, "r", "gradients", microbatch=0, part=part, replica=replica)


def expert_exchanges(uses: DataUses) -> None:
    """Add uses of tokens: a segment writes them, and the next one reads what was exchanged.

    A member of an exchange reads the tokens of every replica of its group (rule 9).
    """
    graph = uses.graph
    exchange = uses.tasks(Op.ALL_TO_ALL)
    exchange = exchange[graph.part[exchange] >= len(EXCHANGES)]
    layer, place = np.divmod(graph.part[exchange] - len(EXCHANGES), len(EXPERT_EXCHANGES))
    is_backward, segment = place >= 2, 2 * layer + place % 2
    for ops, selected, sent, received in (
        ((Op.F,), ~is_backward, "tokens", "routed"),
        ((Op.B, Op.I), is_backward, "token_gradients", "routed_gradients"),
    ):
        part = graph.part[own := uses.tasks(*ops)]
        uses.note(own, "w", sent, part=part)
        uses.note(own[part > 0], "r", received, part=part[part > 0] - 1)
        tasks, number = exchange[selected], segment[selected]
        uses.note(tasks, "w", received, part=number)
        of_task = np.zeros(len(graph), dtype=np.int64)
        of_task[tasks] = number
        for collective in np.unique(graph.group[tasks]).tolist():
            members = graph.collectives[collective].astype(np.int64)
            reads, other = (x.ravel() for x in np.meshgrid(members, members, indexing="ij"))
            uses.note(reads, "r", sent, part=of_task[reads], replica=graph.replica[other])


def _read_neighbour(
    uses: DataUses, tasks: Ints, step: int, arrived: str, output: str, replica: int | None = None
) -> None:
    """Add reads of data from the stage at offset ``step``, by message or on the same device."""
    replicas = uses.graph.replica if replica is None else np.full(len(uses.graph), replica)
    uses.note(tasks, "r", arrived, replica=replicas[tasks])
    local, stage = local_inputs(uses, tasks, step, replica)
    uses.note(local, "r", output, stage=stage, replica=replicas[local])


# Uses of each sort of task.


def data_uses(graph: TaskGraph) -> Ints:
    """Return the rows of `DataUses` of a graph."""
    uses = DataUses(graph)
    _forwards(uses)
    _backwards(uses)
    _message_uses(uses)
    embedding_exchanges(uses)
    expert_exchanges(uses)
    _copy_uses(uses)
    _updates(uses)
    _device_collectives(uses)
    _slice_uses(uses)
    return uses.columns()


def _forwards(uses: DataUses) -> None:
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
        local, stage = local_inputs(uses, tasks, -1)
        uses.note(local, "r", "output", stage=stage)
    if graph.weight_versions == "one":
        uses.note(recompute, "r", "weights", microbatch=0)


def _backwards(uses: DataUses) -> None:
    graph = uses.graph
    backward, weights = uses.tasks(Op.B, Op.I), uses.tasks(Op.W)
    uses.note(backward, "r", "gradient", "row_gradients")
    uses.note(backward, "rw", "activations")
    uses.note(backward, "w", "input_gradient")
    uses.note(weights, "rw", "activations")
    local, stage = local_inputs(uses, backward, +1)
    uses.note(local, "r", "input_gradient", stage=stage)
    if graph.weight_versions == "one":
        uses.note(backward, "r", "weights", microbatch=0)


def _message_uses(uses: DataUses) -> None:
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
        # The token of a decode step is for the next one of its sequence, if there is one.
        later = graph.kinds.returns_tokens[graph.kind[skipped]]
        microbatch = graph.microbatch[skipped]
        used = ~later | ((microbatch + 1) % graph.n_slices > 0)
        skipped, later, microbatch = skipped[used], later[used], microbatch[used]
        place = graph.replica[skipped], graph.stage[skipped], microbatch + later
        user = np.max([uses.task_of[op][place] for op in users], axis=0)
        peer, reads = graph.peer_stage[skipped], user >= 0
        uses.note(user[reads], "r", skip, part=peer[reads], microbatch=microbatch[reads])
    for source, target in graph.skips if graph.portals else ():
        same = graph.homes[:, source] == graph.homes[:, target]  # handed over on one device
        for ops, end, other, output in (
            ((Op.F,), target, source, "output"),
            ((Op.B, Op.I), source, target, "input_gradient"),
        ):
            user = uses.tasks(*ops)
            user = user[(graph.stage[user] == end) & same[graph.replica[user]]]
            uses.note(user, "r", output, stage=other)


def _copy_uses(uses: DataUses) -> None:
    """Add uses by OFFLOAD, which frees what it copies to the host, and RELOAD."""
    graph, offloads, reloads = uses.graph, uses.tasks(Op.OFFLOAD), uses.tasks(Op.RELOAD)
    uses.note(offloads, "w", "host", "activations")
    uses.note(reloads, "r", "host")
    uses.note(reloads, "w", "activations")
    for tasks in (offloads, reloads):
        uses.note(tasks[graph.part[tasks] == KEPT.index("input")], "w", "input")


def _updates(uses: DataUses) -> None:
    """Add uses of gradients and weights by B, W, REDUCE_GRAD, STEP, UNSHARD and RESHARD."""
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
    for part in gradient_parts(graph):
        nodes = adds.copy()
        selected = np.flatnonzero(milestones.part == part)
        of_backward = np.full(len(graph), -1, dtype=np.int64)
        of_backward[milestones.backward[selected]] = len(graph) + selected
        nodes = np.where(of_backward[adds] >= 0, of_backward[adds], adds)
        uses.note(adds[~apart], "rw", "gradients", nodes=nodes[~apart], microbatch=0, part=part)
        uses.note(steps, "rw", "gradients", microbatch=0, part=part)
    uses.note(steps, "rw", "weights", microbatch=0)
    uses.note(uses.tasks(Op.RESHARD), "rw", "weights", microbatch=0, part=0)
    for op, name in ((Op.REDUCE_GRAD, "gradients"), (Op.UNSHARD, "weights")):
        tasks = uses.tasks(op)
        in_groups = (groups[graph.stage[tasks]] > 0) & (op == Op.REDUCE_GRAD)
        of_batch = np.where(in_groups, graph.microbatch[tasks], 0)
        parts = np.where(in_groups, -2, graph.part[tasks] if op == Op.REDUCE_GRAD else 0)
        uses.note(tasks, "rw", name, microbatch=of_batch, part=parts)
        for replica in range(graph.n_replicas):
            uses.note(tasks, "r", name, microbatch=of_batch, part=parts, replica=replica)


def _device_collectives(uses: DataUses) -> None:
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


def _slice_uses(uses: DataUses) -> None:
    """Add uses of keys and values, which a slice shares with the others of its sequence.

    F of a slice reads those of the slice before, and those behind it. B adds to their gradient,
    and needs its own, to which the slices after have added.
    """
    n_slices = uses.graph.n_slices
    if n_slices == 1:
        return
    forward, backward = uses.tasks(Op.F), uses.tasks(Op.B, Op.I)
    uses.note(forward, "w", "keys_values")
    if uses.graph.prompt_slices:
        homes, last = uses.graph.homes, uses.graph.n_stages - 1
        is_step = uses.graph.is_decode_step[uses.graph.microbatch[forward]]
        local = homes[uses.graph.replica[forward], last] == uses.graph.device[forward]
        steps = forward[is_step & local & (uses.graph.stage[forward] == 0)]
        uses.note(steps, "r", "output", stage=last, microbatch=uses.graph.microbatch[steps] - 1)
    for tasks, what, data in (
        (forward, "r", "keys_values"),
        (uses.tasks(Op.R), "r", "keys_values"),
        (backward, "rw", "keys_values_gradient"),
    ):
        later = tasks[uses.graph.microbatch[tasks] % n_slices > 0]
        uses.note(later, what, data, microbatch=uses.graph.microbatch[later] - 1)
    earlier = backward[(uses.graph.microbatch[backward] + 1) % n_slices > 0]
    uses.note(earlier, "r", "keys_values_gradient")


def _use_gradients(uses: DataUses, tasks: Ints, how: str, stage: int, replica: Ints | int) -> None:
    """Add uses of all gradients of a stage after its reductions."""
    where: dict[str, Any] = {"microbatch": 0, "stage": stage, "replica": replica}
    uses.note(tasks, how, "total", **where)
    for part in gradient_parts(uses.graph):
        uses.note(tasks, how, "gradients", part=part, **where)


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
            tasks.append(graph.task(node))
        name, stage, microbatch = self.data[row].tolist()
        what = list(DATA_NAMES.values())[name].format(stage=stage, microbatch=microbatch)
        return f"{tasks[0]} and {tasks[1]}: {what}"


def conflicts(graph: TaskGraph, position: Ints) -> Conflicts:
    """Return the pairs of tasks and milestones that conflict.

    ``position`` is that of each task, then of each milestone, in a topological order.
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
