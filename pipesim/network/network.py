"""Networks: how long a message takes, which messages share a link, how long collectives last."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, check_count, check_name, number
from pipesim.network.collectives import (
    all_to_all,
    all_to_all_links,
    ring_all_reduce,
    ring_links,
    tree_all_reduce,
    tree_links,
    uneven_all_to_all,
)
from pipesim.network.link_tables import matrix_links, read_links
from pipesim.network.links import (
    MAX_DEVICE,
    Link,
    Nodes,
    check_keys,
    checked_speed,
    endless,
    finite,
)
from pipesim.network.presets import machine
from pipesim.network.routes import Router, Routes
from pipesim.utils.atomic_write import check_path
from pipesim.utils.host_memory import check_memory

__all__ = ["Link", "Network", "Nodes", "Routes"]

#: Algorithms of an all-reduce.
ALL_REDUCE = {"ring": ring_all_reduce, "tree": tree_all_reduce}
#: Links that the members of each collective hold.
_LINKS = {"ring": ring_links, "tree": tree_links, "all_to_all": all_to_all_links}


@dataclass(frozen=True)
class Network:
    """What carries messages: ``links`` for the pairs that they name, ``nodes`` for the others.

    Without ``nodes``, every other directed pair of devices has a link of its own.

    Attributes
    ----------
    latency
        Seconds, of every pair that ``links`` does not name. Nodes have latencies of their own. A
        message holds no stream and no link for its latency, so that ``lower(overlap=False)`` makes
        no device wait for it; ``Costs.output_seconds`` are seconds that hold both.
    bandwidth
        Bytes a second, likewise; ``math.inf`` (the default) makes messages pure latency.
    links
        Links of particular pairs, which may be shared. Their messages hold nothing else.
    nodes
        Ports and NICs that all other messages hold, or None.

    Raises
    ------
    NetworkError
        For a negative or non-finite latency, a bandwidth that is not positive, a pair that is
        named twice or leads from a device to itself, a latency or bandwidth beside ``nodes``.

    Examples
    --------
    Two nodes of two devices; between them one slow link each way, shared by both pairs:

    >>> slow = [Link(10e-6, 12e9, ((0, 2), (1, 2))), Link(10e-6, 12e9, ((2, 0), (2, 1)))]
    >>> network = Network(latency=2e-6, bandwidth=200e9, links=slow)

    Nodes of eight devices, each with a port into its node and a NIC out of it:

    >>> network = Network.preset("dgx_h100")
    >>> network.all_reduce(2e9, range(8)) < network.all_reduce(2e9, range(0, 64, 8))
    True
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    links: tuple[Link, ...] = ()
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        latency, bandwidth = checked_speed("network", self.latency, self.bandwidth)
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)
        if not isinstance(self.links, (tuple, list)) or not all(
            isinstance(link, Link) for link in self.links
        ):
            raise NetworkError(f"links must be a sequence of Link, got {self.links!r}")
        object.__setattr__(self, "links", tuple(self.links))
        pairs = [pair for link in self.links for pair in link.pairs]
        if len(set(pairs)) < len(pairs):
            twice = min(pair for pair, count in Counter(pairs).items() if count > 1)
            raise NetworkError(f"pair {twice} is on more than one link; name it once")
        if self.nodes is None:
            return
        if not isinstance(self.nodes, Nodes):
            raise NetworkError(f"nodes must be a pipesim.Nodes, got {self.nodes!r}")
        if self.latency != 0 or not math.isinf(self.bandwidth):
            raise NetworkError(
                f"network: nodes have port_latency, nic_latency and bandwidths of their own, but "
                f"latency is {self.latency!r} and bandwidth {self.bandwidth!r} beside them; "
                f"leave out the one or the other (latency = 0, bandwidth = inf)"
            )

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
            How many devices there are.

        Raises
        ------
        NetworkError
            If a message or a link has an end that is none of these devices.
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

    def all_reduce(
        self, nbytes: float, devices: Sequence[int] | NDArray[Any], algorithm: str = "ring"
    ) -> float:
        """Return seconds of an all-reduce that has its links (rule 9); 0 for one member.

        Ring: ``2(n-1)/n * nbytes / bandwidth + 2(n-1) * latency``. Double binary tree:
        ``2 * nbytes / bandwidth + 2 * ceil(log2 n) * latency``. Both take the slowest latency and
        bandwidth of their hops, and hops that hold one link share its bandwidth; see
        `pipesim.network.collectives` for the sources.

        Parameters
        ----------
        nbytes
            Bytes that each member brings.
        devices
            The members, each once; the ring visits them in this order.
        algorithm
            ``"ring"`` or ``"tree"``.

        Raises
        ------
        NetworkError
            For bytes that are not finite or negative, members that are no devices, and seconds that
            are not finite.
        UnknownNameError
            For another algorithm.
        """
        seconds = ALL_REDUCE[check_name("all-reduce", algorithm, ALL_REDUCE)]
        size, members = _collective("all-reduce", nbytes, devices)
        return _finite("all-reduce", seconds, self._router, size, members)

    def all_to_all(self, nbytes: float | ArrayLike, devices: Sequence[int] | NDArray[Any]) -> float:
        """Return seconds in which each member sends ``nbytes / n`` to each other; 0 for one member.

        The largest latency of a pair, and the time of whatever is busiest: a device's ends or
        ports, ``(n-1)/n * nbytes / bandwidth``; a NIC, ``messages / n * nbytes / nic_bandwidth``
        for all messages that its devices exchange with other nodes; a link in ``links``, likewise
        for its pairs. Of uneven messages likewise, with the sum of their bytes in place of
        ``messages / n * nbytes``.

        Parameters
        ----------
        nbytes
            Bytes that each member brings, the n-th part that it keeps included; or the bytes of
            each message, an array of shape ``(n, n)`` whose row ``i`` is sent by the i-th of
            ``devices``, and whose diagonal is not sent.
        devices
            The members, each once, in any order.

        Raises
        ------
        NetworkError
            For bytes that are not finite or negative, or have another shape, members that are no
            devices, and seconds that are not finite.
        """
        if isinstance(nbytes, (list, tuple)) or np.ndim(nbytes) > 0:
            _, members = _collective("all-to-all", 0, devices)
            sizes = _matrix(nbytes, len(members))
            return _finite("all-to-all", uneven_all_to_all, self._router, sizes, members)
        size, members = _collective("all-to-all", nbytes, devices)
        return _finite("all-to-all", all_to_all, self._router, size, members)

    def collective_links(
        self, algorithm: str, devices: Sequence[int] | NDArray[Any], n_devices: int
    ) -> NDArray[np.int64]:
        """Return the links of the hops that begin at each member; a collective holds all of them.

        Numbered as `resolve` does for as many devices. Links of endless bandwidth are left out,
        and of an all-to-all also those of one pair alone, which hardly any message uses.

        Parameters
        ----------
        algorithm
            ``"ring"`` or ``"tree"`` of an all-reduce, or ``"all_to_all"``.
        devices
            The members, in the order that `all_reduce` or `all_to_all` gets.
        n_devices
            How many devices there are.

        Returns
        -------
        numpy.ndarray
            Shape ``(len(devices), most links of one)``, -1 for fewer.

        Raises
        ------
        NetworkError
            For members, or ends of links, that are none of these devices.
        UnknownNameError
            For another algorithm.
        """
        links = _LINKS[check_name("collective", algorithm, _LINKS)]
        _, members = _collective(algorithm, 0, devices)
        self._router.check_devices(n_devices)
        if members.max() >= n_devices:
            raise NetworkError(
                f"{algorithm} names device {members.max()}; there are {n_devices} devices, "
                f"0..{n_devices - 1}"
            )
        if len(members) == 1:
            return np.empty((1, 0), dtype=np.int64)
        return links(self._router, members, n_devices)

    def unlimited(self) -> Network:
        """Return this network with endless bandwidth: what is left is latency."""
        nodes = self.nodes
        if nodes is not None:
            nodes = replace(nodes, port_bandwidth=math.inf, nic_bandwidth=math.inf)
        links = tuple(replace(link, bandwidth=math.inf) for link in self.links)
        return replace(self, bandwidth=math.inf, links=links, nodes=nodes)

    @classmethod
    def preset(cls, name: str, efficiency: float = 1.0, gpus_per_device: int = 1) -> Network:
        """Return the network of a common machine; `pipesim.machines` lists them.

        Parameters
        ----------
        name
            Such as ``"dgx_h100"``.
        efficiency
            The part of the nominal bandwidths that messages reach, above 0 and at most 1.
        gpus_per_device
            GPUs that work in step as one device, such as a tensor-parallel group. Bytes are then
            those of one GPU, as `Costs.transformer` has them, and so are port and NIC.

        Raises
        ------
        UnknownNameError
            Naming the nearest known name and all of them.
        NetworkError
            For an efficiency out of range, and GPUs that do not divide those of a node.
        """
        nodes = machine(name).nodes
        part = number(efficiency)
        if part is None or not 0 < part <= 1:
            raise NetworkError(f"efficiency must be above 0 and at most 1, got {efficiency!r}")
        size = check_count("gpus_per_device", gpus_per_device)
        if nodes.devices_per_node % size:
            raise NetworkError(
                f"gpus_per_device must divide the {nodes.devices_per_node} GPUs of a node of "
                f"{name}, got {size}"
            )
        port, nic = nodes.port_bandwidth * part, nodes.nic_bandwidth * part
        return cls(
            nodes=replace(
                nodes,
                devices_per_node=nodes.devices_per_node // size,
                port_bandwidth=port,
                nic_bandwidth=nic,
                n_nics=None,
            )
        )

    @classmethod
    def from_csv(
        cls, path: Path | str, *, latency: float = 0.0, bandwidth: float = math.inf
    ) -> Network:
        """Read links from a CSV file with the columns ``source,target,latency,bandwidth[,link]``.

        One directed pair of devices a row, in seconds and bytes a second; an empty bandwidth, or
        ``inf``, is endless. Rows with the same ``link``, a name of your choice, share one link and
        must agree on its latency and bandwidth.

        Parameters
        ----------
        path
            The file.
        latency, bandwidth
            Of pairs that it does not name.

        Raises
        ------
        ArgumentError
            For something that is no path.
        NetworkError
            Naming file, line and column; or the file, if it cannot be read.
        CapacityError
            For a file that is too large for memory.
        """
        return cls(latency, bandwidth, read_links(check_path("path", path)))

    @classmethod
    def from_matrix(cls, latency: ArrayLike, bandwidth: ArrayLike) -> Network:
        """Return a network in which every pair has a link of its own.

        Parameters
        ----------
        latency, bandwidth
            Seconds and bytes a second, shape ``(n_devices, n_devices)``, from the row's device to
            the column's; one of them may be a single number. Diagonals are not read.

        Raises
        ------
        NetworkError
            For other shapes, and for values out of range, naming the pair.
        """
        return cls(links=matrix_links(latency, bandwidth))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; endless bandwidth is None."""
        nodes = {} if self.nodes is None else {"nodes": self.nodes.to_dict()}
        return {
            "latency": self.latency,
            "bandwidth": finite(self.bandwidth),
            "links": [link.to_dict() for link in self.links],
            **nodes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Network:
        """Read what `to_dict` wrote; ``preset = "dgx_h100"`` stands for the nodes of a machine.

        ``efficiency`` and ``gpus_per_device`` beside it are those of `preset`.

        Raises
        ------
        NetworkError
            Naming an unknown key, a missing one, or one that is out of range.
        UnknownNameError
            For an unknown preset.
        """
        check_keys("network", values, KEYS)
        links = values.get("links", ())
        if not isinstance(links, (tuple, list)) or not all(isinstance(x, Mapping) for x in links):
            raise NetworkError(f"links must be a list of tables, got {links!r}")
        nodes = None
        if "preset" in values and values.get("nodes") is not None:
            raise NetworkError("network has both preset and nodes; leave out one of them")
        of_preset = {key: values[key] for key in _OF_PRESET if key in values}
        if of_preset and "preset" not in values:
            raise NetworkError(
                f"network has {' and '.join(of_preset)} without a preset to apply to; add "
                'preset = "dgx_h100", or say in latency, bandwidth or nodes what messages reach'
            )
        if "preset" in values:
            nodes = cls.preset(values["preset"], **of_preset).nodes
        elif values.get("nodes") is not None:
            nodes = Nodes.from_dict(values["nodes"])
        return cls(
            values.get("latency", 0.0),
            endless(values.get("bandwidth")),
            tuple(Link.from_dict(link) for link in links),
            nodes,
        )


#: Arguments of `Network.preset` that may stand beside its name.
_OF_PRESET = ("efficiency", "gpus_per_device")
#: What a table of settings may say of a network.
KEYS = ("latency", "bandwidth", "links", "nodes", "preset", *_OF_PRESET)


def _finite(
    what: str,
    seconds: Callable[[Router, Any, NDArray[np.int64]], float],
    router: Router,
    nbytes: float | NDArray[np.float64],
    members: NDArray[np.int64],
) -> float:
    """Return the seconds of a collective; 0 for one member."""
    if len(members) == 1:
        return 0.0
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        try:
            lasts = seconds(router, nbytes, members)
        except ZeroDivisionError:  # bandwidth so small that a share of it is 0
            lasts = math.inf
    if not math.isfinite(lasts):
        raise NetworkError(
            f"{what} of {np.sum(nbytes):g} bytes over {len(members)} members would last {lasts} s; "
            "check bytes, latency (s) and bandwidth (bytes/s)"
        )
    return lasts


def _matrix(nbytes: ArrayLike, n: int) -> NDArray[np.float64]:
    """Return the bytes of each pair of n members, checked."""
    try:
        sizes = np.asarray(nbytes, dtype=np.float64)
    except (TypeError, ValueError):
        sizes = np.empty(0)
    if sizes.shape != (n, n):
        raise NetworkError(
            f"all-to-all: bytes of pairs must be numbers of shape ({n}, {n}), one row a sender, "
            f"got {nbytes!r:.60}"
        )
    for i, j in np.argwhere(~(np.isfinite(sizes) & (sizes >= 0)))[:1].tolist():
        raise NetworkError(
            f"all-to-all: bytes must be finite and >= 0, got {sizes[i, j]} from member {i} to {j}"
        )
    return sizes


def _collective(
    what: str, nbytes: object, devices: Iterable[Any]
) -> tuple[float, NDArray[np.int64]]:
    """Return bytes and members of a collective operation, checked."""
    size = number(nbytes)
    if size is None or not 0 <= size < math.inf:
        raise NetworkError(f"{what}: bytes must be finite and >= 0, got {nbytes!r}")
    if isinstance(devices, range):  # of any length, in no memory
        check_memory(f"{what} of {len(devices):,} members", 8 * len(devices), "name fewer members")
    try:
        members = np.asarray(devices)
    except ValueError:  # a ragged sequence
        members = np.empty((0, 0))
    if members.ndim != 1 or not len(members) or members.dtype.kind not in "iu":
        raise NetworkError(
            f"{what}: devices must be a sequence of device numbers, such as [0, 1], got {devices!r}"
        )
    for wrong in members[(members < 0) | (members > MAX_DEVICE)]:
        raise NetworkError(f"{what}: a device must be 0 to {MAX_DEVICE}, got {wrong}")
    distinct, counts = np.unique(members, return_counts=True)
    if len(distinct) < len(members):
        raise NetworkError(
            f"{what}: device {distinct[counts > 1][0]} is named twice; name each member once"
        )
    return size, members.astype(np.int64)
