"""Seconds of collective operations in closed form, and the links that they hold (rule 9).

For n members of b bytes each; latency and bandwidth are those of the slowest hop. Members on nodes,
with no named link between them, have the formulas below instead.

=================  ==============================================================================
ring all-reduce    ``2(n-1)/n * b / bandwidth + 2(n-1) * latency``
tree all-reduce    ``2 * b / bandwidth + 2 * ceil(log2 n) * latency``
all-to-all         ``max over links of (messages * b/n / bandwidth) + latency``; of uneven messages
                   ``max over links of (sum of their bytes / bandwidth) + latency``
=================  ==============================================================================

Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009. Tree: the double binary tree of Sanders, Speck and Träff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, in the form of NCCL
(https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/): each tree
carries half of the bytes up and down again, and a member inside one tree is a leaf of the other.

A collective holds the links of all of its hops. The functions ``..._links`` return them by member:
the row of a member has the links of the hops that begin there, so that rows stay narrow.

Collectives over nodes are a ring for each NIC, and trees from node to node, as NCCL builds them. A
ring enters and leaves a node through one NIC. NCCL runs as many rings as a node has NICs, each with
its share of the bytes, so that together they reach the bandwidth of all NICs of the node, up to
that of a port. It orders the members of a ring by node. Its trees are chains inside a node, and
double binary trees between nodes. For n members on k nodes, at most g on one of them:

=================  ==============================================================================
bandwidth          that of a port; between nodes at most the sum of the NICs of the members of a
                   node, for the node with the least
ring all-reduce    ``2(n-1)/n * bytes / bandwidth + 2(n-k) * port_latency + 2(k-1) * nic_latency``
tree all-reduce    ``2 * bytes / bandwidth + 2(g-1) * port_latency
                   + 2 * ceil(log2 k) * nic_latency``
half a ring        reduce-scatter or all-gather: half of the ring's seconds
=================  ==============================================================================

Collectives inside one node have the measured seconds of `pipesim.NodeCollectives` instead, whatever
the algorithm, if the nodes have them; the presets of machines do.

Source: NCCL, ``src/graph/tuning.cc`` (numbers of steps inside and between nodes, latencies by
step), https://github.com/NVIDIA/nccl, and
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/ (trees).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import NetworkError, check_name, number
from pipesim.network.links import MAX_DEVICE, NodeCollectives, Nodes
from pipesim.network.routes import Paths, Router
from pipesim.utils.host_memory import check_memory
from pipesim.utils.texts import in_bytes, parse_bytes

if TYPE_CHECKING:
    from pipesim.network.network import Network


# Collectives over nodes


class Group(NamedTuple):
    """Members of a collective, as their nodes see them."""

    n_members: int
    n_nodes: int
    largest: int  # most members on one node
    bandwidth: float  # bytes a second of all rings together; may be infinite
    port_latency: float  # seconds of a step inside a node
    nic_latency: float  # seconds of a step between nodes
    collectives: NodeCollectives | None = None  # measured ones; None between nodes


def group_of_devices(nodes: Nodes, devices: NDArray[np.int64]) -> Group:
    """Return the group of a collective between devices, each once, in any order."""
    node, size = np.unique(nodes.node_of(devices), return_counts=True)
    bandwidth = nodes.port_bandwidth
    if len(node) > 1:
        # Each NIC counts once, however many members use it.
        nics = np.unique(nodes.nic_of(devices)) // nodes.nics_per_node
        fewest = int(np.unique(nics, return_counts=True)[1].min())
        bandwidth = min(bandwidth, fewest * nodes.nic_bandwidth)
    return _group(nodes, len(devices), len(node), int(size.max()), bandwidth)


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
    return _group(nodes, n_gpus, n_nodes, min(n_gpus, per_node), bandwidth)


def _group(nodes: Nodes, n_members: int, n_nodes: int, largest: int, bandwidth: float) -> Group:
    latencies = nodes.port_latency, nodes.nic_latency
    measured = nodes.collectives if n_nodes == 1 else None
    return Group(n_members, n_nodes, largest, bandwidth, *latencies, measured)


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
    n, n_nodes, measured = group.n_members, group.n_nodes, group.collectives
    steps = 2 * (n - 1)
    if measured is not None:
        rate = measured.rate(n, group.bandwidth)
        return steps / n * nbytes / rate + measured.latency + measured.latency_per_gpu * (n - 1)
    latency = 2 * (n - n_nodes) * group.port_latency + 2 * (n_nodes - 1) * group.nic_latency
    return steps / n * nbytes / group.bandwidth + latency


def tree(group: Group, nbytes: float) -> float:
    """Return the seconds of a tree all-reduce; see the module for the formula."""
    if group.collectives is not None:
        return ring(group, nbytes)
    chain = 2 * (group.largest - 1) * group.port_latency
    depth = (group.n_nodes - 1).bit_length()  # log2 of the nodes, rounded up
    return 2 * nbytes / group.bandwidth + chain + 2 * depth * group.nic_latency


def _fastest(group: Group, nbytes: float) -> float:
    return min(ring(group, nbytes), tree(group, nbytes))


def half(group: Group, nbytes: float, all_reduce: Callable[[Group, float], float] = ring) -> float:
    """Return the seconds of a reduce-scatter, or of an all-gather of ``nbytes`` in all."""
    measured = group.collectives
    if measured is None:
        return all_reduce(group, nbytes) / 2
    latency = ring(group, 0.0)
    seconds = (ring(group, nbytes) - latency) / 2 / measured.half_bandwidth
    return seconds + measured.half_latency * latency


# Collectives over any links

Devices = NDArray[np.int64]


def ring_all_reduce(router: Router, nbytes: float, devices: Devices) -> float:
    """Return the seconds of a ring all-reduce; the ring visits ``devices`` in their order.

    A link that k hops of the ring hold serves each at 1/k of its bandwidth.
    """
    if (nodes := _only_nodes(router, devices)) is not None:
        return ring(group_of_devices(nodes, devices), nbytes)
    n = len(devices)
    paths = router.paths(devices, np.roll(devices, -1), int(devices.max()) + 1)
    steps = 2 * (n - 1)
    return steps / n * nbytes / _slowest(paths, 1) + steps * float(paths.latency.max())


def tree_all_reduce(router: Router, nbytes: float, devices: Devices) -> float:
    """Return the seconds of a double-binary-tree all-reduce over ``devices`` in their order.

    A member sends or receives along at most four edges, with half of the bytes on each: together
    ``2 * nbytes``. A link that k > 4 edges hold serves each at 4/k of its bandwidth.
    """
    if (nodes := _only_nodes(router, devices)) is not None:
        return tree(group_of_devices(nodes, devices), nbytes)
    source, target = _tree_hops(len(devices))
    paths = router.paths(devices[source], devices[target], int(devices.max()) + 1)
    depth = (len(devices) - 1).bit_length()
    return 2 * nbytes / _slowest(paths, 4) + 2 * depth * float(paths.latency.max())


def fastest_all_reduce(router: Router, nbytes: float, devices: Devices) -> float:
    """Return the seconds of the faster of ring and tree."""
    ring_seconds = ring_all_reduce(router, nbytes, devices)
    return min(ring_seconds, tree_all_reduce(router, nbytes, devices))


#: Algorithms of an all-reduce.
ALL_REDUCE = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "fastest": fastest_all_reduce,
}


def all_reduce_seconds(
    network: Network,
    devices: Sequence[int] | NDArray[Any],
    algorithm: str,
    *,
    is_half: bool = False,
) -> Callable[[float], float]:
    """Return `Network.all_reduce` of some devices, or half of it, as a function of bytes.

    Members on nodes are counted once, so that a call takes a microsecond.
    """
    of_members = ALL_REDUCE[check_name("all-reduce", algorithm, ALL_REDUCE)]
    of_group = {"ring": ring, "tree": tree}.get(algorithm, _fastest)
    _, members = checked_members("all-reduce", 0, devices)
    router = network._router
    nodes = _only_nodes(router, members)
    group = None if nodes is None else group_of_devices(nodes, members)
    is_plain = group is not None and len(members) > 1  # no arrays

    def formula(nbytes: float) -> float:
        if group is None:
            return of_members(router, nbytes, members) / (2 if is_half else 1)
        return half(group, nbytes, of_group) if is_half else of_group(group, nbytes)

    def seconds(nbytes: float) -> float:
        if 0 <= nbytes < math.inf and is_plain:
            try:
                plain = formula(nbytes)
            except ZeroDivisionError:  # reported below
                plain = math.inf
            if plain < math.inf:
                return plain
        if not 0 <= nbytes < math.inf:
            raise NetworkError(f"all-reduce: bytes must be finite and >= 0, got {nbytes!r}")
        return finite_seconds(
            "all-reduce", lambda _, size, __: formula(size), router, nbytes, members
        )

    return seconds


def all_to_all(router: Router, nbytes: float, devices: Devices) -> float:
    """Return the seconds in which each member sends ``nbytes / n`` to each other member.

    All messages start at once. Each carrier takes its messages one after another:

    - the ends of a member, its n - 1 messages: (n-1)/n of the bytes in each direction;
    - a NIC, the messages of its devices that leave or enter the node;
    - a link in `Network.links`, the messages of its pairs, which hold no port and no NIC.

    The result is the time of the busiest carrier plus the largest latency.
    """
    return _even(router, nbytes / len(devices), devices)


def uneven_all_to_all(router: Router, nbytes: NDArray[np.float64], devices: Devices) -> float:
    """Return the seconds in which member ``i`` sends ``nbytes[i, j]`` to member ``j``.

    Carriers are those of `all_to_all`. The diagonal is ignored. If all messages have the same
    size, the result is that of `all_to_all`, to the last bit.
    """
    n = len(devices)
    between = ~np.eye(n, dtype=bool)
    sent = np.where(between, nbytes, 0.0)
    if (nbytes[between] == nbytes[0, 1]).all():
        return _even(router, float(nbytes[0, 1]), devices)
    i, j, link = _named_pairs(router, devices)
    named = sent[i, j] / router.link_bandwidth[link]
    busy = [np.bincount(link, weights=named, minlength=1).max()]
    others = sent.copy()  # bytes of pairs that no link names
    others[i, j] = 0.0
    port = router.bandwidth if router.nodes is None else router.nodes.port_bandwidth
    for end, axis in ((i, 1), (j, 0)):
        own = others.sum(axis=axis) / port + np.bincount(end, named, minlength=n)
        busy.append(own.max())
    if router.nodes is not None:
        node = router.nodes.node_of(devices)
        _, nic = np.unique(router.nodes.nic_of(devices), return_inverse=True)
        across = np.where(node[:, None] != node, others, 0.0)
        for axis in (1, 0):
            carried = np.bincount(nic, weights=across.sum(axis=axis))
            busy.append(carried.max() / router.nodes.nic_bandwidth)
    return float(max(busy)) + _even(router, 0.0, devices)


def _even(router: Router, share: float, devices: Devices) -> float:
    """Return the seconds in which each member sends ``share`` bytes to each other member."""
    n = len(devices)
    i, j, link = _named_pairs(router, devices)
    named = share / router.link_bandwidth[link]  # seconds of each named message
    port = router.bandwidth if router.nodes is None else router.nodes.port_bandwidth
    busy = [np.bincount(link, weights=named, minlength=1).max()]
    for end in (i, j):
        others = n - 1 - np.bincount(end, minlength=n)
        busy.append((others * (share / port) + np.bincount(end, named, minlength=n)).max())
    latency = router.link_latency[link].max(initial=0.0)
    if router.nodes is not None:
        messages, slowest = _between_nodes(router.nodes, devices, i, j)
        busy.append(messages * (share / router.nodes.nic_bandwidth))
        latency = max(latency, slowest)
    elif len(link) < n * (n - 1):
        latency = max(latency, router.latency)
    return float(max(busy)) + float(latency)


def ring_links(router: Router, devices: Devices, n_devices: int) -> Devices:
    """Return the links that each member's hop to the next of ``devices`` holds.

    Rings over nodes hold the port of each member, and between nodes its NIC, each out and in.
    """
    if _only_nodes(router, devices) is not None:
        return _ends_held(router, devices, n_devices)
    return _finite_links(router.paths(devices, np.roll(devices, -1), n_devices))


def tree_links(router: Router, devices: Devices, n_devices: int) -> Devices:
    """Return the links that each member's hops hold: up and down the edges of both trees.

    Trees over nodes hold the same links as rings over nodes.
    """
    if _only_nodes(router, devices) is not None:
        return _ends_held(router, devices, n_devices)
    source, target = _tree_hops(len(devices))
    links = _finite_links(router.paths(devices[source], devices[target], n_devices))
    return _rows(np.repeat(source, links.shape[1]), links.ravel(), len(devices))


def all_to_all_links(router: Router, devices: Devices, n_devices: int) -> Devices:
    """Return the links that each member's hops hold: its port and its NIC, each out and in.

    Links that `Network.links` names for several pairs are added. Links of a single pair are left
    out: each member has n - 1 of them, and only a bidirectional pipeline sends between members.
    """
    n = len(devices)
    i, j, link = _named_pairs(router, devices)
    ends = router.ends(devices, n_devices)
    if router.nodes is not None:
        node = router.nodes.node_of(devices)
        _, index, size = np.unique(node, return_inverse=True, return_counts=True)
        across = node[i] != node[j]
        for column, end in enumerate((i, j)):  # unnamed hops: all of them, and to other nodes
            ports = n - 1 - np.bincount(end, minlength=n)
            nics = n - size[index] - np.bincount(end[across], minlength=n)
            ends[ports == 0, column] = ends[nics == 0, 2 + column] = -1
    pairs_of = np.bincount(router.link, minlength=len(router.link_bandwidth))
    kept = (pairs_of[link] > 1) & np.isfinite(router.link_bandwidth[link])
    member = np.concatenate([np.repeat(np.arange(n), ends.shape[1]), i[kept]])
    return _rows(member, np.concatenate([ends.ravel(), link[kept]]), n)


def _only_nodes(router: Router, devices: Devices) -> Nodes | None:
    """Return the nodes of a network, unless it names a link between two of ``devices``."""
    return None if len(_named_pairs(router, devices)[2]) else router.nodes


def _ends_held(router: Router, devices: Devices, n_devices: int) -> Devices:
    """Return port out, port in and, for members on several nodes, NIC out and NIC in."""
    ends = router.ends(devices, n_devices)
    if router.nodes is not None and len(np.unique(router.nodes.node_of(devices))) == 1:
        return ends[:, :2]
    return ends


def _finite_links(paths: Paths) -> Devices:
    """Return the links of finite bandwidth; a link of infinite bandwidth is never held."""
    return np.where(np.isfinite(paths.capacity), paths.links, -1)


def _rows(member: Devices, link: Devices, n: int) -> Devices:
    """Return the links (>= 0) of each of n members, each once, as rows padded with -1."""
    held = np.stack([member, link], axis=1)[link >= 0]
    member, link = np.unique(held, axis=0).T
    count = np.bincount(member, minlength=n)
    rows = np.full((n, int(count.max())), -1, dtype=np.int64)
    rows[member, np.arange(len(member)) - (np.cumsum(count) - count)[member]] = link
    return rows


def _slowest(paths: Paths, free: int) -> float:
    """Return bytes a second of the slowest link; up to ``free`` messages get all of a link."""
    _, index, users = np.unique(paths.links, return_inverse=True, return_counts=True)
    sharing = np.maximum(users[index].reshape(paths.links.shape) / free, 1)
    return float(np.where(paths.links >= 0, paths.capacity / sharing, math.inf).min())


def _tree_hops(n: int) -> tuple[Devices, Devices]:
    """Return the positions at both ends of each hop of both trees: all hops up, then all down.

    The first tree visits the positions in order: its leaves are odd. The second is its mirror
    image for even n, and the first tree shifted by one for odd n, so that its leaves are even.
    """
    child = np.arange(1, n)
    low = child & -child
    parent = np.where(child & (2 * low), child - low, child + low)
    parent = np.where(parent < n, parent, child - low)
    second = [(end + 1) % n if n % 2 else n - 1 - end for end in (child, parent)]
    child, parent = np.concatenate([child, second[0]]), np.concatenate([parent, second[1]])
    return np.concatenate([child, parent]), np.concatenate([parent, child])


def _named_pairs(router: Router, devices: Devices) -> tuple[Devices, Devices, Devices]:
    """Return positions of sender and receiver, and link, of each named pair of two members."""
    order = np.argsort(devices)
    ends, member = [], np.ones(len(router.link), dtype=bool)
    for end in (router.source, router.target):
        index = np.minimum(np.searchsorted(devices, end, sorter=order), len(devices) - 1)
        member &= devices[order[index]] == end
        ends.append(order[index])
    return ends[0][member], ends[1][member], router.link[member]


def _between_nodes(nodes: Nodes, devices: Devices, i: Devices, j: Devices) -> tuple[float, float]:
    """Return messages of the busiest NIC in one direction, and the largest latency.

    Messages from position ``i`` to position ``j`` use named links, and are not counted.
    """
    n = len(devices)
    node = nodes.node_of(devices)
    _, index, size = np.unique(node, return_inverse=True, return_counts=True)
    outside = n - size[index]  # receivers in other nodes of each sender; senders of each receiver
    across = node[i] != node[j]
    _, nic = np.unique(nodes.nic_of(devices), return_inverse=True)
    messages = max(
        np.bincount(nic, weights=outside - np.bincount(end[across], minlength=n)).max()
        for end in (i, j)
    )
    n_across = int(outside.sum()) - int(across.sum())
    n_inside = n * (n - 1) - len(i) - n_across
    latency = max(nodes.nic_latency if n_across else 0.0, nodes.port_latency if n_inside else 0.0)
    return float(messages), latency


# Checks of arguments and results


def checked_members(
    what: str, nbytes: object, devices: Iterable[Any]
) -> tuple[float, NDArray[np.int64]]:
    """Return the bytes and the members of the collective ``what``, checked."""
    size = parse_bytes(nbytes) if isinstance(nbytes, str) else number(nbytes)
    if size is None or not 0 <= size < math.inf:
        raise NetworkError(f"{what}: bytes must be finite and >= 0, got {nbytes!r}")
    if isinstance(devices, range):  # a range of any length takes no memory, an array does
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


def checked_matrix(nbytes: ArrayLike, n: int) -> NDArray[np.float64]:
    """Return the bytes of each pair of ``n`` members, shape ``(n, n)``, checked."""
    sizes: NDArray[np.float64]
    try:
        sizes = np.asarray(in_bytes("nbytes", nbytes), dtype=np.float64)
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


def finite_seconds(
    what: str,
    formula: Callable[[Router, Any, NDArray[np.int64]], float],
    router: Router,
    nbytes: float | NDArray[np.float64],
    members: NDArray[np.int64],
) -> float:
    """Return the seconds that ``formula`` gives; 0 for one member."""
    if len(members) == 1:
        return 0.0
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        try:
            seconds = formula(router, nbytes, members)
        except ZeroDivisionError:  # a bandwidth so small that a share of it is 0
            seconds = math.inf
    if not math.isfinite(seconds):
        raise NetworkError(
            f"{what} of {np.sum(nbytes):g} bytes over {len(members)} members would last "
            f"{seconds} s; check bytes, latency (s) and bandwidth (bytes/s)"
        )
    return seconds
