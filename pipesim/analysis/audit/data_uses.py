"""List the data that each task of a graph reads and writes.

The data of a step are, for each replica, the weights of a stage, their gradients, activations,
outputs, gradients of outputs, and messages. If weights have versions, a backward reads its own.

A bucket of gradients is complete before its backward ends. A *milestone* accesses it: a node of its
own, between the predecessors of the backward and the end of the backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipesim.analysis.audit.data_table import DataUses, Milestones, gradient_parts, local_inputs
from pipesim.analysis.audit.exchange_uses import embedding_exchanges, expert_exchanges
from pipesim.graph.graph import TaskGraph
from pipesim.ops import KEPT, Op
from pipesim.utils.csr import Ints


def data_uses(graph: TaskGraph) -> Ints:
    """Return rows: data, replica, stage, micro-batch, part, node, and whether it writes."""
    uses = DataUses(graph)
    _forwards(uses)
    _backwards(uses)
    _messages(uses)
    embedding_exchanges(uses)
    expert_exchanges(uses)
    _copies(uses)
    _updates(uses)
    _device_collectives(uses)
    _slices(uses)
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


def _messages(uses: DataUses) -> None:
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


def _copies(uses: DataUses) -> None:
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


def _slices(uses: DataUses) -> None:
    """Add uses of keys and values, which a slice shares with the others of its sequence.

    F of a slice reads those of the slice before, and those behind it. B adds to their gradient,
    and needs its own, to which the slices after have added.
    """
    n_slices = uses.graph.n_slices
    if n_slices == 1:
        return
    forward, backward = uses.tasks(Op.F), uses.tasks(Op.B, Op.I)
    uses.note(forward, "w", "keys_values")
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
