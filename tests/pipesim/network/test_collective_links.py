"""Collectives and the links that they hold: who waits for whom, and which links those are.

``make fuzz`` runs the property of both engines with more examples.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import as_python, compiled
from rules import assert_rules_hold
from strategies import networks

import pipesim as ps
from pipesim.analysis.blocking import last_link_holder
from pipesim.costs import TaskCosts
from pipesim.errors import NetworkError, UnknownNameError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.ops import Op
from pipesim.simulation import LogNormal
from pipesim.simulation.engines import compiled as engine
from pipesim.simulation.engines import simpy_engine

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
ENGINES = ("compiled", "simpy")
#: Nodes of four devices behind one NIC each way: device 0 to 3, 4 to 7, and so on.
NICS = ps.Network(nodes=ps.Nodes(4, nic_bandwidth=1, n_nics=1))

Use = tuple[int, int, int, int]


def traffic(
    uses: Sequence[Use], network: ps.Network, all_reduce: str = "ring"
) -> tuple[TaskGraph, TaskCosts]:
    """Return a graph of messages and all-reduces alone, in the order of their ids.

    ``(sender, receiver, asked at, seconds)`` is a message, and ``(device, -k, asked at, seconds)``
    a member of all-reduce k. An F that lasts until then comes before each.
    """
    columns, group = [], []
    lasts: dict[tuple[int, int, int], float] = {}
    for replica, (device, other, start, seconds) in enumerate(uses):
        columns.append((Op.F, device, 0, StreamKind.COMPUTE, replica))
        lasts[replica, Op.F, 0], lasts[replica, Op.F, 1] = start, 0.0
        lasts[replica, Op.REDUCE_GRAD, 0] = lasts[replica, Op.SEND_F, 0] = seconds
        if other < 0:
            columns.append((Op.REDUCE_GRAD, device, 0, StreamKind.COMPUTE, replica))
            group += [-1, -other]
            continue
        columns += [
            (Op.SEND_F, device, 0, StreamKind.send(np.int64(other)), replica),
            (Op.RECV_F, other, 1, StreamKind.recv(np.int64(device)), replica),
            (Op.F, other, 1, StreamKind.COMPUTE, replica),
        ]
        group += [-1] * 4
    op, device, stage, stream, replica = np.array(columns, dtype=np.int64).T
    tasks = Tasks(op, device, stage, np.zeros_like(op), stream, replica)
    graph = TaskGraph.build(tasks, group=np.array(group))
    costs = ps.Costs(
        1, 1, output_bytes=1, parameter_bytes=1, network=network, all_reduce=all_reduce
    )
    drawn = [lasts.get((task.replica, task.op, task.stage), 0.0) for task in graph]
    return graph, replace(costs.of(graph), drawn=np.array(drawn, dtype=float))


# Who waits, drawn by hand


@pytest.mark.parametrize("name", ENGINES)
def test_reduction_waits_for_a_message(name: str) -> None:
    """Rules 8, 9: 1 and 8 reduce over the NICs of nodes 0 and 2, both ways.

    All are there at 2, and the NIC out of node 0 is busy until 4. Meanwhile the NIC out of node 2
    stands idle, although 9 to 12, ready at 3, could have it: no message overtakes in a queue.
    13 to 4 uses neither of these nodes' NICs.
    """
    graph, tasks = traffic(
        [(0, 4, 1, 3), (1, -1, 1, 2), (8, -1, 2, 2), (9, 12, 3, 1), (13, 6, 5, 1)], NICS
    )
    timeline = ps.simulate(graph, tasks, engine=name)
    assert draw(timeline, rows="^[18]$|send") == grid("""
        0 send:4  | .. F0 F0 F0 .. .. ..
        1         | F0 .. .. .. RG RG ..
        8         | F0 F0 .. .. RG RG ..
        9 send:12 | .. .. .. .. .. .. F0
        13 send:6 | .. .. .. .. .. F0 ..
    """)
    message = np.flatnonzero(graph.op == Op.SEND_F)[0]
    assert (last_link_holder(timeline)[graph.group >= 0] == message).all(), "8 waits for it with 1"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("first", [True, False])
def test_message_and_reduction_of_one_moment(first: bool, name: str) -> None:
    """Rule 8: of the two that ask at 2, the one with the smaller id goes first."""
    message, members = (1, 5, 2, 1), [(0, -1, 1, 2), (4, -1, 2, 2)]
    uses = [*members, message] if first else [message, *members]
    timeline = ps.simulate(*traffic(uses, NICS), engine=name)
    assert draw(timeline, rows="^[04]$|send") == grid(
        """
        0        | F0 .. RG RG ..
        1 send:5 | .. .. .. .. F0
        4        | F0 F0 RG RG ..
        """
        if first
        else """
        0        | F0 .. .. RG RG
        1 send:5 | .. .. F0 .. ..
        4        | F0 F0 .. RG RG
        """
    )


@pytest.mark.parametrize("name", ENGINES)
def test_messages_between_the_pieces_of_a_reduction(name: str) -> None:
    """Neither waits for the other; the second message waits for the first."""
    uses = [(0, -1, 1, 2), (4, -1, 2, 2), (1, 5, 2, 1), (2, 6, 2, 1)]
    network = replace(NICS, interleaves=True)
    timeline = ps.simulate(*traffic(uses, network), engine=name)
    assert draw(timeline, rows="^[04]$|send") == grid("""
        0        | F0 .. RG RG
        1 send:5 | .. .. F0 ..
        2 send:6 | .. .. .. F0
        4        | F0 F0 RG RG
    """)
    assert ps.Network.from_dict(network.to_dict()) == network
    assert network.scaled(bandwidth=2).interleaves
    assert "interleave" in network._repr_html_()


@pytest.mark.parametrize("name", ENGINES)
def test_reductions_of_two_stages_share_a_nic(name: str) -> None:
    """Rule 9: stage 0's gradients are there at 4, and stage 1's hold both NICs until 5."""
    nodes = ps.Nodes(2, nic_bandwidth=1, n_nics=1)
    costs = ps.Costs(1, 1, optimizer_step=1, parameter_bytes=2, network=ps.Network(nodes=nodes))
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    timeline = ps.simulate(graph, costs, engine=name)
    assert draw(timeline, rows="^.$|coll") == grid("""
        0            | F0 .. .. B0 .. .. .. ST
        0 collective | .. .. .. .. .. RG RG ..
        1            | .. F0 B0 .. .. ST .. ..
        1 collective | .. .. .. RG RG .. .. ..
        2            | F0 .. .. B0 .. .. .. ST
        2 collective | .. .. .. .. .. RG RG ..
        3            | .. F0 B0 .. .. ST .. ..
        3 collective | .. .. .. RG RG .. .. ..
    """)
    waited = timeline.why.idle_by_cause().loc[0, ["contention", "bandwidth"]]
    assert waited.tolist() == [1, 2], "from 4 to 7 device 0 waits for stage 1's, then for its own"


@pytest.mark.parametrize("name", ENGINES)
def test_what_takes_no_time_or_no_bytes_holds_nothing(name: str) -> None:
    """Rule 9: a reduction that lasts nothing, or latency alone, lets the message go at once."""
    uses = [(0, -1, 1, 0), (4, -1, 1, 0), (1, 5, 0, 3)]
    timeline = ps.simulate(*traffic(uses, NICS), engine=name)
    assert timeline.start[timeline.graph.group >= 0].tolist() == [1, 1]
    slow = ps.Network(nodes=ps.Nodes(1, nic_latency=2.0, nic_bandwidth=1))
    empty = ps.Costs(1, 1, output_bytes=2, parameter_bytes=0, network=slow)
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    timeline = ps.simulate(graph, empty, engine=name)
    of_first = (graph.op == Op.REDUCE_GRAD) & (graph.stage == 1)
    of_last = (graph.op == Op.SEND_B) & (graph.stage == 1)
    assert timeline.start[of_first].tolist() == timeline.start[of_last].tolist()
    assert set(timeline.duration[of_first]) == {4.0}


@pytest.mark.parametrize("name", ENGINES)
def test_a_link_is_held_until_the_last_member_ends(name: str) -> None:
    """Up and down both trees 0 and 1 leave node 0 by its NIC, until 3 and 1; a message waits."""
    uses = [(0, -1, 0, 3), (1, -1, 0, 1), (4, -1, 0, 1), (5, -1, 0, 1), (2, 6, 1, 1)]
    timeline = ps.simulate(*traffic(uses, NICS, "tree"), engine=name)
    assert draw(timeline, rows="^[01]$|send") == grid("""
        0        | RG RG RG ..
        1        | RG .. .. ..
        2 send:6 | .. .. .. F0
    """)


# Both engines


@st.composite
def crowds(draw: st.DrawFn) -> list[Use]:
    """Draw messages and all-reduces between eight devices, of few different moments."""
    uses: list[Use] = []
    for number in range(draw(st.integers(1, 7))):
        devices = draw(st.permutations(range(8)))
        moment, seconds = st.integers(0, 6), st.sampled_from([2, 1, 3, 0])
        if draw(st.booleans()):
            uses.append((*devices[:2], draw(moment), draw(seconds)))
            continue
        alike, lasts = draw(st.booleans()), draw(seconds)
        for device in devices[: draw(st.integers(2, 4))]:
            uses.append((device, -1 - number, draw(moment), lasts if alike else draw(seconds)))
    return uses


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(crowds(), st.sampled_from([1, 2, 4]), st.sampled_from(["ring", "tree"]))
def test_engines_agree_on_crowds(uses: list[Use], n_nics: int, algorithm: str) -> None:
    """Messages and collectives that meet at ports and NICs; members may last differently."""
    nodes = ps.Nodes(4, port_bandwidth=1, nic_bandwidth=1, n_nics=n_nics)
    graph, tasks = traffic(uses, ps.Network(nodes=nodes), algorithm)
    start, end = simpy_engine.run(graph, tasks)
    for mode in (compiled, as_python):
        with mode():
            starts, ends = engine.run(graph, tasks)
        assert (starts == start).all()
        assert (ends == end).all()
    assert_rules_hold(ps.Timeline(graph, start, end), tasks)


@pytest.mark.slow
def test_scenarios_in_which_collectives_meet() -> None:
    """In some of them they do, in others not; `simulate_many` says what `simulate` does."""
    nodes = ps.Nodes(2, nic_bandwidth=1, n_nics=1)
    costs = ps.Costs(4, 4, parameter_bytes=(4, 3.9), network=ps.Network(nodes=nodes))
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2)
    noise = ps.Noise(seed=0, message=LogNormal(0.3))
    many = ps.simulate_many(graph, costs, noise, 40, progress=False)
    timelines = [ps.simulate(graph, costs, noise=noise, scenario=k) for k in range(40)]
    assert many.makespan.tolist() == [timeline.makespan for timeline in timelines]
    reduces = (graph.op == Op.REDUCE_GRAD) & (graph.stage == 0)
    waits = [t.start[reduces][0] > 16 for t in timelines]
    assert 0 < sum(waits) < 40


# Which links


def test_links_of_a_ring() -> None:
    """Each member holds its port out and in, and between nodes its NIC out and in.

    Four devices on two nodes: ports out are 0 to 3, ports in 4 to 7, NICs out 8 and 9, in 10, 11.
    """
    network = ps.Network(nodes=ps.Nodes(2, port_bandwidth=9, nic_bandwidth=1, n_nics=1))
    held = [[0, 4, 8, 10], [1, 5, 8, 10], [2, 6, 9, 11]]
    for algorithm in ("ring", "tree", "fastest"):
        assert network.collective_links(algorithm, [0, 1, 2], 4).tolist() == held
    assert network.collective_links("ring", [2, 3], 4).tolist() == [[2, 6], [3, 7]]
    # A named link between two members: the hops of the ring, as messages have them.
    named = ps.Network(links=(ps.Link(0, 1, ((0, 1),)),), nodes=network.nodes)
    held = named.collective_links("ring", [0, 1, 2], 4).tolist()
    messages = named.resolve(np.array([0, 1, 2]), np.array([1, 2, 0]), 4).links
    assert [set(row) for row in held] == [set(row) for row in messages.tolist()]
    uniform = ps.Network(bandwidth=1).collective_links("ring", [3, 0], 4)
    assert uniform.tolist() == [[12], [3]]  # from 3 to 0, and back
    assert network.collective_links("ring", [2], 4).shape == (1, 0)


def test_links_of_a_tree() -> None:
    """Of four members: 1 - 2 - 3 under 0, and 2 - 1 - 0 under 3, one message up and one down each.

    With positions 0 to 3, the first tree has the edges 1-2, 3-2, 2-0; the second 2-1, 0-1, 1-3.
    """
    held = ps.Network(bandwidth=1).collective_links("tree", range(4), 4)
    hops = [sorted(divmod(link, 4) for link in row if link >= 0) for row in held.tolist()]
    assert hops == [
        [(0, 1), (0, 2)],
        [(1, 0), (1, 2), (1, 3)],
        [(2, 0), (2, 1), (2, 3)],
        [(3, 1), (3, 2)],
    ]


def test_links_of_an_all_to_all() -> None:
    """Port out and in, NIC out and in of each member; those alone that some hop goes through.

    Four devices on two nodes: ports out are 0 to 3, ports in 4 to 7, then two NICs out and two in;
    one more where a link is named, which has number 0.
    """
    nodes = ps.Nodes(2, port_bandwidth=9, nic_bandwidth=1, n_nics=1)
    held = ps.Network(nodes=nodes).collective_links("all_to_all", [0, 3, 1], 4)
    assert held.tolist() == [[0, 4, 8, 10], [3, 7, 9, 11], [1, 5, 8, 10]]
    network = ps.Network(nodes=nodes, links=(ps.Link(0, 1, ((0, 3), (1, 3))),))
    held = network.collective_links("all_to_all", [0, 3, 1], 4)
    assert held.tolist() == [[0, 1, 5, 11], [4, 10, -1, -1], [0, 2, 6, 11]]
    single = ps.Network(nodes=nodes, links=(ps.Link(0, 1, ((0, 1),)),))  # is left out
    held = single.collective_links("all_to_all", [0, 1], 2)
    assert held.tolist() == [[3], [2]], "1 to 0 holds ports alone"
    endless = ps.Network(nodes=replace(nodes, port_bandwidth=math.inf))
    assert endless.collective_links("all_to_all", [0, 3], 4).tolist() == [[8, 10], [9, 11]]
    inside = ps.Network(nodes=nodes).collective_links("all_to_all", [2, 3], 4)
    assert inside.tolist() == [[2, 6], [3, 7]]


def test_endless_links_are_not_held() -> None:
    """Nothing occupies them for any time; a slow one beside them is held all the same."""
    link = ps.Link(1e-6, 1, ((0, 1),))
    for algorithm in ("ring", "tree", "all_to_all"):
        assert (ps.Network().collective_links(algorithm, range(3), 3) == -1).all()
    assert ps.Network(links=(link,)).collective_links("ring", range(2), 2).tolist() == [[0], [-1]]


@given(st.data(), st.sampled_from(["ring", "tree", "all_to_all"]))
def test_links_by_going_through_all_hops(data: st.DataObject, algorithm: str) -> None:
    """All members together hold what messages on the hops would hold."""
    n_devices = data.draw(st.integers(1, 7))
    network = replace(data.draw(networks(n_devices)), interleaves=False)
    members = data.draw(st.lists(st.integers(0, n_devices - 1), min_size=1, unique=True))
    held = network.collective_links(algorithm, members, n_devices)
    assert held.shape[0] == len(members)
    hops = list(itertools.permutations(members, 2))
    named = {pair for link in network.links for pair in link.pairs}
    # Rings over nodes use the port and the NIC of every member, as messages of all pairs do.
    if algorithm == "ring" and (network.nodes is None or named & set(hops)):
        hops = [(a, members[k - 1]) for k, a in enumerate(members) if len(members) > 1]
        hops = [(b, a) for a, b in hops]
    wanted = set()
    for a, b in hops:
        links, _, _ = network.resolve(np.array([a]), np.array([b]), n_devices)
        wanted |= {link for link in links[0].tolist() if link >= 0 and usable(network, link)}
    got = set(held.ravel().tolist()) - {-1}
    if algorithm == "tree":  # which pairs of members are edges, `test_links_of_a_tree` draws
        assert got <= wanted
    elif algorithm == "all_to_all":
        several = {k for k, link in enumerate(network.links) if len(link.pairs) > 1}
        own = set(range(len(network.links))) - several
        if network.nodes is None:
            own |= wanted - set(range(len(network.links)))
        assert got == wanted - own
    else:
        assert got == wanted


def usable(network: ps.Network, link: int) -> bool:
    """Tell whether a link can be busy; endless ports and NICs have no number."""
    if link < len(network.links):
        return math.isfinite(network.links[link].bandwidth)
    return network.nodes is not None or math.isfinite(network.bandwidth)


def test_wrong_members() -> None:
    """Named, with what is allowed."""
    network = ps.Network(links=(ps.Link(0, 1, ((0, 9),)),))
    with pytest.raises(NetworkError, match=r"ring names device 5; there are 4 devices, 0\.\.3"):
        ps.Network().collective_links("ring", [0, 5], 4)
    with pytest.raises(NetworkError, match="link 0 names device 9"):
        network.collective_links("ring", [0, 1], 4)
    with pytest.raises(NetworkError, match="device 1 is named twice"):
        network.collective_links("tree", [1, 1], 10)
    with pytest.raises(UnknownNameError, match="unknown collective 'rign'; did you mean 'ring'"):
        network.collective_links("rign", [0, 1], 10)
