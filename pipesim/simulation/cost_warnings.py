"""Warnings about costs that were built for another network, or that hold a recompute already."""

from __future__ import annotations

import warnings

from pipesim.costs.costs import Costs
from pipesim.costs.workload import Workload
from pipesim.errors import CostsWarning
from pipesim.graph.graph import TaskGraph
from pipesim.network.links import Nodes
from pipesim.network.network import Network
from pipesim.network.node_collectives import group_of_gpus
from pipesim.ops import Op


def warn_of_costs(graph: TaskGraph, costs: object, stacklevel: int) -> None:
    """Warn where costs of a transformer do not suit their network or the recompute of a graph.

    - The seconds of stages include collectives between the GPUs of a device. They are those of the
      network with which the costs were built, and do not change with ``costs.network``.
    - Backwards of costs with ``recompute="full"`` or ``"selective"`` recompute already.

    Warns
    -----
    CostsWarning
        Once for each of both.
    """
    work = costs.work if isinstance(costs, Costs) else None
    if not isinstance(costs, Costs) or work is None:
        return
    difference = _network_difference(work, costs.network)
    if difference:
        warnings.warn(
            "costs: the seconds of F, B, I, W and R include collectives between the "
            f"{work.gpus_per_device} GPUs of a device, of the network that the costs were built "
            f"with; simulated is one with {difference}, and these seconds do not change with it; "
            "costs.rebuilt(network=...) gives the costs on it",
            CostsWarning,
            stacklevel=stacklevel,
        )
    mode = (work.settings or {}).get("recompute", "none")
    if mode != "none" and graph.is_op(frozenset({Op.R})).any():
        warnings.warn(
            f"costs: their backwards include a recompute (recompute={mode!r}), and the graph has "
            'tasks R, so that activations are recomputed twice; give lower(recompute="never"), or '
            'costs.rebuilt(recompute="none")',
            CostsWarning,
            stacklevel=stacklevel,
        )


def _network_difference(work: Workload, network: Network) -> str:
    """Return the rates between GPUs of a device that differ from those of the costs, as text.

    Empty if none differ, if the network to simulate has no nodes, and if the costs are not of a
    transformer on a GPU that shares its layers with others.
    """
    built, present, settings = work.built_nodes, network.nodes, work.settings or {}
    if present is None or "gpu" not in settings or work.gpus_per_device == 1:
        return ""
    if built is None:
        return "nodes (built without nodes, where they are free)"
    before, after = (_rates(nodes, work.gpus_per_device) for nodes in (built, present))
    texts = [
        f"a {name} of {value:.4g} {unit} (built with {before[name, unit]:.4g})"
        for (name, unit), value in after.items()
        if value != before[name, unit]
    ]
    return ", ".join(texts)


def _rates(nodes: Nodes, n_gpus: int) -> dict[tuple[str, str], float]:
    """Return the numbers that seconds of collectives between GPUs of a device follow from."""
    group = group_of_gpus(nodes, n_gpus)
    return {
        ("group", "nodes"): group.n_nodes,
        ("bandwidth", "bytes/s"): group.bandwidth,
        ("latency inside a node", "s"): group.port_latency,
        ("latency between nodes", "s"): group.nic_latency if group.n_nodes > 1 else 0.0,
    }
