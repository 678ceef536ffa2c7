"""`ReplicaRoutes`: the network between the devices of equal replicas, and the links they hold.

Nothing in it depends on the order of tasks, so that it serves all graphs of the same kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_routes import GroupRoutes
from pipesim.costs.kind_routes import KindRoutes
from pipesim.costs.task_costs import CostTable
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Kinds
from pipesim.network.network import Network
from pipesim.network.routes import Routes
from pipesim.scheduling.placement import Layout, replica_devices
from pipesim.simulation.equal_replicas import HeldLinks, links_of_first_copy
from pipesim.utils.csr import Ints


@dataclass(eq=False)
class ReplicaRoutes:
    """Rows of the kinds of a replica, and the links that all replicas hold.

    Attributes
    ----------
    kinds
        Routes of the kinds of one replica.
    """

    kinds: KindRoutes
    _links: dict[bytes, Ints | None] = field(default_factory=dict)

    def are_equal(self) -> bool:
        """Return whether messages of all replicas have the same latency and bandwidth.

        Messages between the first and the last stage count too: a tied matrix is summed there.
        """
        routes = self.kinds
        devices, ends = _devices(routes), routes.graph.homes[0, [0, -1]]
        messages = [routes.all_messages]
        if ends[0] != ends[1]:
            source, target = devices[:, ends], devices[:, ends[::-1]]
            messages.append(
                routes.network.resolve(source.ravel(), target.ravel(), routes.n_devices)
            )
        return all(_have_equal_rows(x, len(devices)) for x in messages)

    def links(self, table: CostTable) -> tuple[bytes, Ints | None]:
        """Return the links of each kind, those of collectives also of other replicas.

        They depend on which kinds take any time and have any bytes, of which the first value is
        the key. The links are None if replicas hold links differently.
        """
        pattern = (table.duration > 0).tobytes() + (table.nbytes > 0).tobytes()
        if pattern not in self._links:
            self._links[pattern] = self._links_of(table)
        return pattern, self._links[pattern]

    def _links_of(self, table: CostTable) -> Ints | None:
        """Return `links`, made anew."""
        routes, devices = self.kinds, _devices(self.kinds)
        lasts = table.duration > 0  # a task of 0 s holds no link
        links = routes.all_messages.links
        sent = links.reshape(len(devices), len(routes.transfers), links.shape[1])
        held = routes.is_send & lasts[routes.transfers]
        holding = [
            x for x in routes.collectives if lasts[x.members[0]] and table.nbytes[x.members[0]]
        ]
        width = max((x.group.links.shape[1] for x in holding), default=0)
        members = np.concatenate([np.empty(0, np.int64), *(x.members for x in holding)])
        joined = np.full((len(devices), len(members), width), -1, dtype=np.int64)
        column = 0
        for route in holding:
            own = devices[:, routes.graph.kinds.device[route.members]]
            links = route.group.links_of(own)
            joined[:, column : column + len(route.members), : links.shape[2]] = links
            column += len(route.members)
        return links_of_first_copy(
            HeldLinks(routes.transfers[held], sent[:, held], members, joined),
            routes.graph.stream_of_kind,
        )


@dataclass(eq=False)
class SharedRoutes:
    """Routes that graphs share.

    Attributes
    ----------
    n_replicas, layout
        Number of equal replicas, and the order of their devices.
    network
        Links between the devices of all replicas.
    groups
        Networks between members of collectives; see `KindRoutes`.
    """

    n_replicas: int
    layout: Layout
    network: Network
    groups: GroupRoutes = field(default_factory=dict)
    _of_kinds: dict[tuple[Kinds, str], ReplicaRoutes | None] = field(default_factory=dict)

    def routes(self, graph: TaskGraph, all_reduce: str) -> ReplicaRoutes | None:
        """Return the routes of a replica; None if messages of replicas differ.

        They are kept by the kinds of ``graph`` and by ``all_reduce``.
        """
        key = graph.kinds, all_reduce
        if key not in self._of_kinds:
            devices = replica_devices(self.n_replicas, graph.n_devices, self.layout)
            routes = ReplicaRoutes(
                KindRoutes(graph, self.network, all_reduce, devices, self.groups)
            )
            self._of_kinds[key] = routes if routes.are_equal() else None
        return self._of_kinds[key]


def _devices(routes: KindRoutes) -> Ints:
    """Return the devices of each replica; shape ``(n_replicas, n_devices)``."""
    return np.arange(routes.n_devices)[None] if routes.replicas is None else routes.replicas


def _have_equal_rows(messages: Routes, n_rows: int) -> bool:
    """Return whether equal parts of messages have the same latencies and bandwidths."""
    columns: list[NDArray[np.float64]] = [messages.latency, messages.bandwidth]
    rows = [column.reshape(n_rows, -1) for column in columns]
    return all(bool((row == row[0]).all()) for row in rows)
