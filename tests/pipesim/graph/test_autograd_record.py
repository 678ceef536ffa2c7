"""The record of an autograd graph, on graphs drawn by hand."""

from __future__ import annotations

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.graph import AutogradGraph, AutogradNode


def graph(edges: list[tuple[int, int]], runs: list[list[int]]) -> AutogradGraph:
    """Return a graph; ``runs`` are the positions of each thread's nodes, -1 elsewhere."""
    nodes = []
    for positions in zip(*runs, strict=True):
        thread, position = max(enumerate(positions), key=lambda pair: pair[1])
        nodes.append(AutogradNode(f"N{len(nodes)}", position=position, thread=thread))
    return AutogradGraph(nodes, edges)


@pytest.mark.parametrize(
    ("edges", "runs", "n_choices"),
    [
        ([(0, 1), (1, 2)], [[0, 1, 2]], 0),  # a chain
        ([(0, 1), (0, 2)], [[0, 1, 2]], 1),  # 1 and 2 are ready after 0
        ([(0, 1), (0, 2)], [[0, 2, 1]], 1),
        ([(0, 1), (0, 2), (0, 3)], [[0, 1, 2, 3]], 2),
        ([(0, 1), (0, 2), (1, 3), (2, 3)], [[0, 1, 2, 3]], 1),
        ([], [[0, 1, 2]], 2),
        # Two threads, in each of which one node is ready at a time.
        ([(0, 1), (0, 2)], [[0, 1, -1], [-1, -1, 2]], 0),
        # 3 and 4 of the second thread are ready once 1 of the first is finished: 2 tells that.
        ([(0, 1), (1, 2), (1, 3), (1, 4)], [[0, 1, 2, -1, -1], [-1, -1, -1, 3, 4]], 1),
        # 2 needs 1, which nothing tells to be finished but that 2 is run; then 3 is ready, too.
        ([(0, 1), (1, 2), (0, 3)], [[0, 1, -1, -1], [-1, -1, 2, 3]], 1),
        # 1 may still be running when 3 is run, and 2 needs it: not known to be a choice.
        ([(0, 1), (1, 2), (0, 3)], [[0, 1, -1, -1], [-1, -1, 3, 2]], 0),
    ],
)
def test_choices(edges: list[tuple[int, int]], runs: list[list[int]], n_choices: int) -> None:
    """How often a thread had several ready nodes."""
    assert graph(edges, runs).n_choices == n_choices


def test_order_and_threads() -> None:
    subject = graph([(0, 1), (0, 2)], [[0, -1, 1], [-1, 2, -1]])
    assert subject.order == ("N0", "N2", "N1")
    assert subject.threads == {0: [0, 2], 1: [1]}
    assert (
        repr(subject) == "<AutogradGraph: 3 nodes, 2 edges; 3 nodes run, 0 choices of the engine>"
    )


def test_before_the_backward() -> None:
    subject = AutogradGraph([AutogradNode("Fork", 1, 0), AutogradNode("Join")], [(0, 1, True)])
    assert (subject.order, subject.threads, subject.n_choices) == ((), {}, None)
    assert repr(subject) == (
        "<AutogradGraph: 2 nodes, 1 edges (1 from fork to join); no backward has run it yet>"
    )
    assert subject.frame["position"].isna().all()


def test_the_table_of_nodes() -> None:
    tasks = (ps.Action(2, ps.Op.R, 3), ps.Action(2, ps.Op.B, 3))
    nodes = [
        AutogradNode("Tasks", tasks=tasks, sequence=7, position=0, thread=0),
        AutogradNode("Layers", 3, 2, tasks[1:], 2**63 - 1, "cuda:1"),
    ]
    frame = AutogradGraph(nodes, [(0, 1)]).frame
    assert frame["tasks"].tolist() == ["2R3 2B3", "2B3"]
    assert frame["microbatch"].isna().tolist() == [True, False]
    assert frame.loc[1, ["name", "microbatch", "partition", "sequence", "device"]].tolist() == [
        "Layers", 3, 2, 2**63 - 1, "cuda:1",
    ]  # fmt: skip
    assert [node.operation for node in nodes] == [None, ps.Op.B]


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 1)])
def test_edges_lead_to_later_nodes(edge: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="list each node after those that run before it"):
        AutogradGraph([AutogradNode("A"), AutogradNode("B")], [edge])
