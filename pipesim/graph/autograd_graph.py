"""The graph that autograd built in a forward, and the order in which torch's engine ran it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pipesim.errors import ArgumentError
from pipesim.ops import Action, Op

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.plot.autograd_plot import autograd_graph, autograd_graph_to_html


@dataclass(frozen=True)
class AutogradNode:
    """One node of an autograd graph.

    Attributes
    ----------
    name
        Its function, without torch's ``Backward0``: ``"Addmm"``, ``"AccumulateGrad"``. Those of
        `pipeexec.GPipe` have torchgpipe's names: ``"Copy"``, ``"Wait"``, ``"Fork"``, ``"Join"``.
    microbatch, partition
        Micro-batch and partition that it works for; None if it works for several, or for none.
    tasks
        Tasks that it issues, in order. Only nodes of `pipeexec.GPipe` issue tasks.
    sequence
        Its sequence number. Each thread numbers the nodes that it makes. Of the ready nodes, a
        thread of the engine runs the one with the largest number. None for ``AccumulateGrad``,
        which runs before all others.
    device
        Device of its output in the forward, such as ``"cpu"`` or ``"cuda:1"``.
    position
        Position in the order in which the engine ran the nodes, from 0; None if it did not run.
    thread
        Number of the engine's thread that ran it, in the order of their first nodes; None if it did
        not run. All nodes on CPUs run in one thread, those of each GPU in another.
    """

    name: str
    microbatch: int | None = None
    partition: int | None = None
    tasks: tuple[Action, ...] = ()
    sequence: int | None = None
    device: str = "cpu"
    position: int | None = None
    thread: int | None = None

    @property
    def operation(self) -> Op | None:
        """Operation of its task, such as ``Op.B``; None if it issues no task, or several."""
        return self.tasks[0].op if len(self.tasks) == 1 else None


class AutogradEdge(NamedTuple):
    """An edge of an autograd graph.

    Attributes
    ----------
    source, target
        Indices of its nodes: the engine runs ``source`` before ``target``.
    is_phony
        Whether it is through a phony tensor, from a fork to a join. Such an edge carries no
        gradient: it orders the backward.
    """

    source: int
    target: int
    is_phony: bool = False


@dataclass(eq=False, repr=False)
class AutogradGraph:
    """The nodes that a backward runs, and after the backward, the order in which they ran.

    `pipeexec.autograd_graph` reads one from the output of a forward. Before the backward no node
    has a position: `order` is empty, and `n_choices` is None. They are there when ``backward()``
    has returned.

    Attributes
    ----------
    nodes
        Each `AutogradNode` comes after those that the engine must run before it.
    edges
        An `AutogradEdge` for each node that another needs.
    """

    nodes: Sequence[AutogradNode]
    edges: Sequence[AutogradEdge]

    if TYPE_CHECKING:  # registered by the rooms that have them
        plot = autograd_graph
        to_html = autograd_graph_to_html

    def __post_init__(self) -> None:
        self.nodes, self.edges = tuple(self.nodes), tuple(AutogradEdge(*x) for x in self.edges)
        for source, target, _ in self.edges:
            if not 0 <= source < target < len(self.nodes):
                raise ArgumentError(
                    f"edges: {source} to {target} in a graph of {len(self.nodes)} nodes; list each "
                    "node after those that run before it"
                )

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        counts = f"{len(self.nodes)} nodes, {len(self.edges)} edges"
        n_phony = sum(edge.is_phony for edge in self.edges)
        if n_phony:
            counts += f" ({n_phony} from fork to join)"
        n_run = len(self.order)
        if not n_run:
            return f"<AutogradGraph: {counts}; no backward has run it yet>"
        choices = f"{self.n_choices} choices of the engine"
        return f"<AutogradGraph: {counts}; {n_run} nodes run, {choices}>"

    @property
    def threads(self) -> Mapping[int, Sequence[int]]:
        """Nodes that each thread of the engine ran, in order, by the number of the thread."""
        nodes: dict[int, list[int]] = {}
        for k in self._run_nodes():
            nodes.setdefault(self.nodes[k].thread or 0, []).append(k)
        return nodes

    def _run_nodes(self) -> list[int]:
        """Return the nodes that the engine ran, in its order."""
        positions = {node.position: k for k, node in enumerate(self.nodes)}
        return [positions[p] for p in sorted(p for p in positions if p is not None)]

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the nodes in the order in which the engine ran them; empty before a backward."""
        return tuple(self.nodes[k].name for k in self._run_nodes())

    @property
    def n_choices(self) -> int | None:
        """How many times a thread of the engine had several ready nodes; None before a backward.

        0 of a chain, whose order is imposed by its edges. With several threads it is a lower bound:
        a node of another thread counts as finished once that thread ran a later one.
        """
        order = self._run_nodes()
        if not order:
            return None
        position = {k: p for p, k in enumerate(order)}
        needs: dict[int, list[int]] = {k: [] for k in order}
        for source, target, _ in self.edges:
            if source in needs and target in needs:
                needs[target].append(source)
        runs = self.threads.values()
        # A node of the same thread is finished when the next one is run.
        next_node = {a: b for run in runs for a, b in pairwise(run)}
        n_choices = 0
        for run in runs:
            own = set(run)
            ready = []  # position behind which each node is ready
            for k in run:
                ends = [position[n if n in own else next_node.get(n, k)] for n in needs[k]]
                ready.append(min(max(ends, default=-1), position[k] - 1))
            ready.sort()
            n_choices += sum(
                bisect_left(ready, position[k]) > n_before + 1 for n_before, k in enumerate(run)
            )
        return n_choices

    @property
    def frame(self) -> pd.DataFrame:
        """A row a node: its attributes; ``tasks`` as text, such as ``"2R3 2B3"``."""
        from pipesim.utils.packages import pandas as pd

        columns = [field.name for field in fields(AutogradNode)]
        rows = [[getattr(node, name) for name in columns] for node in self.nodes]
        frame = pd.DataFrame(rows, columns=columns)
        frame["tasks"] = [" ".join(map(str, node.tasks)) for node in self.nodes]
        numbers = ["microbatch", "partition", "sequence", "position", "thread"]
        return frame.astype(dict.fromkeys(numbers, "Int64"))
