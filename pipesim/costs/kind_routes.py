"""Routes of a graph's messages and collectives: members, links, and the network between them.

Nothing here depends on seconds and bytes, so that one `KindRoutes` serves all costs of a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Kinds
from pipesim.network.collectives import all_reduce_seconds
from pipesim.network.network import Network
from pipesim.network.routes import Routes
from pipesim.ops import COLLECTIVES, COPIES, OF_DEVICES, RECVS, SENDS, Op
from pipesim.utils.csr import Ints


class StageMembers(NamedTuple):
    """Members of a collective that are of one stage."""

    stage: int
    op: Op  # of the first of them, as is `part`
    part: int
    kinds: Ints

    @property
    def is_whole(self) -> bool:
        """Whether they reduce all gradients of the stage, or gather its parameters."""
        is_whole = self.part < 0 or self.op == Op.UNSHARD
        return self.op != Op.ALL_TO_ALL and self.op not in OF_DEVICES and is_whole


@dataclass(frozen=True, eq=False)
class GroupRoute:
    """Network between the members of a collective, which collectives of other stages may share."""

    devices: Ints  # sorted; also those of equal replicas that the graph stands for
    n_devices: int  # of the network
    network: Network
    algorithm: str  # "all_to_all" for exchanges

    @cached_property
    def seconds(self) -> Callable[[float], float]:
        """Seconds of an all-reduce between the members as a function of bytes.

        Costs that differ in few stages ask for the same bytes again.
        """
        return lru_cache(256)(all_reduce_seconds(self.network, self.devices, self.algorithm))

    @cached_property
    def half_seconds(self) -> Callable[[float], float]:
        """Seconds of half an all-reduce, a reduce-scatter or an all-gather, likewise."""
        members = self.network, self.devices, self.algorithm
        return lru_cache(256)(all_reduce_seconds(*members, is_half=True))

    def formula(self, is_half: bool) -> Callable[[float], float]:
        """Return `half_seconds` or `seconds`."""
        return self.half_seconds if is_half else self.seconds

    @cached_property
    def links(self) -> Ints:
        """Links that each of ``devices`` holds; shape ``(len(devices), most)``."""
        return self.network.collective_links(self.algorithm, self.devices, self.n_devices)

    def part(self, step: int) -> GroupRoute:
        """Return the network between every ``step``-th of the devices, the first included."""
        return GroupRoute(self.devices[::step], self.n_devices, self.network, self.algorithm)

    def links_of(self, devices: Ints) -> Ints:
        """Return the links that some of ``devices`` hold, in any shape, with one more axis."""
        held: Ints = self.links[np.searchsorted(self.devices, devices)]
        return held


#: Networks between members, by their sorted devices as bytes, and the algorithm.
GroupRoutes: TypeAlias = dict[tuple[bytes, str], GroupRoute]


@dataclass(frozen=True, eq=False)
class CollectiveRoute:
    """Members of a collective, and the network between them."""

    members: Ints  # kinds of those in the graph
    rows: tuple[StageMembers, ...]
    own_devices: Ints  # device of each of `members`
    group: GroupRoute

    @property
    def seconds(self) -> Callable[[float], float]:
        """`GroupRoute.seconds`."""
        return self.group.seconds

    @cached_property
    def links(self) -> Ints:
        """Links that each of ``members`` holds; shape ``(len(members), most)``."""
        return self.group.links_of(self.own_devices)


class WholeReductions(NamedTuple):
    """Reductions of all gradients of a stage, or gathers of its parameters."""

    stages: Ints  # of each of them, as are `routes`, `seconds` and `halves`
    routes: tuple[CollectiveRoute, ...]
    seconds: tuple[Callable[[float], float], ...]
    halves: tuple[bool, ...]  # half of an all-reduce: a reduce-scatter, or an all-gather
    kinds: Ints  # of all members
    row: Ints  # position of each member's collective in `stages`


@dataclass(frozen=True, eq=False)
class KindRoutes:
    """Rows of the kinds of a graph, and the links between its devices.

    Attributes
    ----------
    replicas
        Devices of each of the equal replicas for which the one of the graph stands: row r has those
        of replica r, one for each device of the graph. None if the graph has all replicas.
    groups
        Networks between members of collectives. Graphs of the same network and replicas may share
        one mapping.
    """

    graph: TaskGraph
    network: Network
    all_reduce: str
    replicas: Ints | None = None
    groups: GroupRoutes = field(default_factory=dict)

    @property
    def n_devices(self) -> int:
        """Number of devices of the network."""
        return self.graph.n_devices if self.replicas is None else self.replicas.size

    def true_devices(self, devices: Ints) -> Ints:
        """Return the numbers in the network of devices of the graph."""
        return devices if self.replicas is None else self.replicas[0][devices]

    @cached_property
    def transfers(self) -> Ints:
        """Kinds of messages."""
        return np.flatnonzero(self.graph.kinds.is_op(SENDS | RECVS))

    @cached_property
    def is_send(self) -> NDArray[np.bool_]:
        """Which of ``transfers`` are SENDs."""
        return np.asarray(self.graph.kinds.is_op(SENDS)[self.transfers], dtype=bool)

    @cached_property
    def messages(self) -> Routes:
        """Links, latency and bandwidth of ``transfers``."""
        n, (links, latency, bandwidth) = len(self.transfers), self.all_messages
        return Routes(links[:n], latency[:n], bandwidth[:n])

    @cached_property
    def all_messages(self) -> Routes:
        """Links, latency and bandwidth of ``transfers`` of all replicas, one after the other."""
        source, target = message_ends(self.graph, self.transfers)
        if self.replicas is not None:
            source, target = self.replicas[:, source].ravel(), self.replicas[:, target].ravel()
        return self.network.resolve(source, target, self.n_devices)

    @cached_property
    def sends(self) -> tuple[Ints, NDArray[np.float64]]:
        """Kinds of SENDs, and the bandwidth of each (bytes a second)."""
        return self.transfers[self.is_send], self.messages.bandwidth[self.is_send]

    @cached_property
    def latency(self) -> NDArray[np.float64]:
        """Latency of each kind (s), 0 for those that are no messages."""
        latency = np.zeros(len(self.graph.kinds))
        latency[self.transfers] = self.messages.latency
        return latency

    @cached_property
    def links(self) -> Ints:
        """Links that SENDs and copies of each kind hold; -1 for other kinds."""
        links = np.full((len(self.graph.kinds), self.messages.links.shape[1]), -1, dtype=np.int64)
        links[self.sends[0]] = self.messages.links[self.is_send]
        rows, routes = self.copies
        if routes is not None and np.isfinite(routes.bandwidth).all():
            links = widened(links, routes.links.shape[1])
            links[rows, : routes.links.shape[1]] = routes.links
        return links

    @cached_property
    def copies(self) -> tuple[Ints, Routes | None]:
        """Kinds of OFFLOADs and RELOADs, and the links of each; None for a host without links."""
        kinds = self.graph.kinds
        if kinds.ops.isdisjoint(COPIES):
            return np.empty(0, dtype=np.int64), None
        rows = np.flatnonzero(kinds.is_op(COPIES))
        is_offload = kinds.op[rows] == Op.OFFLOAD
        devices = self.true_devices(kinds.device[rows])
        if self.graph.offload_to == "peer":
            peers = self.true_devices(self.graph.offload_peers[kinds.device[rows]])
            source, target = np.where(is_offload, (devices, peers), (peers, devices))
            return rows, self.network.resolve(source, target, self.n_devices)
        if self.network.host is None:
            return rows, None
        return rows, self.network.resolve_host(devices, is_offload, self.n_devices)

    @cached_property
    def rows_of_ops(self) -> dict[Op, tuple[Ints, Ints]]:
        """Kinds of each operation, and their stages."""
        kinds = self.graph.kinds
        rows = ((Op(op), np.flatnonzero(kinds.op == op)) for op in sorted(kinds.ops))
        return {op: (own, kinds.stage[own]) for op, own in rows}

    @cached_property
    def message_rows(self) -> tuple[Ints, Ints]:
        """`message_rows` of the graph's kinds."""
        return message_rows(self.graph.kinds)

    @cached_property
    def n_buckets(self) -> Ints:
        """Number of gradient buckets of each stage; 0 for a stage without buckets."""
        n_buckets = np.zeros(self.graph.n_stages, dtype=np.int64)
        kinds = self.graph.kinds
        rows = kinds.op == Op.REDUCE_GRAD
        np.maximum.at(n_buckets, kinds.stage[rows], kinds.part[rows] + 1)
        return n_buckets

    @cached_property
    def collectives(self) -> tuple[CollectiveRoute, ...]:
        """Collectives, without repeated ones, whose members have the same kinds."""
        kinds, rows = self.graph.kinds, self.graph.collectives
        if not len(rows):
            return ()
        members = self.graph.kind[rows.values]
        stage, device, first = kinds.stage[members], kinds.device[members], rows.ptr[:-1]
        exchanges = np.logical_or.reduceat(kinds.op[members] == Op.ALL_TO_ALL, first).tolist()
        halves = np.logical_or.reduceat(self.graph.optimizer_shares[stage] > 1, first).tolist()
        of_devices = np.logical_or.reduceat(kinds.is_op(OF_DEVICES)[members], first).tolist()
        done, routes = ~kinds.is_op(COLLECTIVES), []
        for row, (begin, end) in enumerate(itertools.pairwise(rows.ptr.tolist())):
            own = members[begin:end]
            if done[own].all():
                continue
            done[own] = True
            name = "all_to_all" if exchanges[row] else "ring" if halves[row] else self.all_reduce
            name = "fastest" if of_devices[row] else name
            devices = device[begin:end]
            routes.append(
                CollectiveRoute(
                    own,
                    self._members_by_stage(own, stage[begin:end]),
                    self.true_devices(devices),
                    self._group(devices, name),
                )
            )
        return tuple(routes)

    def _group(self, devices: Ints, algorithm: str) -> GroupRoute:
        key = (np.sort(devices).tobytes(), algorithm)
        if key not in self.groups:
            members = np.unique(devices if self.replicas is None else self.replicas[:, devices])
            self.groups[key] = GroupRoute(members, self.n_devices, self.network, algorithm)
        return self.groups[key]

    def _members_by_stage(self, members: Ints, stage: Ints) -> tuple[StageMembers, ...]:
        """Return the members of a collective, given the stage of each, by stage."""
        kinds, numbers = self.graph.kinds, sorted(set(stage.tolist()))
        rows = [(k, members[stage == k] if len(numbers) > 1 else members) for k in numbers]
        return tuple(
            StageMembers(k, Op(kinds.op[own[0]]), int(kinds.part[own[0]]), own) for k, own in rows
        )

    @cached_property
    def whole_reductions(self) -> dict[Op, WholeReductions]:
        """REDUCE_GRADs of all gradients of a stage, and UNSHARDs, by operation."""
        pairs: dict[Op, list[tuple[CollectiveRoute, StageMembers]]] = {}
        for route in self.collectives:
            for members in route.rows:
                if members.is_whole:
                    pairs.setdefault(members.op, []).append((route, members))
        shares = self.graph.optimizer_shares
        reductions = {}
        for op, own in pairs.items():
            stages = np.array([members.stage for _, members in own])
            halves = tuple((shares[stages] > 1).tolist())
            reductions[op] = WholeReductions(
                stages,
                tuple(route for route, _ in own),
                tuple(x.group.formula(h) for (x, _), h in zip(own, halves, strict=True)),
                halves,
                np.concatenate([members.kinds for _, members in own]),
                np.repeat(np.arange(len(own)), [len(members.kinds) for _, members in own]),
            )
        return reductions

    @cached_property
    def partial_members(self) -> tuple[tuple[CollectiveRoute, StageMembers], ...]:
        """Members of reductions of buckets and of exchanges, each with its collective."""
        pairs = ((route, members) for route in self.collectives for members in route.rows)
        return tuple(pair for pair in pairs if not (pair[1].is_whole or pair[1].op in OF_DEVICES))

    @cached_property
    def device_collectives(self) -> tuple[CollectiveRoute, ...]:
        """Collectives with one member a device: REDUCE_TIED and GRAD_NORM."""
        return tuple(route for route in self.collectives if route.rows[0].op in OF_DEVICES)


def widened(links: Ints, width: int) -> Ints:
    """Return links with at least ``width`` columns; those added have -1."""
    missing = width - links.shape[1]
    return np.pad(links, ((0, 0), (0, missing)), constant_values=-1) if missing > 0 else links


def message_ends(graph: TaskGraph, transfers: Ints) -> tuple[Ints, Ints]:
    """Return the sending and the receiving device of each kind in ``transfers``.

    If the graph lacks the other end of a message, device 0 stands for it.
    """
    kinds, peer = graph.kinds, graph.peer_of_kind[transfers]
    is_send = kinds.is_op(SENDS)[transfers]
    own, other = kinds.device[transfers], np.where(peer >= 0, kinds.device[peer], 0)
    return np.where(is_send, own, other), np.where(is_send, other, own)


def message_rows(kinds: Kinds) -> tuple[Ints, Ints]:
    """Return the kinds of messages, and the stage of each output or its gradient.

    Messages of skip connections are not among them.
    """
    rows, stages = [], []
    for op, offset in ((Op.SEND_F, 0), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 0)):
        own = np.flatnonzero((kinds.op == op) & (kinds.peer_stage < 0))
        rows.append(own)
        stages.append(kinds.stage[own] + offset)
    return np.concatenate(rows), np.concatenate(stages)
