"""Task graphs in the forms of other packages: networkx, and torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipesim.errors import ArgumentError
from pipesim.graph.dependencies import overlapped_pairs
from pipesim.graph.graph import TaskGraph
from pipesim.graph.precedence import earlier_by_kind
from pipesim.ops import SCHEDULED, TRANSFERS, WEIGHT_GRADS, Action, Op, Overlapped
from pipesim.scheduling.files import signed_rows
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.utils.files import check_path, write_text
from pipesim.utils.host_memory import check_memory
from pipesim.utils.packages import import_extra

#: Bytes that networkx takes for a task with its attributes, and for a dependency.
_NODE, _EDGE = 1500, 400


def networkx_graph(graph: TaskGraph) -> Any:
    """Return a graph as `networkx.DiGraph`; see `TaskGraph.to_networkx`."""
    networkx = import_extra("networkx", "networkx", "a networkx graph")
    nbytes = _NODE * len(graph) + _EDGE * len(graph.precedence.values)
    check_memory(f"a networkx graph of {len(graph):,} tasks", nbytes, FEWER_TASKS)
    directed = networkx.DiGraph(
        name=graph.name,
        n_devices=graph.n_devices,
        n_stages=graph.n_stages,
        n_microbatches=graph.n_microbatches,
        n_replicas=graph.n_replicas,
    )
    for number in range(len(graph)):
        task = graph.task(number)
        directed.add_node(
            number,
            op=task.op.name,
            device=task.device,
            stream=task.stream,
            stage=task.stage,
            microbatch=-1 if task.microbatch is None else task.microbatch,
            replica=task.replica,
            peer_stage=task.peer_stage,
            part=task.part,
            label=str(task),
        )
    # An edge of several kinds keeps the first one, as it is added last.
    for kind, (later, earlier) in reversed(earlier_by_kind(graph).items()):
        ends = zip(np.asarray(earlier).tolist(), np.asarray(later).tolist(), strict=True)
        directed.add_edges_from(ends, kind=kind)
    return directed


# Orders with messages for the runtime of torch.distributed.pipelining


def torch_orders(graph: TaskGraph) -> list[list[str]]:
    """Return the actions and messages of each device as texts, in issue order.

    ``REDUCE_GRAD`` follows the last gradient of a stage: there torch averages over the
    micro-batches. Optimizer steps are omitted: in torch the caller runs them.
    """
    _check(graph)
    left = np.zeros(graph.n_stages, dtype=np.int64)
    np.add.at(left, graph.stage[graph.is_op(WEIGHT_GRADS)], 1)
    orders: list[list[str]] = [[] for _ in range(graph.n_devices)]
    for device, parts in _with_messages(graph):
        actions = [Action(*part) for part in parts]
        orders[device].append(str(actions[0] if len(actions) == 1 else Overlapped(*actions)))
        for stage, op, *_ in actions:
            left[stage] -= op in WEIGHT_GRADS
            if op in WEIGHT_GRADS and not left[stage]:
                orders[device].append(str(Action(stage, Op.REDUCE_GRAD)))
    return orders


def _with_messages(graph: TaskGraph) -> Iterator[tuple[int, list[tuple[int, Op, int]]]]:
    """Yield the device and the parts of each action and message, in issue order."""
    forward, backward = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    second = dict(zip(forward.tolist(), backward.tolist(), strict=True))
    halves = set(second.values())
    listed = np.flatnonzero(graph.is_op(SCHEDULED | TRANSFERS)).tolist()
    device, stage, microbatch = (
        column.tolist() for column in (graph.device, graph.stage, graph.microbatch)
    )
    op = [Op(code) for code in graph.op.tolist()]
    for task in listed:
        if task not in halves:
            parts = (task, second[task]) if task in second else (task,)
            yield device[task], [(stage[part], op[part], microbatch[part]) for part in parts]


def _check(graph: TaskGraph) -> None:
    if graph.n_replicas > 1:
        raise ArgumentError(
            f"graph {graph.name!r} has {graph.n_replicas} copies of each stage (data-parallel "
            "replicas, or paths of a bidirectional placement); torch's rows are those of one "
            "pipeline with a stage on one rank: lower a schedule of one path with n_replicas=1, "
            "and let FSDP or DDP reduce the gradients"
        )
    if graph.n_batches > 1 or graph.weight_versions != "one":
        raise ArgumentError(
            f"graph {graph.name!r} has {graph.n_batches} mini-batches and weight_versions="
            f"{graph.weight_versions!r}; torch's runtime has no optimizer step inside a step: "
            "take a schedule with one set of weights"
        )
    if graph.n_slices > 1:
        raise ArgumentError(
            f"graph {graph.name!r} has {graph.n_slices} slices a sequence, but torch's runtime "
            "keeps no keys and values from one micro-batch for the next: lower a schedule without "
            "slices"
        )
    if graph.edges:
        raise ArgumentError(
            f"graph {graph.name!r} has stages with the edges {list(graph.edges)}, but torch's "
            "runtime sends a stage's output to the next stage alone; lower a schedule of a chain"
        )
    if graph.skips:
        raise ArgumentError(
            f"graph {graph.name!r} has skip connections, but torch's runtime sends a stage's "
            "output to the next stage alone; lower the schedule without skips"
        )
    if graph.tied:
        raise ArgumentError(
            f"graph {graph.name!r} has tied stages, but torch's runtime has no sum of their "
            "gradients; lower the schedule without tied"
        )
    if graph.is_op(frozenset({Op.R})).any():
        raise ArgumentError(
            f"graph {graph.name!r} recomputes ({graph.recompute}), but torch's runtime has no such "
            "action; lower the schedule with recompute='never', and checkpoint inside the modules"
        )


def write_torch_csv(graph: TaskGraph, path: Path | str) -> None:
    """Write a graph as torch's CSV; see `TaskGraph.save_torch_csv`."""
    path = check_path("path", path, "write")
    write_text(path, signed_rows(torch_orders(graph)))
