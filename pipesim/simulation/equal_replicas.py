"""Simulate one of many equal replicas instead of all, where all have the same times.

Copies of a pipeline (`pipesim.graph.copies`) run the same tasks in the same order, each on streams
of its own. They have equal times if nothing tells them apart:

- Tasks have equal costs. Noise and measured times tell copies apart.
- A host launches tasks of one copy alone, if launches take time. Threads of one process wait for
  each other at collectives, one copy after the other, and tell copies apart.
- No message holds a link that a message of another copy holds. In its own copy it shares links with
  the same messages as its twins do.
- A collective shares links with the same messages of each copy. A collective inside a copy, of
  tied stages, counts as a message.

The simulation of the first copy is then exact. By induction over the moments of a simulation, twins
are reached at one moment:

- Streams, dependencies, transfer partners and hosts of twins are twins.
- A collective is reached when the last of its members is. Its members in the first copy are reached
  at the same moments as their twins, so that the maximum over the first copy is that over all.
- Twins ask for links at the same moment. Messages of different copies never wait for each other.
  A collective holds the links of its members in all copies, which is why it is given all of them
  here. It waits for the messages of a copy as for those of the first. It waits for another
  collective if they have any link in common, in whichever copy.
- Ties go to the smaller id. Ids have the same order in all copies, and the id of a collective has
  the same place among those of each copy.

Times are computed by ``max`` and ``+`` of equal values, so that they are equal to the last bit.

`OneOfReplicas` simulates a graph of `lower_replica`, which stands for any number of replicas, for
many costs. Collectives are priced for all members on their devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.kind_routes import GroupRoutes, KindRoutes
from pipesim.costs.pricing import cost_table
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.copies import are_copies
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds
from pipesim.network.network import Network
from pipesim.ops import COLLECTIVES, COMPUTE, COPIES, IN_REPLICA, SENDS, Op
from pipesim.scheduling.placement import Layout, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.engines import compiled, simpy_engine
from pipesim.simulation.engines.compiled import run_plan
from pipesim.simulation.engines.plan import Plan, make_plan, with_several_streams
from pipesim.simulation.overlap_cost import Engine, overlap_seconds, run_twice
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: Tasks of a graph for which the compiled engine looks for copies; fewer take about a millisecond.
_FEWEST_TASKS = 10_000


def run_simpy(graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task (s), by SimPy's engine; equal replicas run once."""
    return run_equal_replicas_once(partial(run_twice, simpy_engine.run), graph, costs)


def run_compiled(graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task (s), by the compiled engine.

    If one pass suffices, all replicas run in it, which takes some ten ns a task: less than to find
    out whether they are equal. Otherwise equal replicas of a large graph run once.
    """
    if costs.table.overlap_cost is not None:
        return run_equal_replicas_once(partial(run_twice, compiled.run), graph, costs)
    plan = make_plan(graph, costs)
    times = compiled.run_in_one_pass(plan)
    if times is None and len(graph) >= _FEWEST_TASKS:
        times = _times_of_first_copy(compiled.run, graph, costs)
    return compiled.run_event_loop(graph, plan) if times is None else times


def run_equal_replicas_once(
    run: Engine, graph: TaskGraph, costs: TaskCosts
) -> tuple[Floats, Floats]:
    """Return start and end of each task (s), equal to those that ``run(graph, costs)`` returns."""
    times = _times_of_first_copy(run, graph, costs)
    return run(graph, costs) if times is None else times


def _times_of_first_copy(
    run: Engine, graph: TaskGraph, costs: TaskCosts
) -> tuple[Floats, Floats] | None:
    """Return start and end of each task, as of its twin in the first copy; None if copies differ.

    Checks that take less time come first.
    """
    table = _table_of_first_copy(graph, costs)
    alone = None if table is None else graph.first_copy
    if table is None or alone is None:
        return None
    start, end = run(alone.graph, TaskCosts(table, alone.graph.kind, None, costs.costs))
    return start[alone.twin], end[alone.twin]


def _table_of_first_copy(graph: TaskGraph, costs: TaskCosts) -> CostTable | None:
    """Return the costs of the kinds of the first copy; None if costs tell the copies apart."""
    is_plain = costs.row is graph.kind and costs.drawn is None and costs.issued is None
    kinds = graph.copies if is_plain and graph.n_replicas > 1 else None
    if kinds is None:
        return None
    table, first = costs.table, kinds[0]
    columns = table.duration, table.latency, table.launch, table.share, table.overlap_cost
    for column in columns:
        if column is not None and (column[kinds] != column[first]).any():
            return None
    if table.launch[first].any() and not _have_own_hosts(graph, kinds):
        return None
    links = _links_of_first_copy(graph, kinds, table)
    if links is None:
        return None
    return table.rows(first)._replace(links=links)


def _have_own_hosts(graph: TaskGraph, kinds: Ints) -> bool:
    """Return whether copies have hosts of their own, alike, that do not wait for each other."""
    if graph.host_threads and graph.host.any() and len(graph.collectives):
        return False
    return are_copies(graph.host[graph.kinds.device[kinds]])


def _links_of_first_copy(graph: TaskGraph, kinds: Ints, table: CostTable) -> Ints | None:
    """Return the links of each kind of the first copy, padded with -1; None if links differ.

    A member of a collective gets the links of its twins too. Links that a single stream holds are
    left out, since tasks of one stream never compete.
    """
    first = kinds[0]
    lasts = table.duration[first] > 0  # a task of 0 s holds no link
    sends = np.flatnonzero(lasts & graph.kinds.is_op(SENDS | COPIES | IN_REPLICA)[first])
    members = np.flatnonzero(lasts & graph.kinds.is_op(COLLECTIVES - IN_REPLICA)[first])
    held = HeldLinks(sends, table.links[kinds[:, sends]], members, table.links[kinds[:, members]])
    return links_of_first_copy(held, graph.stream_of_kind[first])


class HeldLinks(NamedTuple):
    """Links that tasks of all copies hold, padded with -1."""

    #: Kinds of the first copy that are SENDs, OFFLOADs, RELOADs or members of collectives inside a
    #: copy; and their links in each copy, shape ``(n_copies, n, most)``.
    sends: Ints
    sent: Ints
    #: Kinds that are members of collectives of all copies, and their links.
    members: Ints
    joined: Ints


def links_of_first_copy(links: HeldLinks, stream_of_kind: Ints) -> Ints | None:
    """Return the links of each kind of the first copy, padded with -1; None if links differ.

    ``stream_of_kind`` has the streams of the first copy.
    """
    n_held = len(links.joined) * links.joined.shape[2]
    held = np.moveaxis(links.joined, 0, 1).reshape(len(links.members), n_held)
    if not _messages_are_copies(*_renumbered(links.sent, held)):
        return None
    n_columns = max(n_held, links.sent.shape[2])
    own = np.full((len(stream_of_kind), n_columns), -1, dtype=np.int64)
    own[links.sends, : links.sent.shape[2]] = links.sent[0]
    own[links.members, :n_held] = held
    return _without_links_of_one_stream(own, stream_of_kind)


def _renumbered(sent: Ints, held: Ints) -> tuple[Ints, Ints]:
    """Return the links with numbers below a few times the size of the arrays; -1 stays -1.

    Networks number the links of all pairs of devices, of which a graph may use few.
    """
    numbers = np.concatenate([sent.ravel(), held.ravel()])
    if numbers.max(initial=0) > 8 * len(numbers):
        used = numbers >= 0
        numbers[used] = np.unique(numbers[used], return_inverse=True)[1]
    return numbers[: sent.size].reshape(sent.shape), numbers[sent.size :].reshape(held.shape)


def _messages_are_copies(sent: Ints, held: Ints) -> bool:
    """Return whether messages of each copy compete with each other and with collectives alike.

    ``sent`` has the links of the messages of each copy, shape ``(n_copies, n, most)``. ``held`` has
    those of the members of collectives, in all copies: shape ``(n_members, any)``.
    """
    flat = sent.reshape(len(sent), -1)
    used = flat[0] >= 0
    if ((flat >= 0) != used).any() or not are_copies(flat[:, used]):
        return False
    n_links = 1 + max(int(sent.max(initial=0)), int(held.max(initial=0)))
    for links in {row.tobytes(): row for row in held}.values():  # many members hold the same
        holds = np.zeros(n_links + 1, dtype=bool)
        holds[links] = True
        holds[-1] = False  # -1 is no link
        competes: NDArray[np.bool_] = np.any(holds[sent], axis=2)
        if (competes != competes[0]).any():
            return False
    return True


def _without_links_of_one_stream(links: Ints, stream_of_kind: Ints) -> Ints:
    """Return the links of each kind that several streams hold, in as few columns as they need."""
    kind, column = np.nonzero(links >= 0)
    number, stream = links[kind, column], stream_of_kind[kind]
    used, place = np.unique(number, return_inverse=True)
    shared = with_several_streams(place, stream, len(used))[place]
    kind, number = kind[shared], number[shared]
    sizes = np.bincount(kind, minlength=len(links))
    rows = np.full((len(links), max(1, int(sizes.max(initial=0)))), -1, dtype=np.int64)
    rows[kind, np.arange(len(kind)) - (np.cumsum(sizes) - sizes)[kind]] = number
    return rows


@dataclass(eq=False)
class ReplicaRoutes:
    """The network between the devices of equal replicas, and the links that all replicas hold.

    Nothing in it depends on the order of tasks, so that it serves all graphs of the same kinds.
    """

    #: Routes of the kinds of one replica.
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
        columns = [column for x in messages for column in (x.latency, x.bandwidth)]
        rows = (column.reshape(len(devices), -1) for column in columns)
        return all(bool((row == row[0]).all()) for row in rows)

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
    """Routes that graphs share."""

    n_replicas: int
    layout: Layout
    #: Links between the devices of all replicas.
    network: Network
    #: Networks between members of collectives; see `KindRoutes`.
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


def replica_memory_graph(schedule: Schedule) -> TaskGraph:
    """Return a graph without tasks, whose kinds are those of one replica that hold bytes.

    The kinds are compute and gathers of parameters. The optimizer has `LoweringOptions.n_equal`
    shares. The graph stands for any order of tasks in one mini-batch.
    """
    kinds = _with_gathers(compute_kinds(schedule)[0])
    options = LoweringOptions(
        weight_versions=schedule.weight_versions, edges=schedule.placement.edges
    )
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
    """One replica that stands for several equal ones on their devices."""

    #: Tasks of the replica; its ``options.n_equal`` is the number of replicas.
    graph: TaskGraph
    #: Network between the devices of all replicas.
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
        """Routes of the kinds of the replica."""
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
        start, end = run_plan(self.graph, plan)
        if table.overlap_cost is None:
            return ReplicaTimes(start, end, float(self._compute_counts @ table.duration))
        added = overlap_seconds(self.graph, self.graph.kind, table, start, end)
        drawn = table.duration[self.graph.kind] + added
        start, end = run_plan(self.graph, plan._replace(drawn=drawn))
        return ReplicaTimes(start, end, float(drawn[self.graph.is_op(COMPUTE)].sum()))

    def _plan(self, costs: Costs, table: CostTable) -> Plan | None:
        """Return the engine's columns, whose links depend on which tasks take any time."""
        pattern, links = self.replica_routes.links(table)
        if links is None:
            return None
        if pattern not in self._plans:
            tasks = TaskCosts(table._replace(links=links), self.graph.kind, None, costs)
            self._plans[pattern] = make_plan(self.graph, tasks)
        return self._plans[pattern]
