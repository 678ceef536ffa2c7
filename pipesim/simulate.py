"""`simulate`: a task graph and its costs to a timeline, by the engine of your choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipesim.costs import Costs, TaskCosts
from pipesim.engines import simpy_engine
from pipesim.errors import ArgumentError, check_name
from pipesim.graph import TaskGraph
from pipesim.timeline import Timeline
from pipesim.verify import verify

__all__ = ["simulate"]

Engine = Callable[[TaskGraph, TaskCosts], tuple[NDArray[np.float64], NDArray[np.float64]]]
_ENGINES: dict[str, Engine] = {"simpy": simpy_engine.run}


def simulate(graph: TaskGraph, costs: Costs | TaskCosts, *, engine: str = "simpy") -> Timeline:
    """Predict when each task of ``graph`` runs.

    Parameters
    ----------
    graph
        From `pipesim.lower`; verified first.
    costs
        Of each stage, or, to replay a run, of each task.
    engine
        ``"simpy"``, the reference.

    Raises
    ------
    CostsError
        If the costs lack an operation of the graph, or are of another number of stages.
    DeadlockError
        If tasks would wait for each other for ever; nothing is run then.
    """
    run = _ENGINES[check_name("engine", engine, _ENGINES)]
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"simulate takes a TaskGraph, got {type(graph).__name__}; lower the schedule first: "
            "ps.simulate(ps.lower(schedule), costs)"
        )
    if not isinstance(costs, (Costs, TaskCosts)):
        raise ArgumentError(f"costs must be a pipesim.Costs, got {costs!r}")
    verify(graph)
    tasks = costs.of(graph) if isinstance(costs, Costs) else costs
    start, end = run(graph, tasks)
    return Timeline(graph, start, end, tasks.nbytes, tasks.costs)
