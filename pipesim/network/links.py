"""Parts of a network: links of pairs, nodes with ports and NICs, and links to host memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import NetworkError, check_count, number
from pipesim.utils.checks import Count, Fraction, Range, Seconds, checked, checked_names
from pipesim.utils.texts import parse_rate

#: Largest device number of a network; a pair of device numbers then fits 64 bits.
MAX_DEVICE = 2**31 - 1


@checked_names
@dataclass(frozen=True, slots=True)  # slots: a full matrix of 512 devices has 261,632 links
class Link:
    """One link and the directed pairs of devices whose messages it carries, one at a time.

    Attributes
    ----------
    latency
        Seconds.
    bandwidth
        Bytes a second; ``math.inf`` for pure latency.
    pairs
        ``(sender, receiver)`` pairs. Several pairs of one link share it (rule 8).

    Examples
    --------
    Two messages from device 0 share a link of 25 GB/s:

    >>> import pipesim as ps
    >>> link = ps.Link(latency=2e-6, bandwidth=25e9, pairs=((0, 1), (0, 2)))
    >>> ps.Network(links=[link]).resolve([0, 0], [1, 2], n_devices=3).links.tolist()
    [[0], [0]]
    """

    latency: float
    bandwidth: float
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.pairs, (tuple, list)) or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in self.pairs
        ):
            raise NetworkError(
                f"pairs must be a list of (sender, receiver), such as [[0, 1]], got {self.pairs!r}"
            )
        pairs = tuple([(_device("sender", a), _device("receiver", b)) for a, b in self.pairs])
        object.__setattr__(self, "pairs", pairs)
        latency, bandwidth = checked_speed(self, self.latency, self.bandwidth)
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)
        for a, b in self.pairs:
            if a == b:
                raise NetworkError(f"{self}: no link leads from {a} to {b}")

    def __str__(self) -> str:
        return f"link of {list(self.pairs)}"

    @classmethod
    def unchecked(
        cls, latency: float, bandwidth: float, pairs: tuple[tuple[int, int], ...]
    ) -> Link:
        """Return a link without checking its values, which the caller has checked together.

        Parameters
        ----------
        latency, bandwidth
            Seconds, and bytes a second, as floats.
        pairs
            Tuple of ``(sender, receiver)`` pairs of ints.

        Returns
        -------
        Link
            Equal to a link that was checked.
        """
        link = object.__new__(cls)
        object.__setattr__(link, "latency", latency)
        object.__setattr__(link, "bandwidth", bandwidth)
        object.__setattr__(link, "pairs", pairs)
        return link

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite bandwidth is None.

        Returns
        -------
        dict
            ``latency`` (s), ``bandwidth`` (bytes/s) and ``pairs``, as lists.
        """
        return {
            "latency": self.latency,
            "bandwidth": bandwidth_to_json(self.bandwidth),
            "pairs": [list(pair) for pair in self.pairs],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Link:
        """Return the link in a mapping such as `to_dict` returns.

        Parameters
        ----------
        values
            ``pairs``; ``latency`` (0 s by default) and ``bandwidth`` (infinite by default).

        Returns
        -------
        Link
            The link.
        """
        check_keys("link", values, ("latency", "bandwidth", "pairs"))
        if "pairs" not in values:
            raise NetworkError(f"link {dict(values)} names no pairs; add pairs = [[0, 1]]")
        return cls(
            values.get("latency", 0.0),
            bandwidth_from_json(values.get("bandwidth")),
            values["pairs"],
        )


#: Bytes a second, which may be infinite; also a text such as ``"25GB/s"``.
Bandwidth = Annotated[float, Range(0, math.inf, above=True, parse=parse_rate)]


@checked
@dataclass(frozen=True)
class NodeCollectives:
    """Measured seconds of collectives between n GPUs of one node.

    An all-reduce takes ``latency + latency_per_gpu * (n - 1) + 2(n-1)/n * bytes / rate``, with
    ``rate = bandwidth * (1 - loss / n)``. The halves, all-gather and reduce-scatter, take
    ``half_latency`` of its latency, and half of its bytes at ``half_bandwidth`` of its rate.

    Attributes
    ----------
    latency, latency_per_gpu
        Seconds of an all-reduce besides its bytes: of all, and of each GPU but the first.
    bandwidth
        Bytes a second of a ring of very many GPUs; ``math.inf`` for latency alone.
    loss
        Part of ``bandwidth``, times n, that n GPUs do not reach; from 0 to 1.
    peak_bandwidth
        Largest rate, such as that of the data sheet; infinite by default. A port that is faster
        raises it. `Network.scaled` leaves it.
    half_latency, half_bandwidth
        Factors of a half, from 0.5 to 1, and above 0 to 1; 0.7 and 1 by default.

    Examples
    --------
    Values that suit a DGX A100, for two of its GPUs and 300 MB:

    >>> import pipesim as ps
    >>> own = ps.NodeCollectives(36e-6, 5.5e-6, bandwidth=240e9, loss=0.4)
    >>> nodes = ps.Nodes(8, port_bandwidth=210e9, collectives=own)
    >>> round(ps.Network(nodes=nodes).all_reduce(300e6, devices=[0, 1]) * 1e3, 3)  # ms
    1.604
    """

    latency: Seconds = 0.0
    latency_per_gpu: Seconds = 0.0
    bandwidth: Bandwidth = math.inf
    loss: Fraction = 0.0
    peak_bandwidth: Bandwidth = math.inf
    half_latency: Annotated[float, Range(0.5, 1)] = 0.7
    half_bandwidth: Annotated[float, Range(0, 1, above=True)] = 1.0

    def rate(self, n_gpus: int, port_bandwidth: float) -> float:
        """Return the bytes a second of an all-reduce.

        Parameters
        ----------
        n_gpus
            GPUs of the collective.
        port_bandwidth
            Bytes a second of a port of the nodes.

        Returns
        -------
        float
            Bytes a second.
        """
        most = max(self.peak_bandwidth, port_bandwidth)
        return min(self.bandwidth * (1 - self.loss / n_gpus), most)

    def scaled(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> NodeCollectives:
        """Return the same with latencies and bandwidth multiplied by factors.

        Parameters
        ----------
        latency, bandwidth
            Factors.

        Returns
        -------
        NodeCollectives
            With the same peak and factors of halves.
        """
        return replace(
            self,
            latency=self.latency * latency,
            latency_per_gpu=self.latency_per_gpu * latency,
            bandwidth=self.bandwidth * bandwidth,
        )


@checked
@dataclass(frozen=True)
class Nodes:
    """Machines of several devices: one port a device, and NICs that the devices of a node share.

    Node k has the devices from ``k * devices_per_node`` on.

    - Inside a node, a message holds the sender's outgoing port and the receiver's incoming port.
      It has ``port_latency`` and ``port_bandwidth``.
    - Between nodes, a message holds these two ports, a NIC out of the sender's node and a NIC into
      the receiver's. It has ``nic_latency`` and the smaller of both bandwidths.

    Ports and NICs carry one message at a time in each direction (full duplex). Those of infinite
    bandwidth are never held, since no message occupies them for any time (rule 4).

    Attributes
    ----------
    devices_per_node
        Devices of each node; the last node may have fewer.
    port_latency, nic_latency
        Seconds of a message inside a node, and of a message between nodes.
    port_bandwidth, nic_bandwidth
        Bytes a second of one port and of one NIC, in each direction; ``math.inf`` for pure latency.
    n_nics
        NICs of each node: a divisor of ``devices_per_node``; by default one a device. Device d of
        a node uses NIC ``d * n_nics // devices_per_node``.
    gpus_per_device, nodes_per_device
        GPUs that act as one device, such as a tensor-parallel group, and the nodes on which they
        are. Port and NIC are those of each GPU, and bytes those of one GPU. A device on several
        nodes has them to itself: ``devices_per_node`` is 1 then.
    collectives
        Measured all-reduces, all-gathers and reduce-scatters inside a node; None (the default) for
        rings over ports.

    Examples
    --------
    Nodes of eight devices and four NICs, each shared by two devices:

    >>> import pipesim as ps
    >>> nodes = ps.Nodes(8, port_bandwidth=300e9, nic_latency=5e-6, nic_bandwidth=25e9, n_nics=4)
    >>> nodes.node_bandwidth
    100000000000.0
    """

    devices_per_node: Count
    port_latency: float = 0.0
    port_bandwidth: float = math.inf
    nic_latency: float = 0.0
    nic_bandwidth: float = math.inf
    n_nics: Count | None = None
    gpus_per_device: Count = 1
    nodes_per_device: Count = 1
    collectives: NodeCollectives | None = None

    def __post_init__(self) -> None:
        self._check_gpus()
        per_node = self.devices_per_node
        n_nics = per_node if self.n_nics is None else self.n_nics
        if per_node > MAX_DEVICE:
            raise NetworkError(f"nodes: devices_per_node must be at most {MAX_DEVICE}")
        if per_node % n_nics:
            raise NetworkError(
                f"nodes: {n_nics} NICs cannot be shared evenly by {per_node} devices; give a "
                f"divisor of {per_node} (for several NICs a device, multiply nic_bandwidth)"
            )
        object.__setattr__(self, "n_nics", n_nics)
        for name in ("port", "nic"):
            latency, bandwidth = f"{name}_latency", f"{name}_bandwidth"
            values = getattr(self, latency), getattr(self, bandwidth)
            seconds, rate = checked_speed("nodes", *values, f"{name}_")
            object.__setattr__(self, latency, seconds)
            object.__setattr__(self, bandwidth, rate)

    def _check_gpus(self) -> None:
        if self.gpus_per_device % self.nodes_per_device:
            raise NetworkError(
                f"nodes: gpus_per_device={self.gpus_per_device} cannot be spread evenly over "
                f"nodes_per_device={self.nodes_per_device}"
            )
        if self.nodes_per_device > 1 and self.devices_per_node != 1:
            raise NetworkError(
                f"nodes: a device on {self.nodes_per_device} nodes has them to itself; give "
                f"devices_per_node=1, got {self.devices_per_node!r}"
            )

    def grouped(self, gpus_per_device: int) -> Nodes:
        """Return the same nodes, with groups of GPUs that act as one device.

        Port and NIC of a device are then those of each of its GPUs. GPUs of one device that share
        a NIC have an equal part of its bandwidth each; devices that share a NIC still share it.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device: a divisor of the GPUs of a node, or a multiple of them.

        Returns
        -------
        Nodes
            Their devices are the groups.

        Raises
        ------
        NetworkError
            For GPUs that neither divide those of a node nor are a multiple of them, and for nodes
            that are grouped already.
        """
        size, per_node = check_count("gpus_per_device", gpus_per_device), self.devices_per_node
        if self.gpus_per_device > 1 and size != self.gpus_per_device:
            raise NetworkError(
                f"devices of {self.gpus_per_device} GPUs cannot be grouped again; group the nodes "
                "of single GPUs"
            )
        if size == self.gpus_per_device:
            return self
        if per_node % size and size % per_node:
            raise NetworkError(
                f"gpus_per_device must divide the {per_node} GPUs of a node, or be a multiple of "
                f"them, got {size}"
            )
        devices, gpus_per_nic = max(per_node // size, 1), per_node // self.nics_per_node
        sharing = min(size, gpus_per_nic)  # GPUs of a device on one NIC
        n_nics = self.nics_per_node if size < gpus_per_nic else devices
        if gpus_per_nic % sharing or size % sharing:
            raise NetworkError(
                f"devices of {size} GPUs cannot share NICs of {gpus_per_nic} GPUs each evenly"
            )
        return replace(
            self,
            devices_per_node=devices,
            gpus_per_device=size,
            nodes_per_device=max(size // per_node, 1),
            nic_bandwidth=self.nic_bandwidth / sharing,
            n_nics=n_nics,
        )

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node."""
        return self.devices_per_node * self.gpus_per_device // self.nodes_per_device

    @property
    def node_bandwidth(self) -> float:
        """Bytes a second of all NICs of a node, in each direction."""
        gpus = self.gpus_per_device // self.nodes_per_device
        return self.nics_per_node * gpus * self.nic_bandwidth

    @property
    def nics_per_node(self) -> int:
        """NICs of each node: ``n_nics`` as an integer, also if it was None."""
        return self.devices_per_node if self.n_nics is None else self.n_nics

    def node_of(self, devices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the node of each device.

        Parameters
        ----------
        devices
            Numbers of devices, of any shape.

        Returns
        -------
        numpy.ndarray
            Number of the node of each device; the same shape.
        """
        return np.floor_divide(devices, self.devices_per_node)

    def nic_of(self, devices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the NIC of each device; NICs are numbered across all nodes.

        Parameters
        ----------
        devices
            Numbers of devices, of any shape.

        Returns
        -------
        numpy.ndarray
            Number of the NIC of each device; the same shape.
        """
        local = devices % self.devices_per_node
        first = self.node_of(devices) * self.nics_per_node
        return first + local * self.nics_per_node // self.devices_per_node

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite bandwidth is None.

        Returns
        -------
        dict
            Fields by name. Latencies are in seconds, bandwidths in bytes a second. ``collectives``
            only if set.
        """
        values = _to_json(self)
        if self.collectives is None:
            del values["collectives"]
            return values
        return values | {"collectives": _to_json(self.collectives)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Nodes:
        """Return the nodes in a mapping such as `to_dict` returns.

        Parameters
        ----------
        values
            Fields by name; ``devices_per_node`` is needed, others have their defaults.

        Returns
        -------
        Nodes
            Equal to the nodes that `to_dict` was called on.
        """
        check_keys("nodes", values, [f.name for f in fields(cls)])
        if "devices_per_node" not in values:
            raise NetworkError(f"nodes {dict(values)} lack a size; add devices_per_node = 8")
        fields_of_nodes = _from_json(values)
        own = values.get("collectives")
        if own is not None:
            check_keys("collectives of nodes", own, [f.name for f in fields(NodeCollectives)])
            fields_of_nodes["collectives"] = NodeCollectives(**_from_json(own))
        return cls(**fields_of_nodes)


def _to_json(record: Nodes | NodeCollectives) -> dict[str, Any]:
    """Return the fields of a record for JSON."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: bandwidth_to_json(v) if "bandwidth" in k else v for k, v in values.items()}


def _from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: bandwidth_from_json(v) if "bandwidth" in k else v for k, v in values.items()}


def checked_speed(
    where: object, latency: object, bandwidth: object, prefix: str = ""
) -> tuple[float, float]:
    """Return a latency and a bandwidth as floats, from any kind of numbers."""
    if isinstance(bandwidth, str):
        bandwidth = bandwidth if (parsed := parse_rate(bandwidth)) is None else parsed
    seconds, rate = number(latency), number(bandwidth)
    if seconds is None or not 0 <= seconds < math.inf:
        raise NetworkError(f"{where}: {prefix}latency must be finite and >= 0 s, got {latency!r}")
    if rate is None or rate <= 0:
        raise NetworkError(
            f"{where}: {prefix}bandwidth must be > 0 bytes/s (math.inf for pure latency), "
            f"got {bandwidth!r}"
        )
    return seconds, rate


def check_keys(what: str, values: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise `NetworkError` for a key that a table for ``what`` must not have."""
    if not isinstance(values, Mapping):
        raise NetworkError(f"{what} must be a table, got {values!r}")
    allowed = tuple(allowed)
    for key in values:
        if key not in allowed:
            raise NetworkError(f"{what} has no {key!r} (it has: {', '.join(allowed)})")


def bandwidth_to_json(bandwidth: float) -> float | None:
    """Return a bandwidth for JSON, which has no infinity: None stands for it."""
    return None if math.isinf(bandwidth) else bandwidth


def bandwidth_from_json(bandwidth: Any) -> Any:
    """Return a bandwidth from JSON, where None stands for infinity."""
    return math.inf if bandwidth is None else bandwidth


def _device(end: str, value: object) -> int:
    if type(value) is int and value >= 0:  # most values, which need no slower check
        device = value
    else:
        device = check_count(f"{end} of a link", value, 0)
    if device > MAX_DEVICE:
        raise NetworkError(f"{end} of a link must be at most {MAX_DEVICE}, got {device}")
    return device


@checked
@dataclass(frozen=True)
class HostLink:
    """Link between devices and the memory of their host, such as PCIe; each direction has its own.

    Link k is that of the devices from ``k * devices_per_link`` on. An OFFLOAD holds the link to the
    host, and a RELOAD the link from it, for ``latency + bytes / bandwidth``. Copies of one link are
    served one at a time (rule 8).

    Attributes
    ----------
    latency
        Seconds of a copy besides its bytes.
    bandwidth
        Bytes a second in each direction; ``math.inf`` (the default) for latency alone.
    devices_per_link
        Devices that share a link, such as the GPUs of one PCIe switch.

    Examples
    --------
    PCIe switches of two GPUs each, and the link of a device of two GPUs:

    >>> import pipesim as ps
    >>> ps.HostLink(latency=10e-6, bandwidth=32e9, devices_per_link=2).grouped(2)
    HostLink(latency=1e-05, bandwidth=16000000000.0, devices_per_link=1)
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    devices_per_link: Count = 1

    def __post_init__(self) -> None:
        latency, bandwidth = checked_speed("host", self.latency, self.bandwidth)
        if self.devices_per_link > MAX_DEVICE:
            raise NetworkError(
                f"host: devices_per_link must be at most {MAX_DEVICE}, got {self.devices_per_link}"
            )
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)

    def grouped(self, gpus_per_device: int) -> HostLink:
        """Return this link for groups of GPUs that act as one device, and bytes of one GPU each.

        GPUs of one device that share a link have an equal part of its bandwidth each.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device: a divisor or a multiple of ``devices_per_link``.

        Returns
        -------
        HostLink
            The link of the groups; its bandwidth is the part of one GPU.

        Raises
        ------
        NetworkError
            If groups and links of several GPUs do not fit into each other.
        """
        size, per_link = check_count("gpus_per_device", gpus_per_device), self.devices_per_link
        if size % per_link and per_link % size:
            raise NetworkError(
                f"devices of {size} GPUs cannot share host links of {per_link} GPUs each evenly"
            )
        shared = min(size, per_link)
        return replace(
            self, bandwidth=self.bandwidth / shared, devices_per_link=max(1, per_link // size)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite bandwidth is None.

        Returns
        -------
        dict
            ``latency`` (s), ``bandwidth`` (bytes/s) and ``devices_per_link``.
        """
        return asdict(self) | {"bandwidth": bandwidth_to_json(self.bandwidth)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostLink:
        """Return the link in a mapping such as `to_dict` returns.

        Parameters
        ----------
        values
            Fields by name; missing ones have their defaults.

        Returns
        -------
        HostLink
            Equal to the link that `to_dict` was called on.
        """
        check_keys("host", values, [f.name for f in fields(cls)])
        bandwidth = bandwidth_from_json(values.get("bandwidth"))
        return cls(**{**values, "bandwidth": bandwidth})


def scaled_link(link: HostLink, latency: float, bandwidth: float) -> HostLink:
    """Return a link with latency and bandwidth multiplied by factors."""
    return replace(link, latency=link.latency * latency, bandwidth=link.bandwidth * bandwidth)
