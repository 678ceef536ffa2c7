"""`Network`: latency and bandwidth of messages, links that they share, seconds of collectives.

Tables and presets are read in `pipesim.network.sources`, closed forms of collectives are in
`pipesim.network.collectives`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, check_count, check_name, number
from pipesim.network.collectives import (
    ALL_REDUCE,
    Group,
    all_to_all,
    all_to_all_links,
    checked_matrix,
    checked_members,
    finite_seconds,
    group_of_gpus,
    half,
    ring,
    ring_links,
    tree,
    tree_links,
    uneven_all_to_all,
)
from pipesim.network.links import (
    HostLink,
    Link,
    Nodes,
    bandwidth_to_json,
    checked_speed,
    scaled_link,
)
from pipesim.network.routes import Router, Routes
from pipesim.network.sources import (
    EFFICIENCY,
    matrix_links,
    network_fields,
    preset_fields,
    read_links,
)
from pipesim.utils.checks import Positive, checked_as, checked_names
from pipesim.utils.files import check_path
from pipesim.utils.texts import Bytes, in_bytes

#: Links that the members of each collective hold. Those of the fastest all-reduce are the ring's.
_LINKS = {
    "ring": ring_links,
    "tree": tree_links,
    "fastest": ring_links,
    "all_to_all": all_to_all_links,
}


@checked_as(NetworkError)
@dataclass(frozen=True)
class Network:
    """Links between devices: ``links`` for the pairs that they name, ``nodes`` for the others.

    Without ``nodes``, every other directed pair of devices has its own link.

    Attributes
    ----------
    latency
        Seconds, for every pair that ``links`` does not name; with ``nodes``, these have latencies.
        A message holds no stream and no link for its latency, so that no device waits for it with
        ``lower(overlap=False)``. ``Costs.output_seconds`` are seconds that hold both.
    bandwidth
        Bytes a second, for the same pairs, also as ``"25GB/s"`` or in bits as ``"200Gb/s"``;
        ``math.inf`` (the default) makes messages pure latency.
    links
        Links of particular pairs, which may be shared. Their messages hold no other link.
    nodes
        Nodes, whose ports and NICs all other messages hold, or None.
    host
        Link of each device to the memory of its host, a `HostLink`, over which activations are
        offloaded and reloaded; None (the default) for none.
    nominal_share
        Share of the nominal bandwidths of a machine that these bandwidths are, the ``efficiency``
        of `preset`; None (the default) if unknown. No time depends on it: bandwidths are those
        that messages reach. `pipesim.Cluster` needs it to take another efficiency.
    nominal_nic_share
        The same of NICs alone, the ``nic_efficiency`` of `preset`; None (the default) for
        ``nominal_share``.
    interleaves
        Whether links send messages between the pieces of a collective, as NICs do with those of
        NCCL: a message and a collective then do not wait for each other, and each has the whole
        bandwidth, as if the other had next to no bytes. False (the default): they take turns, whole
        (rule 8). A message of 1 ms may then wait for a reduction of 100 ms.

    Examples
    --------
    Ring all-reduce over four devices: each link carries 6/4 of the bytes.

    >>> import pipesim as ps
    >>> ps.Network(bandwidth=100e9).all_reduce(1e9, devices=[0, 1, 2, 3])
    0.015

    Two nodes of two devices; between them one slow link each way, shared by both pairs:

    >>> slow = [ps.Link(10e-6, 12e9, ((0, 2), (1, 2))), ps.Link(10e-6, 12e9, ((2, 0), (2, 1)))]
    >>> network = ps.Network(latency=2e-6, bandwidth=200e9, links=slow)

    Nodes of eight devices, each with a port into its node and a NIC out of it:

    >>> network = ps.Network.preset("dgx_h100")
    >>> network.all_reduce(2e9, range(8)) < network.all_reduce(2e9, range(0, 64, 8))
    True
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    links: tuple[Link, ...] = ()
    nodes: Nodes | None = None
    host: HostLink | None = None
    nominal_share: Positive | None = None
    nominal_nic_share: Positive | None = None
    interleaves: bool = False

    def __post_init__(self) -> None:
        latency, bandwidth = checked_speed("network", self.latency, self.bandwidth)
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)
        if not isinstance(self.links, (tuple, list)) or not all(
            isinstance(link, Link) for link in self.links
        ):
            raise NetworkError(f"links must be a sequence of Link, got {self.links!r}")
        object.__setattr__(self, "links", tuple(self.links))
        if self.nominal_nic_share == self.nominal_share:  # equal networks are equal records
            object.__setattr__(self, "nominal_nic_share", None)
        pairs = [pair for link in self.links for pair in link.pairs]
        if len(set(pairs)) < len(pairs):
            twice = min(pair for pair, count in Counter(pairs).items() if count > 1)
            raise NetworkError(f"pair {twice} is on more than one link; name it once")
        if self.nodes is not None and (self.latency != 0 or not math.isinf(self.bandwidth)):
            raise NetworkError(
                f"network: nodes have their own latencies and bandwidths (port_..., nic_...), but "
                f"latency {self.latency!r} and bandwidth {self.bandwidth!r} are given too; "
                f"leave out the one or the other (latency = 0, bandwidth = inf)"
            )

    def __getstate__(self) -> dict[str, Any]:  # equal networks have equal pickles
        return {x.name: getattr(self, x.name) for x in fields(self)}

    @functools.cached_property
    def _router(self) -> Router:
        return Router(self.links, self.nodes, self.latency, self.bandwidth)

    def resolve(self, source: NDArray[Any], target: NDArray[Any], n_devices: int) -> Routes:
        """Return the links that each message holds, its latency (s) and its bandwidth (bytes/s).

        Parameters
        ----------
        source, target
            Devices at both ends of each message, shape ``(n,)``.
        n_devices
            Number of devices of the pipeline.

        Returns
        -------
        Routes
            Links, latency (s) and bandwidth (bytes/s) of each message, in the order of ``source``.

        Examples
        --------
        One link is slow; the other direction has the rate of the network.

        >>> import pipesim as ps
        >>> network = ps.Network(bandwidth=8e9, links=[ps.Link(0.0, 1e9, ((0, 1),))])
        >>> network.resolve([0, 1], [1, 0], n_devices=2).bandwidth
        array([1.e+09, 8.e+09])
        """
        self._router.check_devices(n_devices)
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        for ends in (source, target):
            wrong = ends[(ends < 0) | (ends >= n_devices)]
            if len(wrong):
                raise NetworkError(
                    f"a message names device {wrong[0]}; there are {n_devices} devices, "
                    f"0..{n_devices - 1}"
                )
        return self._router.routes(source, target, n_devices)

    def resolve_host(
        self, device: NDArray[Any], to_host: NDArray[np.bool_], n_devices: int
    ) -> Routes:
        """Return the link that each copy of activations holds, its latency (s) and bandwidth.

        Links have numbers beyond those of `resolve`.

        Parameters
        ----------
        device, to_host
            Device of each copy, and whether it goes to its host or comes from it; arrays of shape
            ``(n,)``.
        n_devices
            Number of devices of the pipeline.

        Returns
        -------
        Routes
            The link, latency (s) and bandwidth (bytes/s) of each copy, in the order of ``device``.

        Raises
        ------
        NetworkError
            If the network has no host link.

        Examples
        --------
        >>> import numpy as np
        >>> import pipesim as ps
        >>> network = ps.Network(host=ps.HostLink(bandwidth=32e9, devices_per_link=2))
        >>> copies = network.resolve_host(np.array([0, 1]), np.array([True, True]), n_devices=2)
        >>> copies.links[:, 0] == copies.links[0, 0]  # both devices share one link
        array([ True,  True])
        """
        if self.host is None:
            raise NetworkError(
                "the network has no link to the memory of the hosts; give such as "
                "Network(host=HostLink(latency=10e-6, bandwidth=25e9))"
            )
        size = self.host.devices_per_link
        first = self._router.n_links(n_devices)
        link = first + device // size + np.where(to_host, 0, -(-n_devices // size))
        n = np.ones(len(device))
        return Routes(link[:, np.newaxis], self.host.latency * n, self.host.bandwidth * n)

    def all_reduce(
        self, nbytes: Bytes, devices: Sequence[int] | NDArray[Any], algorithm: str = "ring"
    ) -> float:
        """Return the seconds of an all-reduce that holds its links (rule 9); 0 for one member.

        `pipesim.network.collectives` has the formulas and sources. Hops that hold the same link
        share its bandwidth. Between nodes, rings use all NICs of the members, as in NCCL, in any
        order of the members.

        Parameters
        ----------
        nbytes
            Bytes that each member contributes.
        devices
            The members, each once; the ring visits them in this order.
        algorithm
            ``"ring"``, ``"tree"``, or ``"fastest"``: the faster of both.

        Returns
        -------
        float
            Seconds.

        Examples
        --------
        Two steps of a ring, each with a latency of 1 s and 10 bytes at 10 bytes a second:

        >>> import pipesim as ps
        >>> ps.Network(latency=1, bandwidth=10).all_reduce(20, devices=[0, 1])
        4.0
        """
        formula = ALL_REDUCE[check_name("all-reduce", algorithm, ALL_REDUCE)]
        size, members = checked_members("all-reduce", nbytes, devices)
        return finite_seconds("all-reduce", formula, self._router, size, members)

    def group_all_reduce(self, nbytes: Bytes, n_gpus: int) -> float:
        """Return the seconds of an all-reduce between GPUs of one device; 0 for one GPU.

        The faster of ring and tree. Inside a node that is the ring, or `NodeCollectives` if the
        nodes have them.

        Parameters
        ----------
        nbytes
            Bytes that each GPU contributes.
        n_gpus
            GPUs of a tensor-parallel group, which fill the nodes of their device one by one.

        Returns
        -------
        float
            Seconds.

        Raises
        ------
        NetworkError
            For bytes that are not finite or negative, and for a network without nodes, or with
            fewer ``gpus_per_device``, unless ``n_gpus`` is 1.

        Examples
        --------
        >>> import pipesim as ps
        >>> network = ps.Network.preset("dgx_h100", 1.0, gpus_per_device=8)
        >>> round(network.group_all_reduce(450e6, 8) * 1e3, 2)  # 14/8 ms and 48 us
        1.8
        """
        size = in_bytes("nbytes", nbytes)
        group = self._group(size, n_gpus)
        return 0.0 if group is None else min(ring(group, size), tree(group, size))

    def group_all_gather(self, nbytes: Bytes, n_gpus: int) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, between GPUs of one device.

        Half of a ring all-reduce; inside a node by `NodeCollectives`, if the nodes have them.

        Parameters
        ----------
        nbytes
            Bytes of the gathered tensor, of which each GPU contributes its part.
        n_gpus
            As for `group_all_reduce`.

        Returns
        -------
        float
            Seconds; 0 for one GPU.
        """
        size = in_bytes("nbytes", nbytes)
        group = self._group(size, n_gpus)
        return 0.0 if group is None else half(group, size)

    def _group(self, nbytes: object, n_gpus: object) -> Group | None:
        size, count = number(nbytes), check_count("n_gpus", n_gpus)
        if size is None or not 0 <= size < math.inf:
            raise NetworkError(f"nbytes must be finite and >= 0, got {nbytes!r}")
        if count == 1:
            return None
        if self.nodes is None:
            raise NetworkError(
                f"{count} GPUs of one device: the network has no nodes, and so no rate between "
                'them; give such as Network.preset("dgx_h100", gpus_per_device=8)'
            )
        if count > self.nodes.gpus_per_device:
            raise NetworkError(
                f"{count} GPUs of one device, but each device of the network has "
                f"{self.nodes.gpus_per_device}; give gpus_per_device={count}"
            )
        return group_of_gpus(self.nodes, count)

    def all_to_all(self, nbytes: float | ArrayLike, devices: Sequence[int] | NDArray[Any]) -> float:
        """Return seconds in which each member sends ``nbytes / n`` to each other; 0 for one member.

        The sum of the largest latency of a pair and the largest of these times:

        - the ends or ports of a device, ``(n-1)/n * nbytes / bandwidth``;
        - a NIC, ``messages / n * nbytes / nic_bandwidth`` for all messages that its devices
          exchange with other nodes;
        - a link in ``links``, with the same formula for the messages of its pairs.

        For uneven messages, the sum of their bytes replaces ``messages / n * nbytes``.

        Parameters
        ----------
        nbytes
            Bytes that each member contributes, including the n-th part that it keeps. Or the bytes
            of each message: an array of shape ``(n, n)`` whose row ``i`` is sent by the i-th of
            ``devices``, and whose diagonal is not sent.
        devices
            The members, each once, in any order.

        Returns
        -------
        float
            Seconds.

        Examples
        --------
        Each device keeps half of its 20 bytes, and sends the other half at 10 bytes a second.

        >>> import pipesim as ps
        >>> network = ps.Network(latency=1, bandwidth=10)
        >>> network.all_to_all(20, devices=[0, 1])
        2.0
        >>> network.all_to_all([[0, 20], [40, 0]], devices=[0, 1])  # 1 s and 40 bytes
        5.0
        """
        if isinstance(nbytes, (list, tuple)) or np.ndim(nbytes) > 0:
            _, members = checked_members("all-to-all", 0, devices)
            sizes = checked_matrix(nbytes, len(members))
            return finite_seconds("all-to-all", uneven_all_to_all, self._router, sizes, members)
        size, members = checked_members("all-to-all", nbytes, devices)
        return finite_seconds("all-to-all", all_to_all, self._router, size, members)

    def collective_links(
        self, algorithm: str, devices: Sequence[int] | NDArray[Any], n_devices: int
    ) -> NDArray[np.int64]:
        """Return the links of the hops that begin at each member; a collective holds all of them.

        Links are numbered as by `resolve` for as many devices; with `interleaves`, by numbers of
        their own. Links of infinite bandwidth are left out. For an all-to-all, so are links of a
        single pair, which hardly any message uses.

        Parameters
        ----------
        algorithm
            ``"ring"``, ``"tree"`` or ``"fastest"`` of an all-reduce, or ``"all_to_all"``.
        devices
            The members, in the order that `all_reduce` or `all_to_all` gets.
        n_devices
            Number of devices of the pipeline.

        Returns
        -------
        numpy.ndarray
            Numbers of links, shape ``(len(devices), most links of a member)``, padded with -1.

        Examples
        --------
        In a ring of two devices, each holds the link to the other.

        >>> import pipesim as ps
        >>> network = ps.Network(bandwidth=10)
        >>> network.collective_links("ring", [0, 1], n_devices=2).tolist()
        [[1], [2]]
        >>> network.resolve([0, 1], [1, 0], n_devices=2).links.tolist()
        [[1], [2]]
        """
        links = _LINKS[check_name("collective", algorithm, _LINKS)]
        _, members = checked_members(algorithm, 0, devices)
        self._router.check_devices(n_devices)
        if members.max() >= n_devices:
            raise NetworkError(
                f"{algorithm} names device {members.max()}; there are {n_devices} devices, "
                f"0..{n_devices - 1}"
            )
        if len(members) == 1:
            return np.empty((1, 0), dtype=np.int64)
        held = links(self._router, members, n_devices)
        if self.interleaves:  # behind the links of messages and of hosts
            n_others = self._router.n_links(n_devices) + 2 * n_devices
            return np.where(held >= 0, held + n_others, held)
        return held

    def unlimited(self) -> Network:
        """Return this network with infinite bandwidth, so that only latency is left.

        Returns
        -------
        Network
            With the same latencies and links; those of infinite bandwidth are never held.
        """
        return self._times(1.0, math.inf, math.inf)

    def grouped(self, gpus_per_device: int) -> Network:
        """Return this network with groups of GPUs that act as one device; see `Nodes.grouped`.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device: a divisor of the GPUs of a node, or a multiple of them.

        Returns
        -------
        Network
            Its devices are the groups. Bandwidths and bytes are those of one GPU.

        Raises
        ------
        NetworkError
            For a network with named links, or without nodes, unless the group is one GPU; and as
            `Nodes.grouped`.
        """
        if check_count("gpus_per_device", gpus_per_device) == 1 and self.nodes is None:
            return self
        if self.nodes is None or self.links:
            raise NetworkError(
                f"gpus_per_device={gpus_per_device} needs a network of nodes without named links"
            )
        nodes = self.nodes.grouped(gpus_per_device)
        if self.host is None or nodes == self.nodes:
            return replace(self, nodes=nodes)
        return replace(self, nodes=nodes, host=self.host.grouped(gpus_per_device))

    @checked_names
    def scaled(
        self, *, latency: float = 1.0, bandwidth: float = 1.0, nic_bandwidth: float | None = None
    ) -> Network:
        """Return this network with all latencies and bandwidths multiplied by factors.

        Costs of a transformer with tensor parallelism include collectives of the network that they
        were built with. ``costs.rebuilt(network=...)`` builds them for this one;
        ``replace(costs, network=...)`` does not.

        Parameters
        ----------
        latency
            Factor of all latencies, finite and at least 0.
        bandwidth
            Factor of all bandwidths, of links, ports, NICs and hosts, finite and above 0.
        nic_bandwidth
            Another factor for the bandwidth of NICs; None (the default) for ``bandwidth``.

        Returns
        -------
        Network
            With the same links, nodes and host.
        """
        slower, faster = number(latency), number(bandwidth)
        if slower is None or not 0 <= slower < math.inf:
            raise NetworkError(f"latency must be a finite factor >= 0, got {latency!r}")
        if faster is None or not 0 < faster < math.inf:
            raise NetworkError(f"bandwidth must be a finite factor > 0, got {bandwidth!r}")
        nics = faster if nic_bandwidth is None else number(nic_bandwidth)
        if nics is None or not 0 < nics < math.inf:
            raise NetworkError(f"nic_bandwidth must be a finite factor > 0, got {nic_bandwidth!r}")
        if nic_bandwidth is not None and self.nodes is None:
            raise NetworkError("nic_bandwidth: the network has no nodes, and so no NICs")
        scaled = self._times(slower, faster, nics)
        for before, after in zip(self._bandwidths(), scaled._bandwidths(), strict=True):
            if math.isinf(after) and not math.isinf(before):
                raise NetworkError(
                    f"bandwidth={bandwidth!r} makes {before:g} bytes/s too large a number; give a "
                    "smaller factor, or unlimited() for infinite bandwidths"
                )
        return scaled

    def _bandwidths(self) -> list[float]:
        nodes = [] if self.nodes is None else [self.nodes.port_bandwidth, self.nodes.nic_bandwidth]
        nodes += [] if self.host is None else [self.host.bandwidth]
        return [self.bandwidth, *nodes, *(link.bandwidth for link in self.links)]

    def _times(self, latency: float, bandwidth: float, nic_bandwidth: float) -> Network:
        nodes = self.nodes
        if nodes is not None:
            own = nodes.collectives
            nodes = replace(
                nodes,
                port_latency=nodes.port_latency * latency,
                port_bandwidth=nodes.port_bandwidth * bandwidth,
                nic_latency=nodes.nic_latency * latency,
                nic_bandwidth=nodes.nic_bandwidth * nic_bandwidth,
                collectives=own and own.scaled(latency=latency, bandwidth=bandwidth),
            )
        links = tuple(
            replace(link, latency=link.latency * latency, bandwidth=link.bandwidth * bandwidth)
            for link in self.links
        )
        host = None if self.host is None else scaled_link(self.host, latency, bandwidth)
        shares: list[float | None] = []
        of_nics = self.nominal_nic_share or self.nominal_share
        for share, factor in ((self.nominal_share, bandwidth), (of_nics, nic_bandwidth)):
            product = (share or 0.0) * factor
            shares.append(product if 0 < product < math.inf else None)
        return replace(
            self,
            latency=self.latency * latency,
            bandwidth=self.bandwidth * bandwidth,
            links=links,
            nodes=nodes,
            host=host,
            nominal_share=shares[0],
            nominal_nic_share=shares[1],
        )

    @classmethod
    @checked_names
    def preset(
        cls,
        name: str,
        efficiency: float = EFFICIENCY,
        gpus_per_device: int = 1,
        *,
        nic_efficiency: float | None = None,
    ) -> Network:
        """Return the network of a common machine; `pipesim.machines` lists them.

        Parameters
        ----------
        name
            Such as ``"dgx_h100"``.
        efficiency
            Share of the nominal bandwidths that messages reach, above 0 and at most 1; 0.7 by
            default, everywhere. Published steps are predicted with it.
        gpus_per_device
            GPUs that act as one device, such as a tensor-parallel group; more than a node has for
            groups over several nodes. Bytes are then those of one GPU, as in `Costs.transformer`,
            and so are port and NIC.
        nic_efficiency
            The share that messages between nodes reach of their NICs; by default ``efficiency``.

        Returns
        -------
        Network
            Its ``nodes``, ``host`` and shares of nominal rates are set; it fits any number of
            devices.

        Examples
        --------
        >>> import pipesim as ps
        >>> network = ps.Network.preset("dgx_a100", efficiency=0.5)
        >>> network.nodes.port_bandwidth, network.nodes.nic_bandwidth
        (150000000000.0, 12500000000.0)
        """
        return cls(**preset_fields(name, efficiency, gpus_per_device, nic_efficiency))

    @classmethod
    def from_csv(
        cls, path: Path | str, *, latency: float = 0.0, bandwidth: float = math.inf
    ) -> Network:
        r"""Read links from a CSV file with the columns ``source,target,latency,bandwidth[,link]``.

        One directed pair of devices a row, in seconds and bytes a second. An empty bandwidth, or
        ``inf``, is infinite. Rows with the same ``link``, a name of your choice, share one link and
        must have the same latency and bandwidth.

        Parameters
        ----------
        path
            The file to read.
        latency, bandwidth
            Seconds and bytes a second of pairs that the file does not name; by default 0 and
            infinite.

        Returns
        -------
        Network
            One link for each pair, or for each name in the column ``link``.

        Raises
        ------
        NetworkError
            Naming file, line and column; or the file, if it cannot be read.
        CapacityError
            For a file that is too large for memory.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> import pipesim as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "links.csv")
        ...     _ = path.write_text("source,target,latency,bandwidth\n0,1,1e-6,10e9\n")
        ...     ps.Network.from_csv(path).links
        (Link(latency=1e-06, bandwidth=10000000000.0, pairs=((0, 1),)),)
        """
        return cls(latency, bandwidth, read_links(check_path("path", path)))

    @classmethod
    def from_matrix(cls, latency: ArrayLike, bandwidth: ArrayLike) -> Network:
        """Return a network in which every pair has its own link.

        Parameters
        ----------
        latency, bandwidth
            Seconds and bytes a second, shape ``(n_devices, n_devices)``, from the row's device to
            the column's; one of them may be a single value. Bandwidths may be texts. Diagonals are
            not read.

        Returns
        -------
        Network
            One link for each pair of different devices.
        """
        return cls(links=matrix_links(latency, bandwidth))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite bandwidth is None.

        Returns
        -------
        dict
            Latencies in seconds, bandwidths in bytes a second. ``nodes``, ``host``,
            ``nominal_share``, ``nominal_nic_share`` and ``interleaves`` only if set.
        """
        nodes = {} if self.nodes is None else {"nodes": self.nodes.to_dict()}
        host = {} if self.host is None else {"host": self.host.to_dict()}
        names = ("nominal_share", "nominal_nic_share")
        shares = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {
            "latency": self.latency,
            "bandwidth": bandwidth_to_json(self.bandwidth),
            "links": [link.to_dict() for link in self.links],
            **nodes,
            **host,
            **shares,
            **({"interleaves": True} if self.interleaves else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Network:
        """Return the network in a mapping such as `to_dict` returns.

        ``preset = "dgx_h100"`` stands for the nodes of a machine. The keys ``efficiency``,
        ``nic_efficiency`` and ``gpus_per_device`` may accompany it; they are those of `preset`,
        with its defaults.

        Parameters
        ----------
        values
            Fields by name; ``links``, ``nodes`` and ``host`` are mappings too. Missing fields have
            their defaults.

        Returns
        -------
        Network
            Equal to the network that `to_dict` was called on.
        """
        return cls(**network_fields(values))
