"""Networks: links, nodes, routes of messages, seconds of collectives, and presets of machines."""

from pipesim.network.host_link import HostLink
from pipesim.network.links import Link, Nodes
from pipesim.network.network import Network
from pipesim.network.presets import machines
from pipesim.network.routes import Routes

__all__ = ["HostLink", "Link", "Network", "Nodes", "Routes", "machines"]
