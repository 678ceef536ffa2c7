"""Sources of a `Network`: the nodes of a machine by its name, and tables of settings.

`pipesim.network.link_tables` reads links from CSV files and arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pipesim.errors import NetworkError, number
from pipesim.network.host_link import HostLink, scaled_link
from pipesim.network.links import Link, Nodes, bandwidth_from_json, check_keys
from pipesim.network.presets import EFFICIENCY, machine

#: Arguments of `Network.preset` that a table may have besides its name.
_PRESET_OPTIONS = ("efficiency", "gpus_per_device")
#: Keys that a table of settings may have for a network.
KEYS = ("latency", "bandwidth", "links", "nodes", "host", "nominal_share", "preset",
        *_PRESET_OPTIONS)  # fmt: skip


class NetworkFields(NamedTuple):
    """The fields of a `Network`, in their order."""

    latency: float
    bandwidth: float
    links: tuple[Link, ...]
    nodes: Nodes | None
    host: HostLink | None
    nominal_share: float | None


def preset_nodes(name: str, efficiency: float = EFFICIENCY, gpus_per_device: int = 1) -> Nodes:
    """Return the nodes of a common machine; see `Network.preset` for arguments and errors."""
    nodes = machine(name).nodes
    part = number(efficiency)
    if part is None or not 0 < part <= 1:
        raise NetworkError(f"efficiency must be above 0 and at most 1, got {efficiency!r}")
    nodes = replace(
        nodes,
        port_bandwidth=nodes.port_bandwidth * part,
        nic_bandwidth=nodes.nic_bandwidth * part,
    )
    return nodes.grouped(gpus_per_device)


def preset_host(name: str, efficiency: float = EFFICIENCY, gpus_per_device: int = 1) -> HostLink:
    """Return the host link of a common machine; arguments were checked by `preset_nodes`."""
    host = machine(name).host
    return scaled_link(host, 1.0, efficiency).grouped(gpus_per_device)


def network_fields(values: Mapping[str, Any]) -> NetworkFields:
    """Return the fields of a network in a table of settings; see `Network.from_dict`."""
    check_keys("network", values, KEYS)
    links = values.get("links", ())
    if not isinstance(links, (tuple, list)) or not all(isinstance(x, Mapping) for x in links):
        raise NetworkError(f"links must be a list of tables, got {links!r}")
    nodes, host, share = None, None, values.get("nominal_share")
    if "preset" in values and values.get("nodes") is not None:
        raise NetworkError("network has both preset and nodes; leave out one of them")
    options = {key: values[key] for key in _PRESET_OPTIONS if key in values}
    if options and "preset" not in values:
        raise NetworkError(
            f"network has {' and '.join(options)} without a preset to apply to; add "
            'preset = "dgx_h100", or say in latency, bandwidth or nodes what messages reach'
        )
    if "preset" in values:
        nodes = preset_nodes(values["preset"], **options)
        host = preset_host(values["preset"], **options)
        share = number(options.get("efficiency", EFFICIENCY))
    elif values.get("nodes") is not None:
        nodes = Nodes.from_dict(values["nodes"])
    if values.get("host") is not None:
        host = HostLink.from_dict(values["host"])
    return NetworkFields(
        values.get("latency", 0.0),
        bandwidth_from_json(values.get("bandwidth")),
        tuple(Link.from_dict(link) for link in links),
        nodes,
        host,
        share,
    )
