"""How long collectives last on a network: rings, trees and all-to-all."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_routes import resolve
from strategies import clusters, networks

import pipesim as ps
from pipesim.errors import NetworkError, PipeError, UnknownNameError
from pipesim.network.collectives import gpus_all_to_all

#: Two nodes of four devices and two NICs each; ports are eight times as fast as NICs.
NODES = ps.Nodes(4, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=1, n_nics=2)
CLUSTER = ps.Network(nodes=NODES)


def test_ring_all_reduce() -> None:
    """Rule 9: 2(n-1)/n * bytes / bandwidth + 2(n-1) * latency."""
    network = ps.Network(latency=1, bandwidth=8)
    assert network.all_reduce(64, range(4)) == 2 * 3 / 4 * 64 / 8 + 2 * 3 * 1
    assert network.all_reduce(64, [2]) == 0
    assert ps.Network(latency=1).all_reduce(64, np.array([3, 1])) == 2


def test_ring_takes_the_slowest_hop() -> None:
    """The slowest latency and bandwidth of the hops, also of the one that closes the ring."""
    slow = ps.Network(1, 8, (ps.Link(5, 4, ((2, 0),)),))
    assert slow.all_reduce(12, [0, 1, 2]) == 4 / 3 * 12 / 4 + 4 * 5
    assert slow.all_reduce(12, [0, 2, 1]) == 4 / 3 * 12 / 8 + 4 * 1  # the other way round
    shared = ps.Network(1, 8, (ps.Link(1, 8, ((0, 1), (1, 2))),))
    assert shared.all_reduce(12, [0, 1, 2]) == 4 / 3 * 12 / 4 + 4 * 1


def test_ring_over_nodes() -> None:
    """Inside a node at the port's rate; between nodes at that of all NICs of the members."""
    assert CLUSTER.all_reduce(8, range(4)) == 6 / 4 * 8 / 8 + 6 * 1
    # Both NICs of each node; of 14 steps, two are between nodes.
    assert CLUSTER.all_reduce(8, range(8)) == 14 / 8 * 8 / 2 + 12 * 1 + 2 * 3
    # 0 and 1 have one NIC. The order of members does not matter: NCCL orders them by node.
    one_nic = 6 / 4 * 8 / 1 + 4 * 1 + 2 * 3
    assert CLUSTER.all_reduce(8, [0, 4, 1, 5]) == CLUSTER.all_reduce(8, [0, 1, 4, 5]) == one_nic
    # The node with the fewest NICs is the slowest: 4 of node 1 has one, 0 and 2 have two.
    assert CLUSTER.all_reduce(8, [0, 2, 4]) == 4 / 3 * 8 / 1 + 2 * 1 + 2 * 3
    # A port that is slower than the NICs of a node together.
    nodes = ps.Nodes(2, port_bandwidth=3, nic_bandwidth=2)
    assert ps.Network(nodes=nodes).all_reduce(6, range(4)) == 6 / 4 * 6 / 3


def test_tree_over_nodes() -> None:
    """Chains inside nodes, a binary tree between them; the fastest is the faster of both."""
    nodes = ps.Nodes(8, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=1)
    network = ps.Network(nodes=nodes)
    assert network.all_reduce(64, range(64), "tree") == 2 * 64 / 8 + 2 * 7 * 1 + 2 * 3 * 3
    ring = 126 / 64 * 64 / 8 + 2 * 56 * 1 + 2 * 7 * 3
    assert network.all_reduce(64, range(64), "ring") == ring
    assert network.all_reduce(64, range(64), "fastest") < ring
    assert network.all_reduce(1e6, range(64), "fastest") < network.all_reduce(
        1e6, range(64), "tree"
    )


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (8, 3), (9, 4)])
def test_depth_of_a_tree_over_nodes(n: int, depth: int) -> None:
    """It is the logarithm of the number of nodes, rounded up; each node has two members."""
    nodes = ps.Nodes(2, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=1)
    seconds = ps.Network(nodes=nodes).all_reduce(64, range(2 * n), "tree")
    assert seconds == 2 * 64 / 2 + 2 * 1 * 1 + 2 * depth * 3


def test_all_to_all_of_gpus_on_unequal_nodes() -> None:
    """The GPU that is alone on its node sends all its messages through its NIC."""
    nodes = ps.Nodes(2, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=1)
    assert gpus_all_to_all(nodes, 8, 1) == 0
    assert gpus_all_to_all(nodes, 8, 2) == 1 / 2 * 8 / 8 + 1
    assert gpus_all_to_all(nodes, 6, 3) == 2 / 3 * 6 / 1 + 3
    assert gpus_all_to_all(nodes, 8, 4) == 2 / 4 * 8 / 1 + 3
    assert gpus_all_to_all(nodes, 8, 2, stride=2) == 1 / 2 * 8 / 1 + 3


def test_collectives_between_gpus_of_a_device() -> None:
    """Tensor-parallel groups: half a node, a node, two nodes with all their NICs."""
    half = ps.Network.preset("dgx_h100", 1.0, gpus_per_device=4)
    step = 3.4e-6
    latency = 36e-6 + 3 * 1.7e-6  # measured; rates are at most the nominal one
    assert half.group_all_gather(450e9, 4) == pytest.approx(3 / 4 + 0.7 * latency)
    assert half.group_all_reduce(450e9, 4) == pytest.approx(6 / 4 + latency)
    assert half.group_all_reduce(0, 4) == pytest.approx(latency)
    assert half.group_all_reduce(450e9, 2) == pytest.approx(1 + latency - 2 * 1.7e-6)
    two = ps.Network.preset("dgx_h100", 1.0, gpus_per_device=16)
    assert (two.nodes.gpus_per_node, two.nodes.devices_per_node) == (8, 1)  # type: ignore[union-attr]
    # 8 NICs of 50 GB/s have less than a port of 450 GB/s.
    assert two.group_all_gather(400e9, 16) == pytest.approx(15 / 16 + 14 * step + 14e-6)
    # Nine GPUs: the ninth has its NIC alone, which is as slow as the ring.
    ring = 16 / 9 * 50e9 / 50e9 + 14 * step + 2 * 14e-6
    assert two.group_all_reduce(50e9, 9) == pytest.approx(ring)
    # Another device's message leaves through the NIC of each GPU.
    routes = two.resolve(np.array([0]), np.array([1]), 2)
    assert routes.bandwidth.tolist() == [50e9]
    assert ps.Network().group_all_reduce(5, 1) == 0


#: All-reduces of n GPUs take 2 + (n - 1) s besides their bytes, and reach 12 - 12/n bytes/s, at
#: most 8.
MEASURED = ps.NodeCollectives(
    2, 1, bandwidth=12, loss=1, peak_bandwidth=8, half_latency=0.5, half_bandwidth=0.5
)


def measured_nodes(**fields: Any) -> ps.Network:
    return ps.Network(nodes=replace(NODES, collectives=replace(MEASURED, **fields)))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "fastest"])
def test_measured_collectives_inside_a_node(algorithm: str) -> None:
    """Whatever the algorithm; groups over nodes have rings and trees."""
    network, without = measured_nodes(), ps.Network(nodes=NODES)
    assert network.all_reduce(24, [0, 1], algorithm) == 2 / 2 * 24 / 6 + 2 + 1
    assert network.all_reduce(24, [3, 1, 0], algorithm) == 4 / 3 * 24 / 8 + 2 + 2
    for members in ([0, 4], range(8), [0]):
        assert network.all_reduce(24, members, algorithm) == (
            without.all_reduce(24, members, algorithm)
        )
    assert network.all_to_all(24, range(4)) == without.all_to_all(24, range(4))
    linked = replace(network, links=(ps.Link(1, 3, ((0, 1), (1, 0))),))
    assert linked.all_reduce(6, [0, 1], "ring") == 6 / 1.5 + 2 * 1  # of both hops


def test_halves_of_measured_collectives() -> None:
    """Half of the bytes at half of the rate here, and half of the latency."""
    network = measured_nodes().grouped(4)
    assert network.group_all_reduce(24, 2) == 4 + 3
    assert network.group_all_gather(24, 2) == 2 / 0.5 + 0.5 * 3
    costs = ps.Costs(1, 2, gradient_bytes=24, parameter_bytes=48, network=measured_nodes())
    schedule = ps.schedule("gpipe", 1, 1)
    whole = ps.simulate(ps.lower(schedule, n_replicas=2), costs)
    assert whole.makespan == 3 + (4 + 3)
    halves = ps.simulate(ps.lower(schedule, n_replicas=2, shard_optimizer=True), costs)
    assert halves.makespan == 3 + (4 + 1.5) + (8 + 1.5)


def test_changes_of_measured_collectives() -> None:
    """Scaled, endless, grouped, in files; a faster port raises the peak."""
    network = measured_nodes()
    slow = network.scaled(latency=2, bandwidth=0.5)
    assert slow.all_reduce(24, [0, 1]) == 8 + 2 * 3
    assert network.scaled(bandwidth=4).all_reduce(24, [0, 1]) == 24 / 24 + 3
    assert network.scaled(bandwidth=8).all_reduce(24, [0, 1]) == 24 / 48 + 3
    assert network.unlimited().all_reduce(24, [0, 1]) == 3
    for own in (network, slow, network.unlimited(), network.grouped(2), ps.Network(nodes=NODES)):
        assert ps.Network.from_dict(json.loads(json.dumps(own.to_dict()))) == own
    assert "all-reduce of 4 GPUs of a node" in network._repr_html_()
    with pytest.raises(PipeError, match="collectives of nodes has no 'slope'"):
        ps.Nodes.from_dict({"devices_per_node": 2, "collectives": {"slope": 1}})
    with pytest.raises(PipeError, match=r"half_latency must be a finite number \(at least 0.5"):
        ps.NodeCollectives(half_latency=0.1)


def test_machines_have_measured_collectives() -> None:
    """Another efficiency scales them, up to the rates of the data sheet."""
    seconds = {
        share: ps.Network.preset("dgx_a100", share).all_reduce(300e6, range(8))
        for share in (0.35, 0.7, 1.0)
    }
    latency, share = 36e-6 + 7 * 5.5e-6, 0.80 - 0.32 / 8
    assert seconds[0.7] == pytest.approx(latency + 14 / 8 * 300e6 / (share * 300e9))
    assert seconds[0.35] == pytest.approx(latency + 14 / 8 * 300e6 / (share / 2 * 300e9))
    assert seconds[1.0] == pytest.approx(latency + 14 / 8 * 300e6 / 300e9)
    slowest = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)]).network()
    assert slowest.all_reduce(300e6, range(8)) >= seconds[0.7]


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (ps.Network(1, 8), (5, 2), "no nodes"),
        (ps.Network.preset("dgx_h100"), (5, 8), "give gpus_per_device=8"),
        (ps.Network.preset("dgx_h100"), (-1, 1), "nbytes must be finite and >= 0"),
        (ps.Network.preset("dgx_h100"), (math.nan, 1), "nbytes must be finite and >= 0"),
    ],
)
def test_impossible_groups(network: ps.Network, arguments: tuple[float, int], message: str) -> None:
    """Groups of which the network knows no rates."""
    with pytest.raises(NetworkError, match=message):
        network.group_all_reduce(*arguments)
    with pytest.raises(NetworkError, match=message):
        network.group_all_gather(*arguments)


@pytest.mark.parametrize("n_nics", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_groups_of_gpus_that_share_nics(n_nics: int, size: int) -> None:
    """All NICs of a node together, and those that the GPUs of one device use, keep their rates."""
    nodes = ps.Network(nodes=ps.Nodes(8, nic_bandwidth=24, n_nics=n_nics)).grouped(size).nodes
    assert nodes is not None
    assert (nodes.gpus_per_node, nodes.node_bandwidth) == (8, 24 * n_nics)
    gpus = min(size, 8)  # GPUs of the device on one node
    used = len({gpu * n_nics // 8 for gpu in range(gpus)})
    assert gpus * nodes.nic_bandwidth == 24 * used
    sharing = nodes.devices_per_node // nodes.nics_per_node
    assert sharing == max(1, 8 // n_nics // size)


def test_networks_that_cannot_be_grouped() -> None:
    network = ps.Network(nodes=ps.Nodes(8, nic_bandwidth=10, n_nics=4))
    assert ps.Network(1, 8).grouped(1) == ps.Network(1, 8)
    with pytest.raises(NetworkError, match="needs a network of nodes without named links"):
        ps.Network(1, 8).grouped(2)
    with pytest.raises(NetworkError, match="devices of 2 GPUs cannot be grouped again"):
        network.grouped(2).grouped(4)


@pytest.mark.parametrize(
    ("size", "bandwidth", "devices_per_link"), [(1, 32, 4), (2, 16, 2), (4, 8, 1), (8, 8, 1)]
)
def test_host_links_of_groups(size: int, bandwidth: float, devices_per_link: int) -> None:
    """GPUs of a device share a link of four, or have several of them."""
    grouped = ps.HostLink(bandwidth=32, devices_per_link=4).grouped(size)
    assert grouped == ps.HostLink(bandwidth=bandwidth, devices_per_link=devices_per_link)


def test_nodes_of_a_device() -> None:
    """A device on several nodes has them to itself, and its GPUs are spread evenly."""
    with pytest.raises(NetworkError, match="has them to itself; give devices_per_node=1, got 2"):
        ps.Nodes(2, gpus_per_device=16, nodes_per_device=2)
    with pytest.raises(NetworkError, match="gpus_per_device=9 cannot be spread evenly"):
        ps.Nodes(1, gpus_per_device=9, nodes_per_device=2)
    for gpus in (3, 12):
        with pytest.raises(NetworkError, match="must divide the 8 GPUs of a node"):
            ps.Network.preset("dgx_a100", gpus_per_device=gpus)


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_tree_all_reduce(n: int, depth: int) -> None:
    """2 * bytes / bandwidth + 2 * ceil(log2 n) * latency."""
    network = ps.Network(latency=1, bandwidth=8)
    assert network.all_reduce(64, range(n), "tree") == 2 * 64 / 8 + 2 * depth
    assert network.all_reduce(64, [n], "tree") == 0
    ports = ps.Network(nodes=ps.Nodes(n, port_latency=1, port_bandwidth=8))
    assert ports.all_reduce(64, range(n), "tree") == 2 * 64 / 8 + 2 * (n - 1)  # a chain


def test_tree_shares_links() -> None:
    """One link for all pairs carries both trees' 2(n-1) edges twice, half of the bytes on each."""
    for n in (4, 5, 8):
        pairs = tuple(itertools.permutations(range(n), 2))
        network = ps.Network(links=(ps.Link(0, 2, pairs),))
        assert network.all_reduce(64, range(n), "tree") == pytest.approx(4 * (n - 1) * 32 / 2)


def test_unlimited_bandwidth_leaves_latency() -> None:
    """Of named links, of the other pairs, and of nodes: bytes take no time at all."""
    slow = ps.Link(5, 0.5, ((0, 1), (1, 0)))
    nodes = ps.Nodes(2, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=2)
    for network in (ps.Network(2, 4, (slow,)), ps.Network(links=(slow,), nodes=nodes)):
        for members in ([0, 1], [0, 2], range(4)):
            latency = network.unlimited().all_reduce(64, members)
            assert latency == network.all_reduce(0, members) > 0
            assert network.all_reduce(64, members) > latency


def test_all_to_all() -> None:
    """(n-1)/n * bytes over a device's end, all pairs' bytes over a link of all; one latency."""
    network = ps.Network(latency=1, bandwidth=8)
    assert network.all_to_all(64, range(4)) == 3 / 4 * 64 / 8 + 1
    assert network.all_to_all(64, [3]) == 0
    pairs = tuple(itertools.permutations(range(4), 2))
    links = tuple(ps.Link(1, 8, (pair,)) for pair in pairs)
    assert ps.Network(links=links).all_to_all(64, range(4)) == 3 / 4 * 64 / 8 + 1
    assert ps.Network(links=(ps.Link(1, 8, pairs),)).all_to_all(64, range(4)) == 12 * 16 / 8 + 1


def test_all_to_all_over_nodes() -> None:
    """The port inside a node; two devices' messages to four others on each NIC."""
    assert CLUSTER.all_to_all(8, range(4)) == 3 / 4 * 8 / 8 + 1
    assert CLUSTER.all_to_all(8, range(8)) == 2 * 4 / 8 * 8 / 1 + 3
    assert CLUSTER.all_to_all(8, [0, 4]) == 1 / 2 * 8 / 1 + 3
    fast = ps.Nodes(4, port_bandwidth=8, nic_bandwidth=1000)
    assert ps.Network(nodes=fast).all_to_all(8, range(8)) == 7 / 8 * 8 / 8
    # Messages on named links leave the NICs to the rest.
    outward = ps.Link(5, 2, ((0, 4), (1, 4), (0, 5), (1, 5)))
    back = ps.Link(5, 2, tuple((b, a) for a, b in outward.pairs))
    members = [0, 1, 4, 5]
    assert ps.Network(links=(outward,), nodes=NODES).all_to_all(8, members) == 4 * 2 / 1 + 5
    assert ps.Network(links=(outward, back), nodes=NODES).all_to_all(8, members) == 4 * 2 / 2 + 5


@given(
    st.data(), st.integers(3, 7), st.floats(0, 1e9), st.sampled_from(["ring", "tree", "fastest"])
)
def test_collectives_are_not_faster_than_the_wire(
    data: st.DataObject, n: int, nbytes: float, algorithm: str
) -> None:
    """No faster than the fastest link allows, nor than with a slower network's links unshared."""
    network = data.draw(networks(n))
    members = data.draw(st.permutations(range(n)))
    routes = network.resolve(*np.array(list(itertools.permutations(range(n), 2))).T, n)
    least = 2 * (n - 1) / n * nbytes / routes.bandwidth.max()
    got = network.all_reduce(nbytes, members, algorithm)
    assert got >= least * (1 - 1e-9)
    assert got >= 2 * routes.latency.min()
    assert network.all_to_all(nbytes, members) >= routes.latency.max()
    assert network.all_to_all(nbytes, members) == pytest.approx(
        network.all_to_all(nbytes, sorted(members))
    )
    assert network.all_reduce(2 * nbytes, members, algorithm) >= got


@given(clusters(), st.integers(3, 9), st.data())
def test_all_to_all_by_adding_up(network: ps.Network, n: int, data: st.DataObject) -> None:
    """The closed form is the busiest link's total, where every pair's message is added up."""
    drawn = data.draw(st.lists(st.integers(0, 5), min_size=n * n, max_size=n * n))
    sizes = np.array(drawn, dtype=float).reshape(n, n)
    seconds = _added_up(network, sizes)
    assert network.all_to_all(sizes, range(n)) == pytest.approx(seconds)
    order = data.draw(st.permutations(range(n)))
    assert network.all_to_all(sizes[np.ix_(order, order)], order) == pytest.approx(seconds)
    even = np.full((n, n), 1 / n)
    assert network.all_to_all(1, range(n)) == pytest.approx(_added_up(network, even))
    assert network.all_to_all(even, range(n)) == network.all_to_all(1, range(n))


def _added_up(network: ps.Network, sizes: np.ndarray) -> float:
    n = len(sizes)
    pairs = list(itertools.permutations(range(n), 2))
    nodes, busy = network.nodes, dict[Any, float]()
    assert nodes is not None
    for (a, b), (held, _, bandwidth) in zip(
        pairs, resolve(network, *pairs, n_devices=n), strict=True
    ):
        if any((a, b) in link.pairs for link in network.links):
            speeds = {("link",): bandwidth, ("out", a): bandwidth, ("in", b): bandwidth}
        else:
            speeds = {("out", a): nodes.port_bandwidth, ("in", b): nodes.port_bandwidth}
            if a // nodes.devices_per_node != b // nodes.devices_per_node:
                speeds |= {("nic", k): nodes.nic_bandwidth for k in sorted(held)[-2:]}
        for key, speed in speeds.items():
            busy[key] = busy.get(key, 0.0) + sizes[a, b] / speed
    latency = max(t for _, t, _ in resolve(network, *pairs, n_devices=n))
    return max(busy.values()) + latency


@pytest.mark.parametrize(
    ("nbytes", "devices", "message"),
    [
        (-1, [0, 1], "bytes must be finite and >= 0, got -1"),
        (math.nan, [0, 1], "bytes must be finite and >= 0, got nan"),
        (math.inf, [0, 1], "bytes must be finite"),
        ("1 cow", [0, 1], "bytes must be finite"),
        (1, 4, r"devices must be a sequence of device numbers, such as \[0, 1\], got 4"),
        (1, [], "devices must be a sequence"),
        (1, [0.0, 1.0], "devices must be a sequence"),
        (1, [True, False], "devices must be a sequence"),
        (1, [[0, 1]], "devices must be a sequence"),
        (1, [[0], [1, 2]], "devices must be a sequence"),
        (1, "01", "devices must be a sequence"),
        (1, [0, -1], "a device must be 0 to 2147483647, got -1"),
        (1, [0, 2**31], "a device must be 0 to 2147483647, got 2147483648"),
        (1, [3, 0, 3], "device 3 is named twice; name each member once"),
    ],
)
def test_bad_collectives(nbytes: Any, devices: Any, message: str) -> None:
    """Bytes, and members that are different devices."""
    for operation in (ps.Network().all_reduce, ps.Network().all_to_all):
        with pytest.raises(NetworkError, match=message):
            operation(nbytes, devices)


@pytest.mark.parametrize("sizes", [[[1]], [[1, 2], [3]], [1, 2], [["a", 1], [1, 1]]])
def test_bad_bytes_of_pairs(sizes: Any) -> None:
    with pytest.raises(NetworkError, match=r"bytes of pairs must be numbers of shape \(2, 2\)"):
        ps.Network().all_to_all(sizes, [0, 1])
    with pytest.raises(NetworkError, match="got inf from member 1 to 0"):
        ps.Network().all_to_all([[0, 1], [math.inf, 0]], [0, 1])


def test_unknown_algorithm() -> None:
    """The nearest known one is named."""
    with pytest.raises(UnknownNameError, match="unknown all-reduce 'rng'; did you mean 'ring'"):
        ps.Network().all_reduce(1, [0, 1], "rng")
