"""Routes of messages through a network: the links each holds, its latency and its bandwidth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import NetworkError
from pipesim.network.links import Link, Nodes


class Routes(NamedTuple):
    """Links, latency and bandwidth of n messages. Messages contend for links in common.

    Attributes
    ----------
    links
        Shape ``(n, k)``: numbers (>= 0) of the links that a message holds, padded with -1.
    latency
        Seconds, shape ``(n,)``.
    bandwidth
        Bytes a second, shape ``(n,)``: those of the message's slowest link; may be infinite.
    """

    links: NDArray[np.int64]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]


class Paths(NamedTuple):
    """Routes with the bandwidth of each link, instead of the slowest only."""

    links: NDArray[np.int64]  # as in `Routes`, with -1 for none in any column
    capacity: NDArray[np.float64]  # bytes a second of each of `links`; infinite for none
    latency: NDArray[np.float64]


class Router:
    """The links of a network as arrays, sorted for look-up.

    Links are numbered in this order:

    - the links that ``links`` names;
    - without nodes: the own links of all pairs, by ``source * n_devices + target``;
    - with nodes: the outgoing ports and the incoming ports, one each a device, then the outgoing
      NICs and the incoming NICs.

    Attributes
    ----------
    source, target, link
        Each pair that ``links`` names and its link's number, sorted by ``source``, then ``target``.
    link_latency, link_bandwidth
        Seconds, and bytes a second, of each link in ``links``.
    """

    def __init__(
        self, links: Sequence[Link], nodes: Nodes | None, latency: float, bandwidth: float
    ) -> None:
        self.nodes, self.latency, self.bandwidth = nodes, float(latency), float(bandwidth)
        numbers = itertools.chain.from_iterable(p for link in links for p in link.pairs)
        ends = np.fromiter(numbers, dtype=np.int64).reshape(-1, 2)
        size = np.fromiter((len(link.pairs) for link in links), dtype=np.int64, count=len(links))
        link = np.repeat(np.arange(len(links)), size)
        order = np.lexsort((ends[:, 1], ends[:, 0]))
        self.source, self.target, self.link = ends[order, 0], ends[order, 1], link[order]
        self.n_named = int(ends.max(initial=-1)) + 1  # the named devices are below this
        self._key = self.source * self.n_named + self.target
        self.link_latency = np.array([k.latency for k in links], dtype=np.float64)
        self.link_bandwidth = np.array([k.bandwidth for k in links], dtype=np.float64)

    def n_links(self, n_devices: int) -> int:
        """Return the number of links between so many devices."""
        named, nodes = len(self.link_latency), self.nodes
        if nodes is None:
            return named + n_devices**2
        n_nics = -(-n_devices // nodes.devices_per_node) * nodes.nics_per_node
        return named + 2 * (n_devices + n_nics)

    def check_devices(self, n_devices: int) -> None:
        """Raise `NetworkError` if ``links`` names a device of ``n_devices`` or more."""
        if self.n_named <= n_devices:
            return
        highest = np.maximum(self.source, self.target)
        first = int(self.link[highest >= n_devices].min())
        device = int(highest[self.link == first].max())
        raise NetworkError(
            f"link {first} names device {device}; there are {n_devices} devices, 0..{n_devices - 1}"
        )

    def named(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the link that names each pair, or -1."""
        if not len(self._key):
            return np.full(len(source), -1, dtype=np.int64)
        in_range = (source < self.n_named) & (target < self.n_named)
        key = np.where(in_range, source * self.n_named + target, -1)
        index = np.minimum(np.searchsorted(self._key, key), len(self._key) - 1)
        return np.where(self._key[index] == key, self.link[index], -1)

    def paths(self, source: NDArray[np.int64], target: NDArray[np.int64], n_devices: int) -> Paths:
        """Return the path of each message; its ends must be below ``n_devices``."""
        n_links = len(self.link_latency)
        if self.nodes is None:
            links = (n_links + source * n_devices + target)[:, np.newaxis]
            capacity = np.full(links.shape, self.bandwidth)
            latency = np.full(len(links), self.latency)
        else:
            links, capacity, latency = _node_paths(self.nodes, n_links, source, target, n_devices)
        named = self.named(source, target)
        rows = np.flatnonzero(named >= 0)
        links[rows], capacity[rows] = -1, math.inf
        links[rows, 0] = named[rows]
        capacity[rows, 0] = self.link_bandwidth[named[rows]]
        latency[rows] = self.link_latency[named[rows]]
        return Paths(links, capacity, latency)

    def ends(self, devices: NDArray[np.int64], n_devices: int) -> NDArray[np.int64]:
        """Return each device's port out, port in, NIC out and NIC in, shape ``(n, 4)``.

        -1 stands for links of infinite bandwidth, which no message holds. Without nodes all are -1.
        """
        if self.nodes is None:
            return np.full((len(devices), 4), -1, dtype=np.int64)
        numbers = _ends(self.nodes, len(self.link_latency), devices, n_devices)
        port, nic = self.nodes.port_bandwidth, self.nodes.nic_bandwidth
        held = np.isfinite([port, port, nic, nic])
        return np.where(held, np.stack(numbers, axis=1), -1)

    def routes(
        self, source: NDArray[np.int64], target: NDArray[np.int64], n_devices: int
    ) -> Routes:
        """Return the route of each message; its ends must be below ``n_devices``."""
        links, capacity, latency = self.paths(source, target, n_devices)
        return Routes(links, latency, capacity.min(axis=1))


def _node_paths(
    nodes: Nodes,
    first: int,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    n_devices: int,
) -> Paths:
    """Return the paths over ports and NICs, which are numbered from ``first`` on."""
    across = nodes.node_of(source) != nodes.node_of(target)
    port_out, _, nic_out, _ = _ends(nodes, first, source, n_devices)
    _, port_in, _, nic_in = _ends(nodes, first, target, n_devices)
    columns, speed = [], []
    if math.isfinite(nodes.port_bandwidth):
        columns += [port_out, port_in]
        speed += [nodes.port_bandwidth] * 2
    if math.isfinite(nodes.nic_bandwidth):
        columns += [np.where(across, nic_out, -1), np.where(across, nic_in, -1)]
        speed += [nodes.nic_bandwidth] * 2
    if not columns:
        columns, speed = [np.full(len(source), -1, dtype=np.int64)], [math.inf]
    links = np.stack(columns, axis=1)
    capacity = np.where(links >= 0, np.array(speed), math.inf)
    return Paths(links, capacity, np.where(across, nodes.nic_latency, nodes.port_latency))


def _ends(
    nodes: Nodes, first: int, devices: NDArray[np.int64], n_devices: int
) -> tuple[NDArray[np.int64], ...]:
    """Return the numbers of each device's port out, port in, NIC out and NIC in."""
    n_nics = -(-n_devices // nodes.devices_per_node) * nodes.nics_per_node
    nics = first + 2 * n_devices + nodes.nic_of(devices)
    return first + devices, first + n_devices + devices, nics, nics + n_nics
