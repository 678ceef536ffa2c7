"""Networks: which links carry a message, how fast, how long collectives last, what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_routes import resolve
from strategies import clusters, linked_networks, networks

import pipesim as ps
from pipesim.errors import NetworkError, PipeError, UnknownNameError


def contend(network: ps.Network, one: tuple[int, int], two: tuple[int, int], n: int = 16) -> bool:
    """Whether two messages have a link in common."""
    (links, _, _), (others, _, _) = resolve(network, one, two, n_devices=n)
    return bool(links & others)


def test_uniform() -> None:
    """Every directed pair has its own link."""
    network = ps.Network(latency=2, bandwidth=8)
    links = resolve(network, (0, 1), (1, 0), (0, 2), (3, 2))
    assert len(frozenset().union(*(held for held, _, _ in links))) == 4
    assert all(len(held) == 1 for held, _, _ in links)
    assert {(latency, bandwidth) for _, latency, bandwidth in links} == {(2.0, 8.0)}


def test_named_pairs() -> None:
    """Pairs of one link share its number; the others keep links of their own."""
    links = [ps.Link(5, 1, ((0, 2), (1, 2))), ps.Link(6, 2, ((2, 0),))]
    network = ps.Network(latency=1, bandwidth=math.inf, links=links)  # type: ignore[arg-type]
    outward, too, back, other = resolve(network, (0, 2), (1, 2), (2, 0), (0, 1))
    assert outward == too == ({0}, 5.0, 1.0)
    assert back == ({1}, 6.0, 2.0)
    assert other[1:] == (1.0, math.inf)
    assert min(other[0]) >= 2


@given(st.data())
def test_pairs_share_only_named_links(data: st.DataObject) -> None:
    """Two pairs have one number if, and only if, one link names both."""
    network = data.draw(linked_networks(3))
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    number = dict(zip(pairs, (n for n, _, _ in resolve(network, *pairs, n_devices=3)), strict=True))
    for one in pairs:
        for two in pairs:
            together = one == two or any({one, two} <= set(k.pairs) for k in network.links)
            assert (number[one] == number[two]) == together


@given(st.data())
def test_plain_values_round_trip(data: st.DataObject) -> None:
    """`to_dict` and `from_dict` are inverse, through JSON as well."""
    network = data.draw(networks(4))
    assert ps.Network.from_dict(network.to_dict()) == network
    assert ps.Network.from_dict(json.loads(json.dumps(network.to_dict()))) == network


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, None, "1", True])
def test_bad_latency(value: Any) -> None:
    """Finite and not negative, of the network and of a link."""
    with pytest.raises(NetworkError, match="network: latency must be finite and >= 0 s, got "):
        ps.Network(latency=value)
    with pytest.raises(NetworkError, match=r"link of \[\(0, 1\)\]: latency must be finite"):
        ps.Link(value, 1, ((0, 1),))


@pytest.mark.parametrize("value", [0, -1, math.nan, None, "fast", True])
def test_bad_bandwidth(value: Any) -> None:
    """Positive; endless is allowed, and the message says how it is written."""
    with pytest.raises(NetworkError, match=r"network: bandwidth must be > 0 .*math\.inf .*got "):
        ps.Network(bandwidth=value)
    with pytest.raises(NetworkError, match=r"link of \[\(0, 1\)\]: bandwidth must be > 0"):
        ps.Link(1, value, ((0, 1),))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (((1, 1),), "no link leads from 1 to 1"),
        (((-1, 0),), "sender of a link must be at least 0, got -1"),
        (((0, 0.5),), r"receiver of a link must be a whole number, got 0\.5"),
        (((0, True),), "receiver of a link must be a whole number, got True"),
        (((0,),), "pairs must be a list of"),
        ((0, 1), "pairs must be a list of"),
        (3, "pairs must be a list of"),
        ("01", "pairs must be a list of"),
    ],
)
def test_bad_pairs(pairs: Any, message: str) -> None:
    """Numbers of two different devices."""
    with pytest.raises(PipeError, match=message):
        ps.Link(1, 1, pairs)


def test_pair_on_two_links() -> None:
    """Or twice on one: either way it is not clear which link carries its messages."""
    one, two = ps.Link(1, 1, ((0, 1), (1, 2))), ps.Link(2, 1, ((1, 2),))
    with pytest.raises(NetworkError, match=r"pair \(1, 2\) is on more than one link; name it once"):
        ps.Network(links=(one, two))
    with pytest.raises(NetworkError, match=r"pair \(0, 1\) is on more than one link"):
        ps.Network(links=(ps.Link(1, 1, ((0, 1), (0, 1))),))


@pytest.mark.parametrize("links", [3, "links", [3], [((0, 1),)], None])
def test_links_are_links(links: Any) -> None:
    """A sequence of `Link` objects."""
    with pytest.raises(NetworkError, match="links must be a sequence of Link, got"):
        ps.Network(links=links)


def test_devices_that_do_not_exist() -> None:
    """Found when the network meets a graph, with the devices that there are."""
    network = ps.Network(links=(ps.Link(1, 1, ((0, 1),)), ps.Link(1, 1, ((0, 4),))))
    with pytest.raises(NetworkError, match=r"link 1 names device 4; there are 4 devices, 0\.\.3"):
        resolve(network, (0, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bandwith": 1}, "network has no 'bandwith'"),
        ({"links": [{"pairs": [[0, 1]], "speed": 1}]}, "link has no 'speed'"),
        ({"links": [{"latency": 1}]}, r"names no pairs; add pairs = \[\[0, 1\]\]"),
        ({"links": 1}, "links must be a list of tables"),
        ({"nodes": 8}, "nodes must be a table, got 8"),
        ({"nodes": {"devices": 8}}, "nodes has no 'devices'"),
        ({"nodes": {"n_nics": 8}}, "lack a size; add devices_per_node = 8"),
        ({"preset": "dgx_h10"}, "unknown machine 'dgx_h10'; did you mean 'dgx_h100'"),
        ({"preset": ["dgx_h100"]}, "unknown machine"),
        ({"preset": "dgx_h100", "nodes": {"devices_per_node": 8}}, "both preset and nodes"),
        ({"preset": "dgx_h100", "latency": 1e-6}, "leave out the one or the other"),
        ({"preset": "dgx_h100", "efficiency": 1.5}, "efficiency must be above 0 and at most 1"),
        ({"preset": "dgx_h100", "efficiency": "1"}, "efficiency must be above 0 and at most 1"),
        ({"preset": "dgx_h100", "gpus_per_device": 3}, "must divide the 8 GPUs of a node"),
        ({"preset": "dgx_h100", "gpus_per_device": 1.0}, "gpus_per_device must be a whole number"),
        ({"efficiency": 0.5}, "network has efficiency without a preset to apply to; add preset ="),
        ({"gpus_per_device": 8, "nodes": {"devices_per_node": 8}}, "has gpus_per_device without"),
        (None, "network must be a table"),
    ],
)
def test_bad_plain_values(values: Any, message: str) -> None:
    """As a file may hold them."""
    with pytest.raises(PipeError, match=message):
        ps.Network.from_dict(values)


def test_messages_of_devices_that_do_not_exist() -> None:
    """Their numbers would be taken for other links."""
    for pair in ((0, 4), (4, 0), (-1, 0)):
        with pytest.raises(NetworkError, match=r"a message names device (4|-1); there are 4 dev"):
            resolve(ps.Network(), pair)


# Nodes


#: Two nodes of four devices and two NICs each; ports are eight times as fast as NICs.
NODES = ps.Nodes(4, port_latency=1, port_bandwidth=8, nic_latency=3, nic_bandwidth=1, n_nics=2)
CLUSTER = ps.Network(nodes=NODES)


def test_message_inside_a_node() -> None:
    """It holds the sender's port out and the receiver's port in."""
    ((held, latency, bandwidth),) = resolve(CLUSTER, (0, 3), n_devices=8)
    assert (len(held), latency, bandwidth) == (2, 1.0, 8.0)
    assert contend(CLUSTER, (0, 3), (0, 1))  # the port out of 0
    assert contend(CLUSTER, (0, 3), (2, 3))  # the port into 3
    assert not contend(CLUSTER, (0, 3), (3, 0))  # full duplex
    assert not contend(CLUSTER, (0, 1), (1, 2))
    assert not contend(CLUSTER, (0, 1), (2, 3))


def test_message_between_nodes() -> None:
    """It holds a NIC at both ends as well, and devices 0, 1 and 2, 3 of a node share theirs."""
    ((held, latency, bandwidth),) = resolve(CLUSTER, (0, 4), n_devices=8)
    assert (len(held), latency, bandwidth) == (4, 3.0, 1.0)
    assert contend(CLUSTER, (0, 4), (1, 6))  # the NIC out of 0 and 1
    assert contend(CLUSTER, (0, 4), (3, 5))  # the NIC into 4 and 5
    assert contend(CLUSTER, (0, 4), (0, 1))  # the port out of 0
    assert contend(CLUSTER, (0, 4), (5, 4))  # the port into 4
    assert not contend(CLUSTER, (0, 4), (4, 0))  # full duplex
    assert not contend(CLUSTER, (0, 4), (2, 6))  # other NICs
    assert not contend(CLUSTER, (0, 4), (1, 2))


def test_numbers_of_nics() -> None:
    """One a device unless it is given; one for all; messages inside a node need none."""
    own = ps.Network(nodes=ps.Nodes(4, nic_bandwidth=1))
    one = ps.Network(nodes=ps.Nodes(4, nic_bandwidth=1, n_nics=1))
    assert not contend(own, (0, 4), (1, 5))
    assert contend(one, (0, 4), (3, 7))
    assert not contend(one, (0, 4), (4, 0))
    assert resolve(one, (0, 1), n_devices=8) == [(frozenset(), 0.0, math.inf)]


def test_endless_bandwidth_is_never_held() -> None:
    """Rule 4: a port that takes no time does not keep others waiting for the NIC's time."""
    network = ps.Network(nodes=ps.Nodes(2, port_bandwidth=4))
    assert resolve(network, (0, 2))[0][2] == 4
    assert not contend(ps.Network(nodes=ps.Nodes(2, port_bandwidth=4, n_nics=1)), (0, 2), (1, 3))
    slow_port = ps.Network(nodes=ps.Nodes(2, port_bandwidth=4, nic_bandwidth=9, n_nics=1))
    assert contend(slow_port, (0, 2), (1, 3))
    assert resolve(slow_port, (0, 2))[0][2] == 4


def test_links_beside_nodes() -> None:
    """A pair that a link names holds that link alone."""
    network = ps.Network(links=(ps.Link(7, 5, ((0, 1), (0, 4))),), nodes=NODES)
    near, far, other = resolve(network, (0, 1), (0, 4), (0, 2), n_devices=8)
    assert near == far == ({0}, 7.0, 5.0)
    assert other[1:] == (1.0, 8.0)
    assert not near[0] & other[0]


@given(clusters(), st.integers(3, 9), st.data())
def test_links_of_nodes_by_hand(network: ps.Network, n: int, data: st.DataObject) -> None:
    """Pairs contend where their ends, or their nodes' NICs, are the same, and nowhere else."""
    nodes = network.nodes
    assert nodes is not None
    assert nodes.n_nics is not None
    pairs = list(itertools.permutations(range(n), 2))
    named = {pair for link in network.links for pair in link.pairs}

    def holds(a: int, b: int) -> set[tuple[Any, ...]]:
        if (a, b) in named:
            return {("link",)}
        per_nic = nodes.devices_per_node // nodes.n_nics
        ports = {("out", a), ("in", b)} if nodes.port_bandwidth < math.inf else set()
        far = a // nodes.devices_per_node != b // nodes.devices_per_node
        nics = {("nic out", a // per_nic), ("nic in", b // per_nic)}
        return ports | (nics if far and nodes.nic_bandwidth < math.inf else set())

    got = resolve(network, *pairs, n_devices=n)
    for (one, (links, _, _)), (two, (others, _, _)) in itertools.product(
        zip(pairs, got, strict=True), repeat=2
    ):
        assert len(links & others) == len(holds(*one) & holds(*two)), (one, two)
    direction, back = data.draw(st.sampled_from(pairs)), got
    if (
        direction not in named and direction[::-1] not in named
    ):  # the same both ways, on other links
        forth, other = back[pairs.index(direction)], back[pairs.index(direction[::-1])]
        assert forth[1:] == other[1:]
        assert not forth[0] & other[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices_per_node": 0}, "devices_per_node must be at least 1, got 0"),
        ({"devices_per_node": 2.0}, "devices_per_node must be a whole number"),
        ({"devices_per_node": 2**31}, "nodes: devices_per_node must be at most"),
        ({"n_nics": 0}, "n_nics must be at least 1, got 0"),
        ({"n_nics": 3}, "3 NICs cannot be shared evenly by 8 devices; give a divisor of 8"),
        ({"n_nics": 16}, "16 NICs cannot be shared evenly by 8 devices"),
        ({"port_bandwidth": 0}, "nodes: port_bandwidth must be > 0 bytes/s"),
        ({"nic_bandwidth": -1}, "nodes: nic_bandwidth must be > 0 bytes/s"),
        ({"nic_bandwidth": math.nan}, "nodes: nic_bandwidth must be > 0 bytes/s"),
        ({"port_latency": -1e-9}, "nodes: port_latency must be finite and >= 0 s, got -1e-09"),
        ({"nic_latency": math.inf}, "nodes: nic_latency must be finite and >= 0 s, got inf"),
    ],
)
def test_bad_nodes(values: dict[str, Any], message: str) -> None:
    """The field is named, and what is allowed."""
    with pytest.raises(PipeError, match=message):
        ps.Nodes(**{"devices_per_node": 8, **values})


def test_nodes_are_nodes() -> None:
    """Nor do they stand beside a latency or bandwidth that no message would have."""
    with pytest.raises(NetworkError, match=r"nodes must be a pipesim\.Nodes, got 8"):
        ps.Network(nodes=8)  # type: ignore[arg-type]
    for values in ({"latency": 1.0}, {"bandwidth": 1.0}):
        with pytest.raises(NetworkError, match="leave out the one or the other"):
            ps.Network(nodes=NODES, **values)


# Machines


def test_presets() -> None:
    """The listing has what the networks have."""
    listed = ps.machines()
    assert list(listed.index) == [
        "dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200", "gb200_nvl72", "gb300_nvl72",
    ]  # fmt: skip
    for name, row in listed.iterrows():
        assert ps.Network.preset(str(name)) == ps.Network.from_dict({"preset": name})
        network = ps.Network.preset(str(name), 1.0)
        assert network.nodes is not None
        for field, value in network.nodes.to_dict().items():
            assert field == "collectives" or row[field] == value, (name, field)
        measured = ps.Network.preset(str(name)).nodes.to_dict()["collectives"]  # type: ignore[union-attr]
        for field, value in measured.items():
            assert row[f"collectives_{field}"] == value, (name, field)
    assert listed["port_bandwidth"].tolist() == [300e9, 450e9, 450e9, *[900e9] * 3]
    assert listed["nic_bandwidth"].tolist() == [25e9, *[50e9] * 4, 100e9]
    assert listed["memory"].tolist() == [80e9, 80e9, 141e9, 180e9, 186e9, 279e9]


def test_efficiency() -> None:
    """The part of the nominal bandwidths that is reached; latencies stay."""
    full, part = ps.Network.preset("dgx_a100").nodes, ps.Network.preset("dgx_a100", 0.5).nodes
    assert full is not None
    assert part is not None
    assert (part.port_bandwidth, part.nic_bandwidth) == (150e9, 12.5e9)
    assert part.nic_latency == full.nic_latency
    for wrong in (0, 1.1, -1, math.nan, "1"):
        with pytest.raises(NetworkError, match="efficiency must be above 0 and at most 1, got"):
            ps.Network.preset("dgx_a100", wrong)  # type: ignore[arg-type]


def test_preset_from_plain_values() -> None:
    """What `Network.preset` takes may stand beside the name, as in a file."""
    values = {"preset": "dgx_h100", "gpus_per_device": 4, "efficiency": 0.8}
    network = ps.Network.from_dict(values)
    assert network == ps.Network.preset("dgx_h100", efficiency=0.8, gpus_per_device=4)
    assert network.nodes is not None
    assert (network.nodes.devices_per_node, network.nodes.port_bandwidth) == (2, 360e9)
    assert ps.Network.from_dict(network.to_dict()) == network


def test_unknown_preset() -> None:
    """The nearest known one is named."""
    with pytest.raises(UnknownNameError, match=r"'dgx_h100'\?.*known: dgx_a100, dgx_b200"):
        ps.Network.preset("h100")


# A matrix


def test_csv(tmp_path: Path) -> None:
    """A link a row, but for rows with the same name; the rest is as in `Network`."""
    path = tmp_path / "links.csv"
    path.write_text(
        "source, target, latency, bandwidth, link\n"
        "0,2,1e-6,5e9,trunk\n"
        "\n"
        "1,2,1e-6,5e9, trunk \n"
        "2,0,2e-6,,\n"
        "2,1,0,inf,\n"
    )
    assert ps.Network.from_csv(path, latency=3, bandwidth=7) == ps.Network(
        3,
        7,
        (
            ps.Link(1e-6, 5e9, ((0, 2), (1, 2))),
            ps.Link(2e-6, math.inf, ((2, 0),)),
            ps.Link(0, math.inf, ((2, 1),)),
        ),
    )
    path.write_bytes(b"\xef\xbb\xbfsource,target,latency,bandwidth\r\n0,1,1e-6,5e9\r\n")
    assert ps.Network.from_csv(str(path)).links == (ps.Link(1e-6, 5e9, ((0, 1),)),)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "names no links; add a row such as"),
        ("0,1,0", "line 2: 3 values for the 5 columns"),
        ("0,1,0,1,a,b", "line 2: 6 values for the 5 columns"),
        ("0,1,0,1,\n\n0,x,0,1,", "line 4, column target: must be a device number, .*got 'x'"),
        ("-1,0,0,1,", "line 2, column source: must be a device number, 0 to 2147483647, got '-1'"),
        ("0.5,0,0,1,", "line 2, column source: must be a device number"),
        ("nan,0,0,1,", "line 2, column source: must be a device number"),
        ("0,2147483648,0,1,", "line 2, column target: must be a device number"),
        ("0,,0,1,", "line 2, column target: must be a device number, .*got ''"),
        ("3,3,0,1,", "line 2, column target: must be another device than source, got '3'"),
        ("0,1,-1,1,", "line 2, column latency: must be finite and >= 0 s, got '-1'"),
        ("0,1,inf,1,", "line 2, column latency: must be finite"),
        ("0,1,nan,1,", "line 2, column latency: must be finite"),
        ("0,1,,1,", "line 2, column latency: must be finite and >= 0 s, got ''"),
        ("0,1,0,0,", "line 2, column bandwidth: must be > 0 bytes/s .*got '0'"),
        ("0,1,0,-1,", "line 2, column bandwidth: must be > 0"),
        ("0,1,0,nan,", "line 2, column bandwidth: must be > 0"),
        ("0,1,0,fast,", "line 2, column bandwidth: must be > 0 .*got 'fast'"),
        ("0,1,0,1,\n2,3,0,1,\n0,1,0,1,", r"line 4: pair \(0, 1\) is in line 2 already"),
        ("5,6,0,1,\n0,1,0,1,\n5,6,0,1,\n0,1,0,1,", r"line 4: pair \(5, 6\) is in line 2 already"),
        ("0,1,0,1,a\n1,2,0,2,a", "line 3, column link: 'a' has latency 0.0 and bandwidth 1.0 in"),
        ('0,1,0,1,"a', "line 2: unexpected end of data"),
    ],
)
def test_bad_csv(tmp_path: Path, rows: str, message: str) -> None:
    """File, line and column are named."""
    path = tmp_path / "links.csv"
    path.write_text("source,target,latency,bandwidth,link\n" + rows)
    with pytest.raises(NetworkError, match=rf"links\.csv.*{message}"):
        ps.Network.from_csv(path)


def test_unreadable_csv(tmp_path: Path) -> None:
    """No file, no text, no such columns."""
    path = tmp_path / "links.csv"
    with pytest.raises(NetworkError, match=r"cannot read links from .*links\.csv"):
        ps.Network.from_csv(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NetworkError, match=r"cannot read links from .*links\.csv"):
        ps.Network.from_csv(path)
    for header in ("", "0,1,0,1\n", "target,source,latency,bandwidth\n"):
        path.write_text(header)
        with pytest.raises(NetworkError, match="line 1: the columns must be source,target,latency"):
            ps.Network.from_csv(path)


def test_matrix() -> None:
    """A link a pair; the diagonal is not read."""
    network = ps.Network.from_matrix(2.0, [[0, 1], [3, math.nan]])
    assert network == ps.Network(links=(ps.Link(2, 1, ((0, 1),)), ps.Link(2, 3, ((1, 0),))))
    lag = np.arange(9.0).reshape(3, 3)
    for (a, b), route in zip(
        [(0, 1), (2, 0), (1, 2)],
        resolve(ps.Network.from_matrix(lag, lag + 1), (0, 1), (2, 0), (1, 2)),
        strict=True,
    ):
        assert route[1:] == (lag[a, b], lag[a, b] + 1)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        ([[0, 1], [1, 0]], [[1, 0], [1, 1]], "bandwidth from 0 to 1 must be > 0 bytes/s, got 0.0"),
        ([[0, 1], [-1, 0]], 1, "latency from 1 to 0 must be finite and >= 0 s, got -1.0"),
        ([[0, 1], [math.nan, 0]], 1, "latency from 1 to 0 must be finite"),
        (0, 1, "must be square"),
        ([0, 1], 1, "must be square"),
        ([[0, 1]], 1, "must be square"),
        ([[0, 1], [1, 0]], [1, 2], "must be square"),
        ([[0, 1], [1]], 1, "must be arrays of numbers"),
        ("a", 1, "must be arrays of numbers"),
        (True, [[0, 1], [1, 0]], "must be arrays of numbers, latency is not: got True"),
        (
            0,
            [[0, "25 cows"], [1, 0]],
            "bandwidth must be > 0 bytes/s, such as '25GB/s', got '25 cows'",
        ),
        ([["0", "1"], ["1", "0"]], 1, "must be arrays of numbers, latency is not"),
        ([[0, 1], [1, 0]], 10**400, "must be arrays of numbers, bandwidth is not"),
        ([[0, 1], [10**400, 0]], 1, "latency from 1 to 0 must be finite and >= 0 s, got nan"),
        ([[0, 1], [1, 0]], [[1, None], [1, 1]], "bandwidth from 0 to 1 must be > 0 bytes/s"),
    ],
)
def test_bad_matrix(latency: Any, bandwidth: Any, message: str) -> None:
    """The pair is named."""
    with pytest.raises(NetworkError, match=message):
        ps.Network.from_matrix(latency, bandwidth)


def test_full_matrix_of_many_devices() -> None:
    """Each of 40 x 39 links keeps its own values, whatever order they are asked in."""
    rng = np.random.default_rng(0)
    lag, speed = rng.random((2, 40, 40)) + 1
    network = ps.Network.from_matrix(lag, speed)
    source, target = np.divmod(rng.permutation(1600), 40)
    different = source != target
    routes = network.resolve(source[different], target[different], 40)
    assert (routes.latency == lag[source, target][different]).all()
    assert (routes.bandwidth == speed[source, target][different]).all()
    assert len(np.unique(routes.links)) == 40 * 39


@pytest.mark.parametrize(
    "network",
    [
        ps.Network(1e-6, 1e9),
        ps.Network(1e-6, 1e9, (ps.Link(5e-6, 2e9, ((0, 1),)),)),
        ps.Network.preset("dgx_h100"),
    ],
    ids=["flat", "links", "nodes"],
)
def test_scaled(network: ps.Network) -> None:
    """Every route, and with it every message, has the factor; nothing else changes."""
    source, target = np.array([0, 1, 0, 9]), np.array([1, 0, 12, 2])
    before = network.resolve(source, target, 16)
    after = network.scaled(latency=3, bandwidth=0.25).resolve(source, target, 16)
    assert after.latency.tolist() == (before.latency * 3).tolist()
    assert after.bandwidth.tolist() == (before.bandwidth / 4).tolist()
    assert after.links.tolist() == before.links.tolist()
    assert network.scaled() == network


@pytest.mark.parametrize("factors", [{"latency": -1}, {"bandwidth": 0}, {"bandwidth": math.inf}])
def test_bad_scales(factors: dict[str, float]) -> None:
    with pytest.raises(NetworkError, match=f"{next(iter(factors))} must be a finite factor"):
        ps.Network(1e-6, 1e9).scaled(**factors)
    for network in (ps.Network(1e-6, 1e9), ps.Network.preset("dgx_h100")):
        with pytest.raises(NetworkError, match=r"bandwidth=1e\+308 makes .* too large a number"):
            network.scaled(bandwidth=1e308)
    assert ps.Network(1e-6).scaled(bandwidth=1e308) == ps.Network(1e-6)
