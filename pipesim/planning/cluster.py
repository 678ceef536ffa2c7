"""`Cluster`: the GPUs of a training run, their nodes, network and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_name, check_type, number
from pipesim.models.gpu import GPU, as_gpu, fitted_preset
from pipesim.network.links import HostLink, NodeCollectives
from pipesim.network.network import Network
from pipesim.network.sources import machine as machine_named
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import Bytes, format_bytes, in_bytes

_EXAMPLE = 'give such as pipesim.Cluster("dgx_h100", n_gpus=64)'
#: A GPU in any form that `pipesim.Transformer.costs` takes.
GpuLike = GPU | Mapping[str, Any] | Path | str


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster: their machine (empty for none), and all their GPUs."""

    machine: str
    n_gpus: int
    gpu: GPU

    @property
    def name(self) -> str:
        """Name of the GPU, or of the machine."""
        return self.gpu.name or self.machine or "GPU"


#: Name of a machine (empty for none), number of GPUs, and a GPU in any form.
_Row = tuple[str, int, GpuLike]
#: Share of nominal bandwidths that messages reach, and the share of those of NICs; None if unknown.
_Shares = tuple[float | None, float | None]


def _rows(machine: Any, n_gpus: int | None, gpu: GpuLike | None) -> list[_Row]:
    """Return machine, number of GPUs and GPU of each kind of nodes."""
    if machine is None or isinstance(machine, str):
        if n_gpus is None:
            raise ArgumentError(f"n_gpus is missing; {_EXAMPLE}")
        return [_row(machine, n_gpus, gpu, "n_gpus")]
    if not isinstance(machine, Sequence) or not all(
        isinstance(row, (tuple, list)) and len(row) in (2, 3) for row in machine
    ):
        raise ArgumentError(
            f"machine must be a name, or a list of pairs of a name and a number of GPUs, got "
            f"{machine!r:.60}; {_EXAMPLE}"
        )
    if n_gpus is not None:
        raise ArgumentError(f"n_gpus={n_gpus!r} is given, but machine has the numbers of GPUs")
    if not machine:
        raise ArgumentError(f"machine is empty: the cluster has no GPU; {_EXAMPLE}")
    return [
        _row(row[0], row[1], row[2] if len(row) == 3 else gpu, f"machine: GPUs of row {k}")
        for k, row in enumerate(machine)
    ]


def _row(machine: object, n_gpus: object, gpu: GpuLike | None, name: str) -> _Row:
    """Return one kind of nodes, with the GPU of its machine by default."""
    if isinstance(n_gpus, int) and not isinstance(n_gpus, bool) and n_gpus == 0:
        raise ArgumentError(f"{name} is 0: a cluster needs a GPU; {_EXAMPLE}")
    count = check_count(name, n_gpus)
    if machine is None or machine == "":
        if gpu is None:
            raise ArgumentError(
                f"gpu is missing: a cluster without a machine needs a GPU; {_EXAMPLE}, or "
                'gpu="h100_sxm" with a network'
            )
        return "", count, gpu
    return str(machine), count, machine_named(machine).gpu if gpu is None else gpu  # type: ignore[arg-type]  # it checks the type


def _machine_network(row: _Row, shares: _Shares) -> Network:
    """Return the network of a machine; one without a machine has none by default."""
    name, _, gpu = row
    if not name:
        raise ArgumentError(
            "network is missing: a cluster without a machine needs one; give such as "
            "pipesim.Network(nodes=pipesim.Nodes(8, port_bandwidth=300e9, nic_bandwidth=50e9))"
        )
    efficiency, of_nics = shares
    return fitted_preset(name, gpu, efficiency, nic_efficiency=of_nics)


def _checked_network(network: Network | Mapping[str, Any], shares: _Shares) -> Network:
    """Return a network of single GPUs that was given."""
    if isinstance(network, Mapping):
        network = Network.from_dict(network)
    check_type("network", network, Network, "give such as pipesim.Network(nodes=...)")
    if network.links:
        raise ArgumentError("network has named links, which a cluster cannot group; give nodes")
    if network.nodes is not None and network.nodes.gpus_per_device > 1:
        raise ArgumentError(
            f"network has devices of {network.nodes.gpus_per_device} GPUs; give one of single GPUs"
        )
    efficiency, of_nics = shares
    if network.nodes is None and of_nics is not None:
        raise ArgumentError("nic_efficiency is given, but network has no nodes, and so no NICs")
    of_nics = efficiency if of_nics is None else of_nics
    if of_nics is None:
        return network
    own = network.nominal_share or 1.0
    own_of_nics = network.nominal_nic_share or own
    scaled = network.scaled(
        bandwidth=1.0 if efficiency is None else efficiency / own,
        nic_bandwidth=None if network.nodes is None else of_nics / own_of_nics,
    )
    share = network.nominal_share if efficiency is None else efficiency
    return replace(scaled, nominal_share=share, nominal_nic_share=of_nics)


def _slowest(networks: Sequence[Network]) -> Network:
    """Return a network with the slowest rates and the longest latencies of several."""
    first = networks[0].nodes
    if first is None or all(network == networks[0] for network in networks):
        return networks[0]
    nodes = [network.nodes for network in networks if network.nodes is not None]
    sizes = {(x.devices_per_node, x.nics_per_node) for x in nodes}
    if len(sizes) > 1:
        raise ArgumentError(
            "machine: nodes differ in their numbers of GPUs or NICs; give nodes of one size, or "
            "network=..."
        )
    hosts = [network.host for network in networks if network.host is not None]
    shares = {(network.nominal_share, network.nominal_nic_share) for network in networks}
    share, of_nics = shares.pop() if len(shares) == 1 else (None, None)
    slowest_host = None
    if len(hosts) == len(networks):
        slowest_host = HostLink(
            max(x.latency for x in hosts),
            min(x.bandwidth for x in hosts),
            max(x.devices_per_link for x in hosts),
        )
    return Network(
        nodes=replace(
            nodes[0],
            collectives=_slowest_collectives([x.collectives for x in nodes]),
            port_latency=max(x.port_latency for x in nodes),
            nic_latency=max(x.nic_latency for x in nodes),
            port_bandwidth=min(x.port_bandwidth for x in nodes),
            nic_bandwidth=min(x.nic_bandwidth for x in nodes),
        ),
        host=slowest_host,
        nominal_share=share,
        nominal_nic_share=of_nics,
    )


def _slowest_collectives(measured: Sequence[NodeCollectives | None]) -> NodeCollectives | None:
    """Return the slowest of each number; None if those of any node were not measured."""
    records = [x for x in measured if x is not None]
    if len(records) < len(measured):
        return None
    least = {"bandwidth", "peak_bandwidth", "half_bandwidth"}
    slowest = {
        x.name: (min if x.name in least else max)(getattr(own, x.name) for own in records)
        for x in fields(NodeCollectives)
    }
    return NodeCollectives(**slowest)


def checked_share(name: str, value: object) -> float:
    """Return a share above 0 and at most 1."""
    share = number(value)
    if share is None or not 0 < share <= 1:
        advice = "; give bytes as memory=" if name == "usable_memory" else ""
        raise ArgumentError(f"{name} must be above 0 and at most 1, got {value!r:.60}{advice}")
    return share


def groups_of_nodes(
    machine: Any, n_gpus: int | None, gpu: GpuLike | None, memory: Bytes | None
) -> tuple[NodeGroup, ...]:
    """Return the nodes of a cluster, whose GPUs have memory."""
    rows = _rows(machine, n_gpus, gpu)
    groups = tuple(NodeGroup(name, count, as_gpu(kind)) for name, count, kind in rows)
    if memory is not None:
        size = number(in_bytes("memory", memory))
        if size is None or not 0 < size < float("inf"):
            raise ArgumentError(f"memory must be finite bytes above 0, got {memory!r:.60}")
        groups = tuple(replace(x, gpu=replace(x.gpu, memory=size)) for x in groups)
    for group in groups:
        if group.gpu.memory is None:
            raise ArgumentError(
                f"memory of {group.name} is unknown; give memory=... in bytes, or GPU(memory=...)"
            )
    return groups


#: Keys of a mapping that describes a cluster.
_KEYS = (
    "machine", "n_gpus", "gpu", "network", "memory", "usable_memory", "network_efficiency",
    "nic_efficiency",
)  # fmt: skip
#: The network between groups of GPUs; all costs share its prepared links.
_grouped = lru_cache(maxsize=64)(Network.grouped)


@checked_names
class Cluster:
    """GPUs of a training run: their rates, memory, nodes and network.

    GPUs are numbered node by node, in the order of ``machine``. A tensor-parallel group has GPUs
    with consecutive numbers, and is one device of `network`.

    Parameters
    ----------
    machine
        Name of a machine (`pipesim.machines`); or several kinds of nodes, as a list of pairs such
        as ``[("dgx_h100", 32), ("dgx_a100", 32)]``, or of triples with a GPU. None (the default)
        for a ``gpu`` and a ``network`` of your own.
    n_gpus
        Number of GPUs, which fill their nodes; or fewer than those of one node.
    gpu
        GPU of each node: a `GPU`, the name of a preset, a mapping of fields, or a file of
        ``pipesim calibrate --json``, whose factors of the network apply to a machine. By default
        the GPU of the machine.
    network
        Links between single GPUs, such as ``Network(nodes=Nodes(8, ...))``, or a mapping as in
        `Network.from_dict`. By default that of the machine. The network of several machines has
        the slowest rates and the longest latencies of all of them, everywhere.
    memory
        Bytes of each GPU, also as ``"80GB"``. By default those of the preset, 0.95 of the
        GPU's: published runs need no more, and CUDA and NCCL take the rest.
    usable_memory
        Share of these bytes that tensors may take (1 by default), such as if other processes take
        some.
    network_efficiency
        Share of a machine's nominal bandwidths that messages reach; by default 0.7 as in
        `Network.preset`, or what the file of ``gpu`` says. A ``network`` has its own by default;
        another share changes its bandwidths by the ratio of both, or to this share of them if its
        own is unknown.
    nic_efficiency
        The same of the bandwidth of NICs alone; by default ``network_efficiency``, or what the file
        of ``gpu`` says.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.Cluster("dgx_h100", n_gpus=64)
    <Cluster of 64 h100_sxm (76.0 GiB): 8 nodes of 8 GPUs, 315 GB/s inside a node, 35 GB/s a NIC,
     0.7 of nominal>
    """

    def __init__(
        self,
        machine: str | Sequence[Sequence[Any]] | None = None,
        n_gpus: int | None = None,
        *,
        gpu: GpuLike | None = None,
        network: Network | Mapping[str, Any] | None = None,
        memory: Bytes | None = None,
        usable_memory: float = 1.0,
        network_efficiency: float | None = None,
        nic_efficiency: float | None = None,
    ) -> None:
        self.groups = groups_of_nodes(machine, n_gpus, gpu, memory)
        self._factors: Mapping[str, float] = {}  # of `scaled`
        if network_efficiency is not None:
            network_efficiency = checked_share("network_efficiency", network_efficiency)
        if nic_efficiency is not None:
            nic_efficiency = checked_share("nic_efficiency", nic_efficiency)
        shares = network_efficiency, nic_efficiency
        if network is None:
            rows = _rows(machine, n_gpus, gpu)
            self._network = _slowest([_machine_network(row, shares) for row in rows])
        else:
            self._network = _checked_network(network, shares)
        self.usable_memory = checked_share("usable_memory", usable_memory)
        self._check_nodes()

    @property
    def n_gpus(self) -> int:
        """Number of GPUs."""
        return sum(group.n_gpus for group in self.groups)

    @property
    def gpu(self) -> GPU:
        """GPU of all nodes."""
        if self.is_mixed:
            names = ", ".join(group.name for group in self.groups)
            raise ArgumentError(f"GPUs of the cluster differ: {names}; take cluster.gpus")
        return self.groups[0].gpu

    @cached_property
    def gpus(self) -> tuple[GPU, ...]:
        """Different GPUs, in order of their nodes."""
        return tuple(dict.fromkeys(group.gpu for group in self.groups))

    @property
    def is_mixed(self) -> bool:
        """Whether nodes have different GPUs."""
        return len(self.gpus) > 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node; 1 for a network without nodes."""
        nodes = self._network.nodes
        return 1 if nodes is None else min(nodes.gpus_per_node, self.n_gpus)

    @property
    def scaling(self) -> str:
        """Factors of `scaled` in words, such as ``"scaled: flops 0.5"``; empty without any."""
        factors = ", ".join(f"{name} {factor:g}" for name, factor in self._factors.items())
        return factors and f"scaled: {factors}"

    @property
    def memory(self) -> float:
        """Usable bytes of each GPU; the fewest, if GPUs differ."""
        return min(self.usable_bytes(gpu) for gpu in self.gpus)

    def usable_bytes(self, gpu: GPU) -> float:
        """Return the bytes of a GPU that tensors may take.

        Parameters
        ----------
        gpu
            A GPU with memory, such as one of `gpus`.

        Returns
        -------
        float
            Bytes: ``gpu.memory`` times ``usable_memory``.
        """
        memory = check_type("gpu", gpu, GPU).memory
        if memory is None:
            raise ArgumentError("gpu has no memory; give GPU(memory=...)")
        return memory * self.usable_memory

    def network(self, gpus_per_device: int = 1) -> Network:
        """Return the network between groups of GPUs that act as one device.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device, such as a tensor-parallel group; 1 by default.

        Returns
        -------
        Network
            Its devices are the groups, numbered in the order of their GPUs.
        """
        return _grouped(self._network, check_count("gpus_per_device", gpus_per_device))

    def gpu_numbers(self, gpus_per_device: int = 1) -> list[list[int]]:
        """Return, for each device, the different GPUs in it, as indices into `gpus`.

        Parameters
        ----------
        gpus_per_device
            GPUs of each device, a divisor of ``n_gpus``; 1 by default.

        Returns
        -------
        list
            One list a device, with ascending indices into `gpus`.

        Examples
        --------
        >>> import pipesim as ps
        >>> cluster = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)])
        >>> cluster.gpu_numbers(gpus_per_device=4)
        [[0], [0], [1], [1]]
        """
        size = check_count("gpus_per_device", gpus_per_device)
        if self.n_gpus % size:
            raise ArgumentError(f"gpus_per_device={size} does not divide {self.n_gpus} GPUs")
        number_of = {gpu: k for k, gpu in enumerate(self.gpus)}
        kinds = [number_of[group.gpu] for group in self.groups for _ in range(group.n_gpus)]
        return [sorted(set(kinds[k : k + size])) for k in range(0, len(kinds), size)]

    @checked_names
    def scaled(
        self,
        *,
        flops: float = 1.0,
        memory: float = 1.0,
        memory_bandwidth: float = 1.0,
        bandwidth: float = 1.0,
        nic_bandwidth: float | None = None,
        latency: float = 1.0,
    ) -> Cluster:
        """Return this cluster with rates, memory or latencies multiplied by factors, for a what-if.

        Parameters
        ----------
        flops
            Factor of the FLOP/s of all GPUs, and of the peak that MFU is of.
        memory, memory_bandwidth
            Factors of the bytes of each GPU, and of the rate at which it reads and writes them.
        bandwidth, nic_bandwidth, latency
            Factors of the network, as in `Network.scaled`.

        Returns
        -------
        Cluster
            The cluster, whose ``repr`` names the factors.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Cluster("dgx_h100", n_gpus=64).scaled(nic_bandwidth=0.5)
        <Cluster of 64 h100_sxm (76.0 GiB): 8 nodes of 8 GPUs, 315 GB/s inside a node, 17.5 GB/s a
         NIC, 0.7 of nominal, NICs 0.35; scaled: nic_bandwidth 0.5>
        """
        factors = {"flops": flops, "memory": memory, "memory_bandwidth": memory_bandwidth}
        for name, factor in factors.items():
            if not 0 < (number(factor) or 0.0) < math.inf:
                raise ArgumentError(f"{name} must be a finite factor > 0, got {factor!r:.60}")
        network = self._network.scaled(
            latency=latency, bandwidth=bandwidth, nic_bandwidth=nic_bandwidth
        )
        rows = [
            (
                group.machine,
                group.n_gpus,
                replace(
                    group.gpu,
                    flops=group.gpu.flops * flops,
                    peak_flops=group.gpu.peak * flops,
                    bandwidth=group.gpu.bandwidth * memory_bandwidth,
                    memory=(group.gpu.memory or 0.0) * memory,
                ),
            )
            for group in self.groups
        ]
        scaled = Cluster(rows, network=network, usable_memory=self.usable_memory)
        factors |= {"bandwidth": bandwidth, "latency": latency}
        factors |= {} if nic_bandwidth is None else {"nic_bandwidth": nic_bandwidth}
        own = {name: factor for name, factor in factors.items() if factor != 1}
        scaled._factors = {
            name: self._factors.get(name, 1.0) * own.get(name, 1.0)
            for name in dict.fromkeys((*self._factors, *own))
        }
        return scaled

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML.

        Returns
        -------
        dict
            ``machine`` (rows of name, number of GPUs and GPU), ``network`` and ``usable_memory``.
        """
        rows = []
        for group in self.groups:
            gpu = {key: value for key, value in asdict(group.gpu).items() if value is not None}
            rows.append([group.machine, group.n_gpus, gpu])
        network = self._network.to_dict()
        return {"machine": rows, "network": network, "usable_memory": self.usable_memory}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """Return the cluster in a mapping of the class's parameters, as `to_dict` returns it.

        Parameters
        ----------
        values
            Parameters of the class by name; missing ones have their defaults.

        Returns
        -------
        Cluster
            The cluster.
        """
        if not isinstance(values, Mapping):
            raise ArgumentError(
                f"values must be a mapping, got {values!r:.60}; give such as "
                '{"machine": "dgx_h100", "n_gpus": 64}'
            )
        for key in values:
            check_name("key of a cluster", key, _KEYS)
        return cls(**values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cluster):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"<Cluster of {self._text()}>"

    def _repr_html_(self) -> str:
        from pipesim.plot.html_tables import note_html

        return note_html(f"Cluster of {self._text()}")

    def _values(self) -> tuple[object, ...]:
        return self.groups, self._network, self.usable_memory

    def _text(self) -> str:
        gpus = " and ".join(
            f"{group.n_gpus} {group.name} ({format_bytes(group.gpu.memory or 0)})"
            for group in self.groups
        )
        if self.usable_memory < 1:
            gpus += f", {self.usable_memory:.0%} of memory usable"
        nodes = self._network.nodes
        scaled = f"; {self.scaling}" if self.scaling else ""
        if nodes is None:
            return f"{gpus}: {self._network.bandwidth / 1e9:g} GB/s between GPUs{scaled}"
        size, count = self.gpus_per_node, self.n_gpus // self.gpus_per_node
        share, of_nics = self._network.nominal_share, self._network.nominal_nic_share
        of_nominal = "" if share is None else f", {share:.3g} of nominal"
        of_nominal += "" if of_nics is None else f", NICs {of_nics:.3g}"
        text = f"{gpus}: {count} node{'s' * (count > 1)} of {size} GPUs"
        return (
            f"{text}, {nodes.port_bandwidth / 1e9:g} GB/s inside a node, "
            f"{nodes.nic_bandwidth / 1e9:g} GB/s a NIC{of_nominal}{scaled}"
        )

    def _check_nodes(self) -> None:
        nodes = self._network.nodes
        if nodes is None:
            return
        size = nodes.gpus_per_node
        for group in self.groups:
            n = group.n_gpus
            is_part = len(self.groups) == 1 and n < size
            if n % size and not is_part:
                full = max(n // size, 1) * size
                raise ArgumentError(
                    f"n_gpus={n} do not fill nodes of {size} GPUs; give a multiple of {size}, "
                    f"such as {full}"
                )
