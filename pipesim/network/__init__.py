"""Networks: links, nodes, routes of messages, seconds of collectives, and presets of machines."""

from pipesim.network.links import HostLink, Link, NodeCollectives, Nodes
from pipesim.network.network import Network
from pipesim.network.routes import Routes
from pipesim.network.sources import machines

__all__ = ["HostLink", "Link", "Network", "NodeCollectives", "Nodes", "Routes", "machines"]
