"""Parts of a `Cluster` from its arguments: nodes with their GPUs, and the network between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipesim.errors import ArgumentError, check_count, check_type, number
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.gpu_files import fitted_preset
from pipesim.network.host_link import HostLink
from pipesim.network.links import Nodes
from pipesim.network.network import Network
from pipesim.network.presets import machine as machine_named
from pipesim.utils.units import Bytes, in_bytes

_EXAMPLE = 'give such as pipesim.Cluster("dgx_h100", n_gpus=64)'
#: A GPU in any form that `pipesim.Transformer.costs` takes.
GpuLike = GPU | Mapping[str, Any] | Path | str


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster.

    Attributes
    ----------
    machine
        Name of the machine as in `pipesim.machines`; empty for none.
    n_gpus
        GPUs of all these nodes.
    gpu
        Rates and memory of each GPU.
    """

    machine: str
    n_gpus: int
    gpu: GPU

    @property
    def name(self) -> str:
        """Name of the GPU, or of the machine."""
        return self.gpu.name or self.machine or "GPU"


#: Name of a machine (empty for none), number of GPUs, and a GPU in any form.
_Row = tuple[str, int, GpuLike]


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


def _groups(machine: Any, n_gpus: int | None, gpu: GpuLike | None) -> tuple[NodeGroup, ...]:
    """Return the nodes with their GPUs."""
    rows = _rows(machine, n_gpus, gpu)
    return tuple(NodeGroup(name, count, as_gpu(kind)) for name, count, kind in rows)


def _with_memory(groups: tuple[NodeGroup, ...], memory: Bytes | None) -> tuple[NodeGroup, ...]:
    """Return the nodes with another memory of their GPUs, and check that there is one."""
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


def _machine_network(row: _Row, efficiency: float | None) -> Network:
    """Return the network of a machine; one without a machine has none by default."""
    name, _, gpu = row
    if not name:
        raise ArgumentError(
            "network is missing: a cluster without a machine needs one; give such as "
            "pipesim.Network(nodes=pipesim.Nodes(8, port_bandwidth=300e9, nic_bandwidth=50e9))"
        )
    if efficiency is not None:
        efficiency = checked_share("network_efficiency", efficiency)
    return fitted_preset(name, gpu, efficiency)


def checked_network(network: Network | Mapping[str, Any], efficiency: float | None) -> Network:
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
    if efficiency is None:
        return network
    share = checked_share("network_efficiency", efficiency)
    if network.nominal_share == share:
        return network
    scaled = network.scaled(bandwidth=share / (network.nominal_share or 1.0))
    return replace(scaled, nominal_share=share)


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
    shares = {network.nominal_share for network in networks}
    return Network(
        nodes=_slowest_nodes(nodes),
        host=_slowest_host(hosts) if len(hosts) == len(networks) else None,
        nominal_share=shares.pop() if len(shares) == 1 else None,
    )


def _slowest_host(hosts: Sequence[HostLink]) -> HostLink:
    """Return a host link with the slowest rates of several, shared by the most devices."""
    return HostLink(
        max(x.latency for x in hosts),
        min(x.bandwidth for x in hosts),
        max(x.devices_per_link for x in hosts),
    )


def _slowest_nodes(nodes: Sequence[Nodes]) -> Nodes:
    """Return nodes with the slowest rates of several of the same size."""
    return replace(
        nodes[0],
        port_latency=max(x.port_latency for x in nodes),
        nic_latency=max(x.nic_latency for x in nodes),
        port_bandwidth=min(x.port_bandwidth for x in nodes),
        nic_bandwidth=min(x.nic_bandwidth for x in nodes),
    )


def checked_share(name: str, value: object) -> float:
    """Return a share above 0 and at most 1."""
    share = number(value)
    if share is None or not 0 < share <= 1:
        raise ArgumentError(f"{name} must be above 0 and at most 1, got {value!r:.60}")
    return share


def groups_of_nodes(
    machine: Any, n_gpus: int | None, gpu: GpuLike | None, memory: Bytes | None
) -> tuple[NodeGroup, ...]:
    """Return the nodes of a cluster, whose GPUs have memory."""
    return _with_memory(_groups(machine, n_gpus, gpu), memory)


def machines_network(
    machine: Any, n_gpus: int | None, gpu: GpuLike | None, efficiency: float | None
) -> Network:
    """Return the network of the machines of a cluster."""
    return _slowest([_machine_network(row, efficiency) for row in _rows(machine, n_gpus, gpu)])
