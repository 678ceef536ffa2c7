"""Task graphs as graphs of networkx."""

from __future__ import annotations

import io
import itertools
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from same_timelines import KINDS, timeline_of_kind
from strategies import graphs

import pipesim as ps
from pipesim.errors import ArgumentError, CapacityError


@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_the_precedence(kind: str) -> None:
    graph = timeline_of_kind(kind).graph
    directed = graph.to_networkx()
    waits = graph.precedence
    assert set(directed.edges) == set(zip(waits.values.tolist(), waits.rows.tolist(), strict=True))
    assert list(directed.nodes) == list(range(len(graph)))


@pytest.mark.slow
@given(graph=graphs())
def test_order_of_ids(graph: ps.TaskGraph) -> None:
    """Task ids are a topological order: the first of all orders."""
    directed = graph.to_networkx()
    assert list(nx.lexicographical_topological_sort(directed)) == list(range(len(graph)))


def test_attributes() -> None:
    graph = timeline_of_kind("replicas").graph
    directed = graph.to_networkx()
    assert directed.graph == {
        "name": "1f1b", "n_devices": 8, "n_stages": 4, "n_microbatches": 8, "n_replicas": 2,
    }  # fmt: skip
    for number, node in directed.nodes(data=True):
        task = graph.task(number)
        assert node["label"] == str(task)
        assert (node["op"], node["stream"]) == (task.op.name, task.stream)
        assert [node[x] for x in ("device", "stage", "replica", "peer_stage", "part")] == [
            task.device, task.stage, task.replica, task.peer_stage, task.part,
        ]  # fmt: skip
        assert node["microbatch"] == (-1 if task.microbatch is None else task.microbatch)


def test_kinds_of_edges() -> None:
    """Small: every edge of two stages and one micro-batch, drawn by hand."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), step="none")
    directed = graph.to_networkx()
    label = directed.nodes(data="label")
    edges = {(label[a], label[b]): kind for a, b, kind in directed.edges(data="kind")}
    assert edges == {
        ("0F0", "0SEND_F0"): "dependency",
        ("0SEND_F0", "1RECV_F0"): "message",
        ("1RECV_F0", "1F0"): "dependency",
        ("1F0", "1B0"): "dependency",
        ("1B0", "1SEND_B0"): "dependency",
        ("1SEND_B0", "0RECV_B0"): "message",
        ("0RECV_B0", "0B0"): "dependency",
        ("0F0", "0B0"): "dependency",
    }


def test_kinds_of_edges_of_a_rendezvous_and_of_groups() -> None:
    for kind, word in (("rendezvous", "rendezvous"), ("replicas", "group"), ("plain", "stream")):
        directed = timeline_of_kind(kind).graph.to_networkx()
        assert word in set(nx.get_edge_attributes(directed, "kind").values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipev"])
def test_longest_path_is_the_critical_path(name: str) -> None:
    """Without messages that last, a step takes as long as the longest path."""
    graph = ps.lower(ps.schedule(name, 4, 8))
    costs = ps.Costs([1, 2, 3, 4] * (graph.n_stages // 4), 4, input_grad=2, weight_grad=1)
    timeline = ps.simulate(graph, costs)
    directed, seconds = graph.to_networkx(), timeline.end - timeline.start
    for earlier, later in directed.edges:
        directed.edges[earlier, later]["seconds"] = seconds[earlier]
    path = nx.dag_longest_path(directed, weight="seconds")
    assert float(seconds[path].sum()) == timeline.makespan
    critical = timeline.why.critical_path()
    assert float(np.sum(critical["end"] - critical["start"])) == timeline.makespan
    assert all(directed.has_edge(*pair) for pair in itertools.pairwise(path))


def test_attributes_have_types_of_files() -> None:
    """GraphML takes neither None nor numbers of NumPy."""
    directed = timeline_of_kind("skips").graph.to_networkx()
    file = io.BytesIO()
    nx.write_graphml(directed, file)
    file.seek(0)
    again = nx.read_graphml(file, node_type=int)
    assert dict(again.nodes(data=True)) == dict(directed.nodes(data=True))


def test_without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    expected = r"a networkx graph needs networkx, .* pip install 'pipesim\[networkx\]'"
    with pytest.raises(ArgumentError, match=expected):
        timeline_of_kind("plain").graph.to_networkx()


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.utils.host_memory.available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="a networkx graph of 164 tasks"):
        timeline_of_kind("plain").graph.to_networkx()
