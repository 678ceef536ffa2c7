"""Networks: which link carries a message, how fast, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import networks

import pipesim as ps
from pipesim.errors import NetworkError, PipeError


def resolve(network: ps.Network, *pairs: tuple[int, int], n_devices: int = 4) -> list[Any]:
    """Return number, latency and bandwidth of each pair's link."""
    source, target = np.array(pairs).T
    columns = network.resolve(source, target, n_devices)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_uniform() -> None:
    """Every directed pair has a link of its own."""
    network = ps.Network(latency=2, bandwidth=8)
    links = resolve(network, (0, 1), (1, 0), (0, 2), (3, 2))
    assert len({number for number, _, _ in links}) == 4
    assert {(latency, bandwidth) for _, latency, bandwidth in links} == {(2.0, 8.0)}


def test_named_pairs() -> None:
    """Pairs of one link share its number; the others keep links of their own."""
    links = [ps.Link(5, 1, ((0, 2), (1, 2))), ps.Link(6, 2, ((2, 0),))]
    network = ps.Network(latency=1, bandwidth=math.inf, links=links)  # type: ignore[arg-type]
    there, too, back, other = resolve(network, (0, 2), (1, 2), (2, 0), (0, 1))
    assert there == too == (0, 5.0, 1.0)
    assert back == (1, 6.0, 2.0)
    assert other[1:] == (1.0, math.inf)
    assert other[0] >= 2


@given(st.data())
def test_pairs_share_only_named_links(data: st.DataObject) -> None:
    """Two pairs have one number if, and only if, one link names both."""
    network = data.draw(networks(3))
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    number = dict(zip(pairs, (n for n, _, _ in resolve(network, *pairs, n_devices=3)), strict=True))
    for one in pairs:
        for two in pairs:
            together = one == two or any({one, two} <= set(k.pairs) for k in network.links)
            assert (number[one] == number[two]) == together


def test_all_reduce() -> None:
    """Rule 9: 2(n-1)/n * bytes / bandwidth + 2(n-1) * latency."""
    network = ps.Network(latency=1, bandwidth=8)
    assert network.all_reduce(64, 4) == 2 * 3 / 4 * 64 / 8 + 2 * 3 * 1
    assert network.all_reduce(64, 1) == 0
    assert ps.Network(latency=1).all_reduce(64, 2) == 2


@given(st.data())
def test_plain_values_round_trip(data: st.DataObject) -> None:
    """`to_dict` and `from_dict` are inverse."""
    network = data.draw(networks(4))
    assert ps.Network.from_dict(network.to_dict()) == network


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
        (None, "network must be a table"),
    ],
)
def test_bad_plain_values(values: Any, message: str) -> None:
    """As a file may hold them."""
    with pytest.raises(NetworkError, match=message):
        ps.Network.from_dict(values)
