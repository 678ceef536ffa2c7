"""Prices of experts in graphs: exchanges without tasks, and bytes that replicas share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.kind_routes import KindRoutes
from pipesim.errors import CostsError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Kinds
from pipesim.ops import SEGMENTED, Op

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


Floats = NDArray[np.float64]
#: What a replica holds of a stage.
Held = Literal["parameter", "gradient", "optimizer"]
#: Operations that contain the exchanges of their stage.
_WITH_EXCHANGES = (Op.F, Op.B, Op.I, Op.R)


def segment_shares(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the share of its operation's seconds that each kind of task takes; 1 if whole.

    Raises
    ------
    CostsError
        If the graph has other numbers of layers with experts than the costs.
    """
    kinds, shares = graph.kinds, np.ones(len(graph.kinds))
    rows = np.flatnonzero(kinds.is_op(SEGMENTED) & (kinds.part >= 0))
    n_segments = np.zeros((len(Op), graph.n_stages), dtype=np.int64)
    np.maximum.at(n_segments, (kinds.op[rows], kinds.stage[rows]), kinds.part[rows] + 1)
    layers = costs.per_stage("expert_layers", graph.n_stages)
    if layers.any():
        of_graph = _layers_with_exchanges(kinds, graph.n_stages)
        for stage in np.flatnonzero(layers != of_graph)[:1].tolist():
            raise CostsError(
                f"costs have {layers[stage]:.0f} layers with experts in stage {stage} "
                f"(expert_layers), but the graph was lowered with {of_graph[stage]:.0f}; give "
                "lower(..., expert_layers=costs.expert_layers)"
            )
    shares[rows] = 1 / n_segments[kinds.op[rows], kinds.stage[rows]]
    if costs.segments is not None:
        positions = {Op.F: 0, Op.B: 1, Op.I: 2}
        for row in rows.tolist():
            of_stage = costs.segments[int(kinds.stage[row])]
            shares[row] = of_stage[positions[Op(kinds.op[row])]][int(kinds.part[row])]
    return shares


def routed_bytes(costs: Costs, graph: TaskGraph) -> dict[str, Floats]:
    """Return the bytes of tokens in the exchanges of a graph, by name; empty without any."""
    if not graph.kinds.has_segments:
        return {}
    return {
        name: costs.per_stage(f"{name}_bytes", graph.n_stages) for name in ("dispatch", "combine")
    }


def exchange_seconds(costs: Costs, n_stages: int) -> Floats:
    """Return the seconds of all exchanges of a stage for one micro-batch, in one direction.

    Exchanges that follow from the network count as 0 here. Shape ``(n_stages,)``.
    """
    seconds: Floats = _layer_seconds(costs, n_stages) * costs.per_stage("expert_layers", n_stages)
    return seconds


def _layer_seconds(costs: Costs, n_stages: int) -> Floats:
    """Return the given seconds of the exchanges of one layer with experts of each stage."""
    total = np.zeros(n_stages)
    for name in ("exchange_dispatch", "exchange_combine"):
        if getattr(costs, name) is not None:
            total += costs.per_stage(name, n_stages)
    return total


def add_expert_exchanges(costs: Costs, routes: KindRoutes, duration: Floats) -> None:
    """Add the exchanges of experts to F, B, I and R of a graph that has no tasks for them.

    R has them in any graph. A graph that has tasks for those of F says how many layers exchange
    tokens, and between which replicas.

    Halves of overlapped actions whose seconds are given together, ``overlapped``, include them.

    Raises
    ------
    CostsError
        As `check_expert_replicas`.
    """
    graph = routes.graph
    kinds, n_stages = graph.kinds, graph.n_stages
    layers = costs.per_stage("expert_layers", n_stages)
    if kinds.has_segments:
        layers = _layers_with_exchanges(kinds, n_stages)
    if not layers.any():
        return
    check_expert_replicas(costs, graph)
    rows = kinds.is_op(frozenset({Op.R} if kinds.has_segments else _WITH_EXCHANGES))
    if costs.overlapped is not None:
        rows &= kinds.overlapped == 0
    seconds = _layer_seconds(costs, n_stages) * layers
    duration[rows] += seconds[kinds.stage[rows]]
    for field, nbytes in (
        ("exchange_dispatch", "dispatch_bytes"),
        ("exchange_combine", "combine_bytes"),
    ):
        if getattr(costs, field) is None:
            of_layers = layers, costs.per_stage(nbytes, n_stages)
            _add_network_exchange(costs, routes, duration, rows, *of_layers)


def _layers_with_exchanges(kinds: Kinds, n_stages: int) -> Floats:
    """Return the number of layers with experts of each stage of a graph with segments."""
    segments = kinds.is_op(SEGMENTED) & (kinds.part >= 0)
    last = np.zeros(n_stages)
    np.maximum.at(last, kinds.stage[segments], kinds.part[segments])
    return last // 2


def _add_network_exchange(
    costs: Costs,
    routes: KindRoutes,
    duration: Floats,
    rows: NDArray[np.bool_],
    layers: Floats,
    nbytes: Floats,
) -> None:
    """Add the exchanges of a group of replicas, which the network prices."""
    graph, g = routes.graph, costs.expert_replicas
    if graph.kinds.has_segments:
        g = graph.expert_replicas or _n_replicas(graph)
    if g == 1:  # inside a device
        return
    homes = graph.homes if routes.replicas is None else routes.replicas[:, graph.homes[0]]
    for replica in range(graph.n_replicas):
        first = replica - replica % g
        for stage in np.flatnonzero(layers):
            members = homes[first : first + g, stage]
            seconds = costs.network.all_to_all(float(nbytes[stage]), members)
            own = rows & (graph.kinds.replica == replica) & (graph.kinds.stage == stage)
            duration[own] += layers[stage] * seconds


def add_copy_sums(costs: Costs, routes: KindRoutes, duration: Floats) -> None:
    """Add the sums of gradients within devices to STEP."""
    if Op.STEP in routes.rows_of_ops:
        rows, stages = routes.rows_of_ops[Op.STEP]
        duration[rows] += costs.per_stage("reduce_copies", routes.graph.n_stages)[stages]


def _n_replicas(graph: TaskGraph) -> int:
    """Return the number of data-parallel replicas that a graph stands for."""
    return (1 + int(copy_of_replicas(graph.homes).max())) * graph.options.n_equal


def check_expert_replicas(costs: Costs, graph: TaskGraph) -> None:
    """Raise `CostsError` unless the replicas of a graph are groups that have all experts.

    One copy of the pipeline may stand for one of such a group, if the costs have the seconds of its
    exchanges.
    """
    g = costs.expert_replicas
    n = _n_replicas(graph)
    if n == 1 and None not in (costs.exchange_dispatch, costs.exchange_combine):
        return
    if n % g:
        raise CostsError(
            f"the experts of a layer are on {g} replicas (expert_replicas), but the graph has {n}; "
            f"give lower(n_replicas=...) a multiple of {g}, or costs of fewer expert-parallel "
            "GPUs, or exchange_dispatch= and exchange_combine=, with which one replica stands for "
            "all"
        )
    size = graph.expert_replicas or n
    if graph.kinds.has_segments and g > 1 and size != g:
        raise CostsError(
            f"the experts of a layer are on {g} replicas (expert_replicas), but {size} of the "
            f"graph exchange tokens; give lower(..., expert_replicas={g})"
        )


def held_bytes(costs: Costs, graph: TaskGraph, name: Held) -> Floats:
    """Return the bytes of parameters, gradients or optimizer that a replica holds of each stage.

    A replica has its share of what is sharded: experts are shared among fewer replicas.
    """
    shares = graph.optimizer_shares if name == "optimizer" else graph.parameter_shares
    if costs.expert_replicas > 1 and np.any(getattr(costs, f"expert_{name}_bytes")):
        check_expert_replicas(costs, graph)
    return shared_bytes(costs, graph.n_stages, shares, name)


def shared_bytes(
    costs: Costs, n_stages: int, shares: int | NDArray[np.int64], name: Held
) -> Floats:
    """Return `held_bytes` of one of ``shares`` replicas: one number, or one a stage."""
    whole: Floats = costs.per_stage(f"{name}_bytes", n_stages)
    if costs.expert_replicas == 1 or not np.any(getattr(costs, f"expert_{name}_bytes")):
        return whole / shares
    experts = costs.per_stage(f"expert_{name}_bytes", n_stages)
    held: Floats = (whole - experts) / shares + experts / np.maximum(
        1, shares // costs.expert_replicas
    )
    return held


def moved_bytes(
    costs: Costs, n_stages: int, n_replicas: int, name: Literal["parameter", "gradient"]
) -> Floats:
    """Return the bytes of each stage that replicas gather or reduce: experts if others have them.

    Gathers need memory for them, and so do gradients that wait for their reduction.
    """
    whole: Floats = costs.per_stage(f"{name}_bytes", n_stages)
    if n_replicas > costs.expert_replicas or costs.expert_replicas == 1:
        return whole
    moved: Floats = whole - costs.per_stage(f"expert_{name}_bytes", n_stages)
    return moved


def n_expert_copies(costs: Costs, graph: TaskGraph) -> int:
    """Return the number of replicas that have the same experts; at least 1."""
    n_replicas: int = graph.n_replicas * graph.options.n_equal
    return max(1, n_replicas // costs.expert_replicas)


def optimizer_parts(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the number by which the seconds of STEP of each stage are divided."""
    if costs.expert_replicas == 1 or not np.any(costs.expert_optimizer_bytes):
        return np.asarray(graph.optimizer_shares)
    whole = costs.per_stage("optimizer_bytes", graph.n_stages)
    held = held_bytes(costs, graph, "optimizer")
    return np.divide(whole, held, out=np.ones_like(whole), where=held > 0)
