"""Collectives over nodes: a ring for each NIC, and trees from node to node, as NCCL builds them.

A ring enters and leaves a node through one NIC. NCCL runs as many rings as a node has NICs, each
with its share of the bytes, so that together they reach the bandwidth of all NICs of the node, up
to that of a port. It orders the members of a ring by node. Its trees are chains inside a node, and
double binary trees between nodes. For n members on k nodes, at most g on one of them:

=================  ==============================================================================
bandwidth          that of a port; between nodes at most the sum of the NICs of the members of a
                   node, for the node with the least
ring all-reduce    ``2(n-1)/n * bytes / bandwidth + 2(n-k) * port_latency + 2(k-1) * nic_latency``
tree all-reduce    ``2 * bytes / bandwidth + 2(g-1) * port_latency
                   + 2 * ceil(log2 k) * nic_latency``
half a ring        reduce-scatter or all-gather: half of the ring's seconds
=================  ==============================================================================

Source: NCCL, ``src/graph/tuning.cc`` (numbers of steps inside and between nodes, latencies by
step), https://github.com/NVIDIA/nccl, and
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/ (trees).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.network.links import Nodes


class Group(NamedTuple):
    """Members of a collective, as their nodes see them.

    Attributes
    ----------
    n_members, n_nodes
        Number of members, and of the nodes on which they are.
    largest
        Most members on one node.
    bandwidth
        Bytes a second of all rings together; may be infinite.
    port_latency, nic_latency
        Seconds of a step inside a node, and of one between nodes.
    """

    n_members: int
    n_nodes: int
    largest: int
    bandwidth: float
    port_latency: float
    nic_latency: float


def group_of_devices(nodes: Nodes, devices: NDArray[np.int64]) -> Group:
    """Return the group of a collective between devices, each once, in any order."""
    node, size = np.unique(nodes.node_of(devices), return_counts=True)
    bandwidth = nodes.port_bandwidth
    if len(node) > 1:
        # Each NIC counts once, however many members use it.
        nics = np.unique(nodes.nic_of(devices)) // nodes.nics_per_node
        fewest = int(np.unique(nics, return_counts=True)[1].min())
        bandwidth = min(bandwidth, fewest * nodes.nic_bandwidth)
    largest = int(size.max())
    return Group(len(devices), len(node), largest, bandwidth, nodes.port_latency, nodes.nic_latency)


def group_of_gpus(nodes: Nodes, n_gpus: int, stride: int = 1) -> Group:
    """Return the group of a collective between every ``stride``-th of consecutive GPUs.

    The first is the first GPU of a node, so that GPUs of one device fill its nodes one by one; see
    `Nodes.gpus_per_device`. The groups of the GPUs in between use their own NICs.
    """
    per_node = max(1, nodes.gpus_per_node // stride)
    n_nodes = -(-n_gpus // per_node)
    bandwidth = nodes.port_bandwidth
    if n_nodes > 1:
        fewest = n_gpus - (n_nodes - 1) * per_node  # GPUs on the last node
        bandwidth = min(bandwidth, nodes.node_bandwidth * fewest / nodes.gpus_per_node)
    largest = min(n_gpus, per_node)
    return Group(n_gpus, n_nodes, largest, bandwidth, nodes.port_latency, nodes.nic_latency)


def gpus_all_to_all(nodes: Nodes, nbytes: float, n_gpus: int, stride: int = 1) -> float:
    """Return the seconds in which each GPU of a group sends an n-th of its bytes to each other.

    The group is that of `group_of_gpus`. Each GPU sends through its port, and to other nodes
    through its part of the NICs: the slower of both, and the largest latency.
    """
    group = group_of_gpus(nodes, n_gpus, stride)
    if n_gpus == 1:
        return 0.0
    seconds = (n_gpus - 1) / n_gpus * nbytes / nodes.port_bandwidth
    if group.n_nodes == 1:
        return seconds + nodes.port_latency
    smallest = n_gpus - (group.n_nodes - 1) * group.largest
    across = (n_gpus - smallest) / n_gpus * nbytes
    nic = nodes.node_bandwidth / nodes.gpus_per_node
    return max(seconds, across / nic) + max(nodes.port_latency, nodes.nic_latency)


def gpus_ring_step(nodes: Nodes, nbytes: float, n_gpus: int, stride: int = 1) -> float:
    """Return the seconds in which each GPU of a group sends bytes to the next, by the slowest hop.

    The group is that of `group_of_gpus`.
    """
    if n_gpus == 1:
        return 0.0
    if group_of_gpus(nodes, n_gpus, stride).n_nodes == 1:
        return nbytes / nodes.port_bandwidth + nodes.port_latency
    nic = nodes.node_bandwidth / nodes.gpus_per_node
    return nbytes / min(nodes.port_bandwidth, nic) + nodes.nic_latency


def ring(group: Group, nbytes: float) -> float:
    """Return the seconds of a ring all-reduce; see the module for the formula."""
    n, n_nodes = group.n_members, group.n_nodes
    steps = 2 * (n - 1)
    latency = 2 * (n - n_nodes) * group.port_latency + 2 * (n_nodes - 1) * group.nic_latency
    return steps / n * nbytes / group.bandwidth + latency


def tree(group: Group, nbytes: float) -> float:
    """Return the seconds of a tree all-reduce; see the module for the formula."""
    chain = 2 * (group.largest - 1) * group.port_latency
    depth = (group.n_nodes - 1).bit_length()  # log2 of the nodes, rounded up
    return 2 * nbytes / group.bandwidth + chain + 2 * depth * group.nic_latency
