"""`audit`: cost and benefit of each kind of dependency, wait and stream, and its data races."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.audit_data import Milestones, conflicts
from pipesim.analysis.audit_graphs import (
    WaitKind,
    inside_actions,
    kinds_of_waits,
    merged,
    on_compute,
    remaining,
    without,
)
from pipesim.costs.costs import Costs
from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import ArgumentError, DeadlockError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.precedence import Bits, Edges, ancestors, before
from pipesim.simulation.simulate import checked_costs, predict_timeline
from pipesim.utils.checks import checked
from pipesim.utils.csr import CSR, Ints

if TYPE_CHECKING:
    import pandas as pd


#: One bit for each pair of this many tasks takes 50 MB.
MOST_TASKS = 20_000
_ADVICE = "lower the schedule first: ps.audit(ps.lower(schedule), costs)"


class _Removal(NamedTuple):
    """A removed kind of wait, and the graph without it."""

    sort: str
    name: str
    edges: int  # number of removed edges, or of tasks
    graph: TaskGraph
    costs: TaskCosts
    wait: WaitKind | None = None


@checked
def audit(graph: Annotated[TaskGraph, _ADVICE], costs: Costs | TaskCosts) -> pd.DataFrame:
    """Remove each kind of dependency, wait and stream in turn; return the changes as a table.

    ============== =============================================================================
    sort           removed item
    ============== =============================================================================
    graph          nothing: the first row
    data           the dependencies of a rule (rule 3 of docs/time.md), such as ``B needs R``
    message        the wait of each RECV for its SEND; the RECV then takes no time
    queue          the order of two operations on a stream, such as ``B after F on compute``: where
                   the two are consecutive, the second and all behind it no longer wait for the
                   first and all before it, and may run beside them; if the second is a RECV, its
                   SEND no longer waits for the first by a rendezvous
    collective     the wait of members for each other (rule 9)
    rendezvous     the wait of each SEND until its RECV is reached (rule 6)
    host           the time of hosts to issue tasks (rule 7)
    link           the wait of messages and collectives for links that others hold (rule 8)
    stream         streams: messages share one stream of a device or peer, or run on the compute
                   stream (rule 5), as collectives do
    ============== =============================================================================

    Sorts and rows that the graph does not have are omitted.

    A kind of edges is *needed* if its removal causes a data race: two tasks use the same data, one
    of them writes it, and they are not ordered. Each task reads and writes known data: weights,
    gradients, activations, outputs and messages of its stage, replica and micro-batch. A row that
    is not needed changes times and memory, but no result.

    Parameters
    ----------
    graph
        Graph from `pipesim.lower`, of at most 20,000 tasks; verified first.
    costs
        Costs as for `pipesim.simulate`.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``removed``:

        - ``sort``, as above;
        - ``edges``: number of edges, or of tasks with the removed item;
        - ``redundant``: number of edges that the rest of the graph implies, by a path from one task
          to the other; in the row of the whole graph, edges that others imply, one by one; NA for
          items without edges;
        - ``makespan`` (s) without the item; NaN if tasks would wait for each other for ever;
        - ``seconds`` and ``share`` of the graph's makespan that the item costs; below 0 if the item
          saves time, as a stream may;
        - ``needed``: whether a data race occurs without the item;
        - ``race``: two tasks that then race, and the data, or an empty text.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2), recompute="always")
    >>> table = ps.audit(graph, ps.Costs(forward=1.0, backward=2.0))
    >>> row = table.loc["B after R on compute"]
    >>> float(row["seconds"]), bool(row["needed"])
    (0.0, False)
    """
    from pipesim.utils.packages import pandas as pd

    tasks = checked_costs(graph, costs)
    if len(graph) > MOST_TASKS:
        raise ArgumentError(
            f"audit takes graphs of at most {MOST_TASKS:,} tasks, got {graph!r}: it checks all "
            "pairs of tasks; use fewer micro-batches, which have the same kinds of wait"
        )
    base = predict_timeline(graph, tasks).makespan
    races = _Races(graph)
    rows = [_table_row(row, base, races) for row in _removals(graph, tasks)]
    table = pd.DataFrame.from_records(rows, index="removed")
    return table.astype({"edges": "int64", "redundant": "Int64"})


def _table_row(row: _Removal, base: float, races: _Races) -> dict[str, object]:
    """Simulate the graph of a row; return the row of the table."""
    try:
        makespan = base if row.sort == "graph" else predict_timeline(row.graph, row.costs).makespan
    except DeadlockError:
        makespan = float("nan")
    redundant, race = races.without(row.wait) if row.wait else (None, "")
    if row.sort == "graph":
        redundant = races.n_redundant
    seconds = base - makespan
    return {
        "removed": row.name,
        "sort": row.sort,
        "edges": row.edges,
        "redundant": redundant,
        "makespan": makespan,
        "seconds": seconds,
        "share": seconds / base if base else float("nan"),
        "needed": bool(race),
        "race": race,
    }


class _Races:
    """Data races that the removal of each kind of wait causes.

    Nodes are tasks and `Milestones`, numbered in a topological order. The members of a collective
    are one node, as all of them start and end together.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.graph, self.kinds = graph, kinds_of_waits(graph)
        milestones = Milestones.from_graph(graph)
        keys = np.concatenate([np.arange(len(graph)), milestones.backward - 0.5])
        self.n = len(keys)
        self.position = np.empty(self.n, dtype=np.int64)
        self.position[np.argsort(keys, kind="stable")] = np.arange(self.n)
        self.conflicts = conflicts(graph, self.position)
        self._milestones = milestones
        bits, is_implied = self._closed(None)
        self.n_redundant = self._count_implied(bits, is_implied)
        # In a graph that the user wired, some pairs may race from the start.
        self._ordered = self._are_ordered(bits, self._nodes(None))

    def without(self, wait: WaitKind) -> tuple[int | None, str]:
        """Return the number of its edges that others imply, and a race without it, or no text."""
        bits, _ = self._closed(wait)
        nodes = self._nodes(wait)
        lost = np.flatnonzero(self._ordered & ~self._are_ordered(bits, nodes))
        race = self.conflicts.text(self.graph, int(lost[0])) if len(lost) else ""
        if not len(wait.edges.after):
            return None, race
        ends = (nodes[column] for column in self._own(wait))
        return int(before(bits, *ends).sum()), race

    def _nodes(self, wait: WaitKind | None) -> Ints:
        """Return the node of each task and milestone."""
        representative = np.arange(self.n)
        apart = wait.tasks if wait is not None and wait.sort == "collective" else self.position[:0]
        for number in range(len(self.graph.collectives)):
            members = self.graph.collectives[number]
            if not np.isin(members, apart).any():
                representative[members] = members.min()
        return self.position[representative]

    def _own(self, wait: WaitKind) -> Edges:
        """Return the edges of a kind; a bucket waits for a milestone instead of its backward."""
        first, second = wait.edges
        if not len(self._milestones.backward):
            return wait.edges
        first, n = first.copy(), len(self.graph)
        pairs = np.stack(self._milestones, axis=1).tolist()
        place = {tuple(pair): n + k for k, pair in enumerate(pairs)}
        for k in np.flatnonzero(self.graph.partial_dependency[second] == first).tolist():
            first[k] = place[int(first[k]), int(self.graph.part[second[k]])]
        return Edges(first, second)

    def _closed(self, wait: WaitKind | None) -> tuple[Bits, NDArray[np.bool_]]:
        """Return the ancestors of all nodes without a kind of wait; see `ancestors`."""
        kinds = self.kinds if wait is None else remaining(self.graph, self.kinds, wait)
        edges = Edges.joined(*(self._own(kind) for kind in kinds), inside_actions(self.graph))
        backward, n = self._milestones.backward, len(self.graph)
        if len(backward):
            # A milestone comes after the predecessors of its backward, and before its end.
            into = CSR.group(edges.after, n)
            counts = np.diff(into.ptr)[backward]
            starts = edges.before[into.gather(backward)]
            number = n + np.arange(len(backward))
            reached = Edges(starts, np.repeat(number, counts))
            edges = Edges.joined(edges, reached, Edges(number, backward))
        nodes = self._nodes(wait)
        return ancestors(Edges(nodes[edges.before], nodes[edges.after]), self.n)

    def _count_implied(self, bits: Bits, is_implied: NDArray[np.bool_]) -> int:
        """Return the number of edges that the other edges of the graph imply, one by one.

        An edge of a queue to a RECV is not implied by the rendezvous that is derived from it.
        """
        if not self.kinds:  # a single task
            return 0
        own = Edges.joined(*(self._own(kind) for kind in self.kinds))
        is_implied = is_implied[: len(own.after)].copy()
        sorts = np.repeat([k.sort for k in self.kinds], [len(k.edges.after) for k in self.kinds])
        nodes, into = self._nodes(None), CSR.group(own.after, self.n)
        for derived in np.flatnonzero(sorts == "rendezvous").tolist():
            first, send = int(own.before[derived]), int(own.after[derived])
            edges = into[int(self.graph.pair[send])]
            queued = edges[(sorts[edges] == "queue") & (own.before[edges] == first)]
            # Other paths to the RECV lead over the SEND, without the derived edge, and over its
            # other predecessors.
            others = own.before[edges[~np.isin(edges, queued)]]
            others = nodes[others[others != send]]
            is_implied[queued] = is_implied[derived] or bool(
                (others == nodes[first]).any()
                or before(bits, np.full_like(others, nodes[first]), others).any()
            )
        return int(is_implied.sum())

    def _are_ordered(self, bits: Bits, nodes: Ints) -> NDArray[np.bool_]:
        first, second = nodes[self.conflicts.first], nodes[self.conflicts.second]
        first, second = np.minimum(first, second), np.maximum(first, second)
        ordered: NDArray[np.bool_] = (first == second) | before(bits, first, second)
        return ordered


def _removals(graph: TaskGraph, costs: TaskCosts) -> Iterator[_Removal]:
    kinds = kinds_of_waits(graph)
    yield _Removal("graph", "nothing", sum(len(kind.edges.after) for kind in kinds), graph, costs)
    for kind in kinds:
        n = len(kind.edges.after) or len(kind.tasks)
        yield _Removal(kind.sort, kind.name, n, without(graph, kind), costs, kind)
    issued = costs.issued
    late = np.flatnonzero(costs.launch > 0) if issued is None else np.flatnonzero(issued > 0)
    if len(late):
        table = costs.table._replace(launch=np.zeros_like(costs.table.launch))
        prompt = replace(costs, table=table, issued=None)
        yield _Removal("host", "host issues tasks one by one", len(late), graph, prompt)
    holds = (costs.links >= 0).any(axis=1) & (costs.duration > 0)
    if holds.any():
        table = costs.table._replace(links=np.full_like(costs.table.links, -1))
        free = replace(costs, table=table)
        yield _Removal("link", "links serve one after the other", int(holds.sum()), graph, free)
    yield from _removed_streams(graph, costs)


def _removed_streams(graph: TaskGraph, costs: TaskCosts) -> Iterator[_Removal]:
    """Yield the rows of streams of their own for messages and collectives."""
    names = [name for _, name in graph.streams]
    own = [name.partition(":")[0] for name in names]
    sorts = np.array(own)[graph.stream]
    copies = np.isin(sorts, ["send", "recv", "copy"])
    if any("/" in name for name in names):
        joined = merged(graph, [name.partition("/")[0] for name in names])
        yield _Removal("stream", "a stream a micro-batch", int(copies.sum()), joined, costs)
    if any(name in ("send", "recv") for name in own):
        joined = merged(graph, ["copy" if name in ("send", "recv") else name for name in own])
        yield _Removal("stream", "a stream a peer and direction", int(copies.sum()), joined, costs)
    if copies.any():
        yield _Removal("stream", "copy streams", int(copies.sum()), *on_compute(graph, costs))
    on_collective = int((sorts == "collective").sum())
    if on_collective:
        joined = merged(graph, ["compute" if name == "collective" else name for name in names])
        yield _Removal("stream", "collective stream", on_collective, joined, costs)
