"""Simulate one of many equal replicas, for many costs, without building the tasks of the others.

A replica is a graph of `pipesim.lowering.lower_replica`. It stands for any number of replicas:
collectives are priced for all members on their devices, and hold the links of all. The times are
those of `pipesim.simulate` for all replicas, to the last bit, under the conditions of
`pipesim.simulation.equal_replicas`, which `OneOfReplicas.make` checks on kinds of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.kind_routes import KindRoutes
from pipesim.costs.pricing import cost_table
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds
from pipesim.ops import COMPUTE, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.engines.compiled import run_plan
from pipesim.simulation.engines.plan import Plan, make_plan
from pipesim.simulation.replica_routes import ReplicaRoutes, SharedRoutes

Floats = NDArray[np.float64]


def replica_memory_graph(schedule: Schedule) -> TaskGraph:
    """Return a graph without tasks, whose kinds are those of one replica that hold bytes.

    The kinds are compute and gathers of parameters. The optimizer has `LoweringOptions.n_equal`
    shares. The graph stands for any order of tasks in one mini-batch.
    """
    kinds = _with_gathers(compute_kinds(schedule)[0])
    options = LoweringOptions(weight_versions=schedule.weight_versions)
    none = np.empty(0, dtype=np.int32)
    return TaskGraph.of_kinds(kinds, none, none, options=options)


@lru_cache(maxsize=32)
def _with_gathers(kinds: Kinds) -> Kinds:
    """Add the kinds of UNSHARD, of each stage of the first replica."""
    device = kinds.homes[0]
    stage, zero = np.arange(len(device)), np.zeros(len(device), dtype=np.int64)
    return kinds.joined(Kinds(np.full_like(stage, Op.UNSHARD), device, stage, zero, zero))


class ReplicaTimes(NamedTuple):
    """Start and end of each task of a replica (s), and seconds that all its devices compute."""

    start: Floats
    end: Floats
    busy: float


@dataclass(eq=False)
class OneOfReplicas:
    """One replica that stands for several equal ones on their devices.

    Attributes
    ----------
    graph
        Tasks of the replica; its ``options.n_equal`` is the number of replicas.
    replica_routes
        Network between the devices of all replicas.
    """

    graph: TaskGraph
    replica_routes: ReplicaRoutes
    _plans: dict[bytes, Plan] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        graph: TaskGraph,
        shared: SharedRoutes,
        all_reduce: str,
    ) -> OneOfReplicas | None:
        """Return the replica of a graph of `lower_replica`; None if messages of replicas differ.

        ``shared`` has the number of replicas, and the routes of other graphs.
        """
        graph = replace(graph, options=replace(graph.options, n_equal=shared.n_replicas))
        routes = shared.routes(graph, all_reduce)
        return None if routes is None else cls(graph, routes)

    @property
    def routes(self) -> KindRoutes:
        """Rows of the kinds of the replica."""
        return self.replica_routes.kinds

    @cached_property
    def _compute_counts(self) -> Floats:
        """Number of tasks of each kind that computes, 0 for others."""
        kinds = self.graph.kinds
        counts = np.bincount(self.graph.kind, minlength=len(kinds))
        return np.asarray(counts * kinds.is_op(COMPUTE), dtype=np.float64)

    def run(self, costs: Costs) -> ReplicaTimes | None:
        """Return the times of the tasks, or None if nothing proves the replicas equal.

        ``costs`` must have the network and the all-reduce of ``routes``.
        """
        table = cost_table(costs, self.routes, with_links=False)
        if table.launch.any():
            return None
        plan = self._plan(costs, table)
        if plan is None:
            return None
        plan = plan._replace(latency=table.latency, duration=table.duration)
        times = run_plan(self.graph, plan)
        return ReplicaTimes(*times, float(self._compute_counts @ table.duration))

    def _plan(self, costs: Costs, table: CostTable) -> Plan | None:
        """Return the engine's columns, whose links depend on which tasks take any time."""
        pattern, links = self.replica_routes.links(table)
        if links is None:
            return None
        if pattern not in self._plans:
            tasks = TaskCosts(table._replace(links=links), self.graph.kind, None, costs)
            self._plans[pattern] = make_plan(self.graph, tasks)
        return self._plans[pattern]
