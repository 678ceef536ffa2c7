"""Networks as notebooks show them: HTML tables of links, and of the routes of pairs of devices."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from pipesim.network.links import Link, Nodes
from pipesim.network.network import Network
from pipesim.plot.html_parts import note_html, omitted_html, table_html
from pipesim.utils.units import format_decimal, format_time

#: Most links and kinds of links that are shown, a row each; most pairs of a link; most devices of
#: the table of routes.
MAX_LINKS, MAX_PAIRS, MAX_DEVICES = 16, 4, 8


def network_html(network: Network) -> str:
    """Return a network as a table of its links, and one of routes between devices that links name.

    Many links are counted by kind: latency, bandwidth, and number of pairs. Routes are those of the
    first devices.
    """
    links, routes = network.links, ""
    rows, omitted = _kind_rows(links) if len(links) > MAX_LINKS else _link_rows(links)
    rows += [*_other_rows(network), *_host_rows(network)]
    if links:
        devices = sorted({device for link in links for pair in link.pairs for device in pair})
        routes = _routes_html(network, devices)
        if len(devices) > MAX_DEVICES:
            omitted.append(f"routes of {len(devices) - MAX_DEVICES:,} more devices (see resolve)")
    head = ["messages", "links", "latency", "bandwidth"]
    return note_html(_title(network)) + table_html(head, rows) + routes + omitted_html(omitted)


def _title(network: Network) -> str:
    """Return the parts of a network in words."""
    n, nodes = len(network.links), network.nodes
    parts = [f"{n:,} link{'s' * (n > 1)} of particular pairs"] if n else []
    if nodes is not None:
        parts.append(_nodes_text(nodes))
    share = network.nominal_share
    text = f"Network of {', and '.join(parts) or 'one link for each pair of devices'}"
    return text if share is None else f"{text}, {share:.3g} of nominal bandwidths"


def _nodes_text(nodes: Nodes) -> str:
    """Return the devices, ports and NICs of nodes in words."""
    size, nics = nodes.devices_per_node, nodes.nics_per_node
    text = f"nodes of {size} device{'s' * (size > 1)}"
    if nodes.gpus_per_device > 1:
        text += f" ({nodes.gpus_per_device} GPUs each"
        text += f" on {nodes.nodes_per_device} nodes" if nodes.nodes_per_device > 1 else ""
        text += "; rates are those of one GPU)"
    return (
        f"{text}: a port of {_bandwidth(nodes.port_bandwidth)} each, and {nics} "
        f"NIC{'s' * (nics > 1)} of {_bandwidth(nodes.nic_bandwidth)}"
    )


def _link_rows(links: tuple[Link, ...]) -> tuple[list[list[str]], list[str]]:
    """Return a row for each link, and no text for others."""
    rows = []
    for link in links:
        pairs = [f"{source} to {target}" for source, target in link.pairs[:MAX_PAIRS]]
        more = len(link.pairs) - MAX_PAIRS
        text = ", ".join(pairs) + (f" and {more:,} more" if more > 0 else "")
        shared = f", shared by {len(link.pairs):,} pairs" if len(link.pairs) > 1 else ""
        rows.append([text, f"1{shared}", format_time(link.latency), _bandwidth(link.bandwidth)])
    return rows, []


def _kind_rows(links: tuple[Link, ...]) -> tuple[list[list[str]], list[str]]:
    """Return a row for each of the most frequent kinds of links, and a text for the others."""
    kinds = Counter((len(link.pairs), link.latency, link.bandwidth) for link in links)
    rows = []
    for (n_pairs, latency, bandwidth), count in kinds.most_common(MAX_LINKS):
        shared = f", each shared by {n_pairs:,} pairs" if n_pairs > 1 else ""
        text = [f"{count * n_pairs:,} named pairs", f"{count:,}{shared}"]
        rows.append([*text, format_time(latency), _bandwidth(bandwidth)])
    omitted = [f"pairs of all {len(links):,} links"]
    if len(kinds) > MAX_LINKS:
        omitted.append(f"{len(kinds) - MAX_LINKS:,} more kinds of links")
    return rows, omitted


def _other_rows(network: Network) -> list[list[str]]:
    """Return the rows of messages between pairs that no link names."""
    nodes = network.nodes
    if nodes is None:
        pairs = "all other pairs" if network.links else "all pairs"
        rate = _bandwidth(network.bandwidth)
        return [[pairs, "1 a pair", format_time(network.latency), rate]]
    port, nic = nodes.port_bandwidth, nodes.nic_bandwidth
    has_port, has_nic = math.isfinite(port), math.isfinite(nic)
    inside = ["port out", "port in"] * has_port
    between = [*inside[:1], *["NIC out", "NIC in"] * has_nic, *inside[1:]]
    return [
        ["inside a node", _held(inside), format_time(nodes.port_latency), _bandwidth(port)],
        ["between nodes", _held(between), format_time(nodes.nic_latency),
         _bandwidth(min(port, nic))],
    ]  # fmt: skip


def _host_rows(network: Network) -> list[list[str]]:
    """Return the row of copies to and from the memory of hosts, if there is a link for them."""
    host = network.host
    if host is None:
        return []
    shared = f", each of {host.devices_per_link} devices" if host.devices_per_link > 1 else ""
    held = f"host out, host in{shared}"
    return [["copies to hosts", held, format_time(host.latency), _bandwidth(host.bandwidth)]]


def _held(links: list[str]) -> str:
    """Return the links that a message holds."""
    return ", ".join(links) or "none"


def _routes_html(network: Network, devices: list[int]) -> str:
    """Return a table of latencies and bandwidths from the row's device to the column's."""
    shown = devices[:MAX_DEVICES]
    ends = np.array(shown)
    source, target = np.repeat(ends, len(ends)), np.tile(ends, len(ends))
    routes = network.resolve(source, target, devices[-1] + 1)
    cells = [
        "" if a == b else f"{format_time(latency)}, {_bandwidth(bandwidth)}"
        for a, b, latency, bandwidth in zip(
            source.tolist(), target.tolist(), routes.latency.tolist(), routes.bandwidth.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    n = len(shown)
    rows = [[f"from {device}", *cells[k * n : k * n + n]] for k, device in enumerate(shown)]
    return table_html(["routes", *(f"to {device}" for device in shown)], rows)


def _bandwidth(value: float) -> str:
    """Return a bandwidth as text."""
    return "unlimited" if math.isinf(value) else format_decimal(value, "B/s")
