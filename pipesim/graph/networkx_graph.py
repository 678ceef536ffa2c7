"""Task graphs as graphs of networkx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.graph.precedence import earlier_by_kind
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.utils.extras import import_extra
from pipesim.utils.host_memory import check_memory

if TYPE_CHECKING:
    from pipesim.graph.graph import TaskGraph


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
