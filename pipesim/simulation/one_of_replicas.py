"""Simulate one of many equal replicas, for many costs, without building the tasks of the others.

A replica is a graph of `pipesim.lowering.lower_replica`. It stands for any number of replicas:
collectives are priced for all members on their devices, and hold the links of all. The times are
those of `pipesim.simulate` for all replicas, to the last bit, under the conditions of
`pipesim.simulation.equal_replicas`, which `OneOfReplicas.make` checks on kinds of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_routes import GroupRoutes
from pipesim.costs.costs import Costs
from pipesim.costs.kind_routes import KindRoutes, message_ends
from pipesim.costs.pricing import cost_table
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds
from pipesim.network.network import Network
from pipesim.ops import COMPUTE, SENDS, Op
from pipesim.scheduling.placement import Layout, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.engines.compiled import run_event_loop, run_in_one_pass
from pipesim.simulation.engines.plan import Plan, make_plan
from pipesim.simulation.equal_replicas import HeldLinks, links_of_first_copy
from pipesim.utils.csr import Ints

__all__ = ["OneOfReplicas", "ReplicaTimes", "replica_memory_graph"]

Floats = NDArray[np.float64]


def replica_memory_graph(schedule: Schedule) -> TaskGraph:
    """Return the kinds of one replica that hold bytes: its compute, and gathers of parameters.

    Its optimizer has `LoweringOptions.n_equal` shares. The graph has no tasks, and stands for any
    order of them in one mini-batch.
    """
    kinds, _ = compute_kinds(schedule)
    device = np.array(schedule.placement.paths[0])
    stage, zero = np.arange(len(device)), np.zeros(len(device), dtype=np.int64)
    gathers = Kinds(np.full_like(stage, Op.UNSHARD), device, stage, zero, zero)
    options = LoweringOptions(weight_versions=schedule.weight_versions)
    none = np.empty(0, dtype=np.int32)
    return TaskGraph.of_kinds(kinds.joined(gathers), none, none, options=options)


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
    routes
        Graph of the replica, and the network between the devices of all replicas.
    """

    routes: KindRoutes
    _plans: dict[bytes, Plan | None] = field(default_factory=dict)
    _competes: bool = False  # for links under some costs, and so probably under others

    @classmethod
    def make(
        cls,
        graph: TaskGraph,
        n_replicas: int,
        layout: Layout,
        network: Network,
        all_reduce: str,
        groups: GroupRoutes | None = None,
    ) -> OneOfReplicas | None:
        """Return the replica of a graph of `lower_replica`; None if messages of replicas differ.

        ``groups`` are those of `KindRoutes`.
        """
        graph = replace(graph, options=replace(graph.options, n_equal=n_replicas))
        devices = replica_devices(n_replicas, graph.n_devices, layout)
        routes = KindRoutes(graph, network, all_reduce, devices, {} if groups is None else groups)
        return cls(routes) if _messages_are_equal(routes) else None

    @property
    def graph(self) -> TaskGraph:
        """Tasks of the replica; its ``options.n_equal`` is the number of replicas."""
        return self.routes.graph

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
        times = None if self._competes else run_in_one_pass(plan)
        if times is None:
            self._competes = True
            times = run_event_loop(self.graph, plan)
        return ReplicaTimes(*times, float(self._compute_counts @ table.duration))

    def _plan(self, costs: Costs, table: CostTable) -> Plan | None:
        """Return the engine's columns, whose links depend on which tasks take any time."""
        pattern = (table.duration > 0).tobytes() + (table.nbytes > 0).tobytes()
        if pattern not in self._plans:
            links = self._links(table)
            self._plans[pattern] = None
            if links is not None:
                tasks = TaskCosts(table._replace(links=links), self.graph.kind, None, costs)
                self._plans[pattern] = make_plan(self.graph, tasks)
        return self._plans[pattern]

    def _links(self, table: CostTable) -> Ints | None:
        """Return the links of each kind, those of collectives also of other replicas."""
        routes = self.routes
        lasts = table.duration > 0  # a task of 0 s holds no link
        sends = np.flatnonzero(lasts & self.graph.kinds.is_op(SENDS))
        sent = _links_of_all(routes, sends)
        held = [x for x in routes.collectives if lasts[x.members[0]] and table.nbytes[x.members[0]]]
        width = max((x.group.links.shape[1] for x in held), default=0)
        members = np.concatenate([x.members for x in held]) if held else np.empty(0, np.int64)
        joined = np.full((len(sent), len(members), width), -1, dtype=np.int64)
        column = 0
        for route in held:
            devices = _devices(routes)[:, self.graph.kinds.device[route.members]]
            links = route.group.links_of(devices)
            joined[:, column : column + len(route.members), : links.shape[2]] = links
            column += len(route.members)
        return links_of_first_copy(
            HeldLinks(sends, sent, members, joined), self.graph.stream_of_kind
        )


def _devices(routes: KindRoutes) -> Ints:
    """Return the devices of each replica; shape ``(n_replicas, n_devices)``."""
    return np.arange(routes.n_devices)[None] if routes.replicas is None else routes.replicas


def _links_of_all(routes: KindRoutes, sends: Ints) -> Ints:
    """Return the links that SENDs of all replicas hold; shape ``(n_replicas, n, most)``."""
    devices = _devices(routes)
    source, target = message_ends(routes.graph, sends)
    routed = routes.network.resolve(
        devices[:, source].ravel(), devices[:, target].ravel(), routes.n_devices
    )
    return routed.links.reshape(len(devices), len(sends), routed.links.shape[1])


def _messages_are_equal(routes: KindRoutes) -> bool:
    """Return whether messages of all replicas have the same latency and bandwidth.

    Messages between the first and the last stage count too: a tied matrix is summed there.
    """
    devices, graph = _devices(routes), routes.graph
    source, target = message_ends(graph, routes.transfers)
    ends = graph.homes[0, [0, -1]]
    if ends[0] != ends[1]:
        source, target = np.append(source, ends), np.append(target, ends[::-1])
    routed = routes.network.resolve(
        devices[:, source].ravel(), devices[:, target].ravel(), routes.n_devices
    )
    for values in (routed.latency, routed.bandwidth):
        rows = values.reshape(len(devices), -1)
        if (rows != rows[0]).any():
            return False
    return True
