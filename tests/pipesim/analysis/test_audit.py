"""What each kind of wait costs, brings and protects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from strategies import cases, skipping_cases

import pipesim as ps
from pipesim.analysis.audit import MOST_TASKS, _Races
from pipesim.analysis.audit_graphs import inside_actions, kinds_of_waits, remaining, without
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.graph.precedence import Edges
from pipesim.ops import EXCHANGES, RECVS, Op

COSTS = ps.Costs(1, 2, output_bytes=1, optimizer_step=1, network=ps.Network(latency=1, bandwidth=1))


def lowered(name: str = "gpipe", n: int = 2, m: int = 2, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, n, m), **options)


# By hand


def test_a_table_by_hand() -> None:
    """GPipe on two devices; a message takes 1 s of bandwidth and 1 s of latency.

    0 | F0 F1 .. .. .. .. .. .. .. B1 B1 B0 B0
    1 | .. .. .. F0 F1 B1 B1 B0 B0 .. .. .. ..

    The step ends at 13 s. Gradients of B1 leave device 1 at 7 s, and are on device 0 at 9 s.
    """
    table = ps.audit(lowered(step="none"), COSTS)
    assert table.loc["nothing", ["edges", "redundant", "makespan"]].tolist() == [26, 5, 13.0]
    wanted = {
        # name: edges, redundant, seconds, needed
        "F needs RECV_F": (2, 0, 3, True),  # device 1 begins at 0 s
        "SEND_F needs F": (2, 0, 1, True),  # both messages leave at 0 s and 1 s
        "B needs RECV_B": (2, 0, 2, True),
        "B needs F": (4, 4, 0, False),  # the queue says it too
        "RECV_F needs its SEND_F": (2, 0, 3, True),
        "F after F on compute": (2, 0, 0, False),  # both end at 1 s, but share a link
        "B after F on compute": (2, 2, 0, False),
        "B after B on compute": (2, 0, 1, True),  # B0 runs beside B1, sent behind it
        "SEND_F after SEND_F on send": (1, 0, 0, False),
    }
    columns = ["edges", "redundant", "seconds", "needed"]
    rows = {name: tuple(table.loc[name, columns]) for name in wanted}
    assert rows == wanted
    assert table.loc["B after B on compute", "race"] == (
        "0B1 and 0B0: gradients of the weights of stage 0"
    )


@pytest.mark.slow
def test_what_is_removed_is_what_lower_leaves_out() -> None:
    """Rows of streams, host and rendezvous are the makespans of graphs lowered without them."""
    costs = ps.Costs(1, 2, output_bytes=1, launch=0.125, network=ps.Network(1, 2))
    schedules: dict[str, dict[str, Any]] = {"1f1b": {"recompute": "always"}, "interleaved_1f1b": {}}
    for name, options in schedules.items():
        options = {**options, "rendezvous": True}
        table = ps.audit(lowered(name, 3, 6, **options), costs)["makespan"]

        def makespan(name: str = name, costs: ps.Costs = costs, **options: Any) -> float:
            return ps.simulate(lowered(name, 3, 6, **options), costs).makespan

        assert table["a stream a peer and direction"] == makespan(**options, streams="single")
        options["rendezvous"] = False
        assert table["SEND waits until its RECV is reached"] == makespan(**options)
        table = ps.audit(lowered(name, 3, 6, **options), costs)["makespan"]
        assert table["copy streams"] == makespan(**options, overlap=False)
        prompt = ps.Costs(1, 2, output_bytes=1, network=ps.Network(1, 2))
        assert table["host issues tasks one by one"] == makespan(**options, costs=prompt)
        options["streams"] = "per_microbatch"
        table = ps.audit(lowered(name, 3, 6, **options), costs)["makespan"]
        assert table["a stream a micro-batch"] == makespan(**{**options, "streams": "per_peer"})


def test_collectives_and_shared_links() -> None:
    """The reduction overlaps a backward; links of two pipelines are one."""
    link = ps.Link(0, 1, ((0, 1), (2, 3)))
    costs = ps.Costs(1, 2, output_bytes=1, reduce_grad=2, network=ps.Network(links=(link,)))
    table = ps.audit(lowered("1f1b", 2, 2, n_replicas=2, grad_sync="every"), costs)
    assert table.loc["links serve one after the other", "seconds"] > 0
    assert table.loc["collective stream", "seconds"] < 0
    meet = table.loc["members of REDUCE_GRAD meet"]
    assert (meet["edges"], meet["needed"], meet["seconds"]) == (8, True, 0)
    assert meet["redundant"] is pd.NA


@pytest.mark.slow
@pytest.mark.parametrize("work", ["collective", "compute"])
@pytest.mark.parametrize("part", EXCHANGES)
def test_members_of_each_exchange_meet(work: str, part: str) -> None:
    """A member takes what each other replica has written before."""
    sync = "last" if part == "accumulated" else "every"
    options = {"exchange_work": work, "sparse_grad_sync": sync}
    graph = lowered("1f1b", 3, 2, n_replicas=2, sharded=[1], **options)
    members = (graph.op == Op.ALL_TO_ALL) & (graph.part == EXCHANGES.index(part))
    first, second, _ = _Races(graph).conflicts
    of_tasks = np.maximum(first, second) < len(graph)
    first, second = first[of_tasks], second[of_tasks]
    crosses = (graph.replica[first] != graph.replica[second]) & members[second]
    assert set(second[crosses].tolist()) == set(np.flatnonzero(members).tolist())
    graph = lowered("1f1b", n_replicas=2, sharded=[0], **options)
    assert ps.audit(graph, COSTS).loc["members of ALL_TO_ALL meet", "needed"]


def test_rows_name_what_is_exchanged_and_put_in_order() -> None:
    graph = lowered("1f1b", n_replicas=2, sharded=[0], exchange_work="compute")
    names = {kind.name for kind in kinds_of_waits(graph)}
    assert {
        "REORDER.vectors needs ALL_TO_ALL.vectors",
        "ALL_TO_ALL.gradients needs REORDER.gradients",
        "REORDER.vectors after F on compute",
        "B after REORDER.gradients on compute",
        "ALL_TO_ALL.keys after ALL_TO_ALL.counts on collective",
    } <= names
    rows = [name for name in names if "meet" not in name]
    assert not {"REORDER", "ALL_TO_ALL"} & {word for name in rows for word in name.split()}


NEEDED = {
    "offload": ({"offload": "all"}, ["OFFLOAD needs F", "RELOAD needs OFFLOAD", "B needs RELOAD"]),
    "experts": (
        {"n_replicas": 2, "expert_layers": 1},
        ["ALL_TO_ALL.dispatch0 needs F", "F needs ALL_TO_ALL.dispatch0",
         "ALL_TO_ALL.dispatch_grad0 needs B", "B needs ALL_TO_ALL.dispatch_grad0",
         "members of ALL_TO_ALL meet"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_copies_and_exchanges_of_experts_are_needed(name: str) -> None:
    options, rows = NEEDED[name]
    costs = replace(COSTS, network=ps.Network(host=ps.HostLink()))
    table = ps.audit(ps.lower(ps.schedule("gpipe", 2, 4), **options), costs)
    assert table.loc[rows, "needed"].all()


def test_a_rendezvous_does_not_imply_the_queue_it_is_derived_from() -> None:
    """Of one queue: a RECV is reached when what is before it on its stream has ended."""
    graph = lowered("gpipe", 3, 4, rendezvous=True, overlap=False)
    table = ps.audit(graph, ps.Costs(1, 2, output_bytes=1, network=ps.Network(0.5, 1)))
    row = table.loc["RECV_F after SEND_F on compute"]
    assert row["seconds"] > 0
    assert (row["edges"], row["redundant"]) == (3, 0)
    # One by one; of equal edges the first is not implied by those that follow.
    edges = [
        (kind.sort == "rendezvous", a, b)
        for kind in kinds_of_waits(graph)
        for a, b in zip(*(column.tolist() for column in kind.edges), strict=True)
    ]
    implied = 0
    for k, (_, a, b) in enumerate(edges):
        removed = {edge for edge in [(True, a, int(graph.pair[b]))] if graph.op[b] in RECVS}
        after: dict[int, list[int]] = {}
        for n, (of_rendezvous, *ends) in enumerate(edges):
            if (of_rendezvous, *ends) not in removed and (n < k or ends != [a, b]):
                after.setdefault(ends[0], []).append(ends[1])
        implied += walks(after, a, b)
    assert table.loc["nothing", "redundant"] == implied


def test_orders_that_deadlock_have_no_makespan() -> None:
    """A rendezvous on the compute stream."""
    orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), rendezvous=True)
    assert np.isnan(ps.audit(graph, COSTS).loc["copy streams", "makespan"])


def test_a_single_task_waits_for_nothing() -> None:
    graph = ps.lower(ps.schedule("gpipe", 1, 1), step="none", forward_only=True)
    assert ps.audit(graph, ps.Costs(1, 2)).index.tolist() == ["nothing"]


def test_the_page_of_gpipe_shows_a_true_table() -> None:
    """Rows of docs/explanation/gpipe_module.md: name, edges, redundant, seconds, needed."""
    text = (ROOT / "docs/explanation/gpipe_module.md").read_text()
    lines = text.partition("| removed |")[2].partition("\n\n")[0].splitlines()[2:]
    costs = ps.Costs(1, 2, output_bytes=1, network=ps.Network(0.2, 2))
    table = ps.audit(lowered("gpipe", 4, 8, recompute="except_last"), costs)
    for line in lines:
        name, edges, redundant, seconds, needed = map(str.strip, line.strip("|").split("|"))
        row = table.loc[name]
        assert row["edges"] == int(edges)
        assert row["redundant"] is pd.NA if not redundant else row["redundant"] == int(redundant)
        assert row["seconds"] == pytest.approx(float(seconds))
        assert row["needed"] == needed.startswith("yes")
    assert len(lines) == 5


# On random graphs


@pytest.mark.slow
@given(st.one_of(cases(), skipping_cases()))
def test_graphs_have_no_race(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """What `pipesim.lower` makes orders all tasks that use the same data."""
    graph, _ = case
    races = _Races(graph)
    wrong = np.flatnonzero(~races._ordered)[:3]
    assert [races.conflicts.text(graph, int(row)) for row in wrong] == []


@pytest.mark.slow
@settings(max_examples=8)
@given(st.one_of(cases(), skipping_cases()))
def test_edges_are_implied_where_a_path_leads_beside_them(
    case: tuple[ps.TaskGraph, ps.Costs],
) -> None:
    """Counted once more by walking; what the others imply costs nothing, and protects nothing."""
    graph, costs = case
    if len(graph.collectives):  # whose members are one node
        return
    kinds = kinds_of_waits(graph)
    table = ps.audit(graph, costs)
    fixed = inside_actions(graph)
    every = set().union(*(pairs(kind.edges) for kind in kinds), pairs(fixed))
    waits = graph.precedence
    assert every == pairs(Edges(waits.values, waits.rows))
    for kind in kinds:
        others = [fixed, *(derived.edges for derived in remaining(graph, kinds, kind))]
        after: dict[int, list[int]] = {}
        for edges in others:
            for a, b in pairs(edges):
                after.setdefault(a, []).append(b)
        ends = zip(*(column.tolist() for column in kind.edges), strict=True)
        wanted = sum(walks(after, *edge) for edge in ends)
        row = table.loc[kind.name]
        if not len(kind.edges.after):  # a rendezvous of RECVs that are first on their streams
            assert row["redundant"] is pd.NA
            continue
        assert row["redundant"] == wanted
        if wanted == len(kind.edges.after):
            assert not row["needed"]


def pairs(edges: Edges) -> set[tuple[int, int]]:
    """Return each edge as the two tasks."""
    return set(zip(*(column.tolist() for column in edges), strict=True))


def walks(after: dict[int, list[int]], source: int, target: int) -> bool:
    """Tell whether a path leads from one task to another."""
    reached, left = {source}, [source]
    while left:
        for other in after.get(left.pop(), ()):
            if other not in reached and other <= target:
                reached.add(other)
                left.append(other)
    return target in reached


# Mistakes


def test_large_graphs_are_refused() -> None:
    graph = lowered("gpipe", 4, 1800)
    assert len(graph) > MOST_TASKS
    with pytest.raises(ArgumentError, match="at most 20,000 tasks, got <TaskGraph gpipe: 36004"):
        ps.audit(graph, COSTS)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"graph must be a pipesim.TaskGraph, got .*Schedule"):
        ps.audit(ps.schedule("gpipe", 2, 2), COSTS)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"graph must be a pipesim\.TaskGraph, got 3"):
        ps.audit(3, COSTS)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown kind of wait 'B needs S'; did you mean"):
        without(lowered(), "B needs S")
