"""Price each kind of task of a graph: the work behind `Costs.of`.

Costs are found per kind of task (`pipesim.graph.tasks.Kinds`), not per task, so that the time
depends on the number of stages and not on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_costs import (
    check_expert_replicas,
    collective_links,
    n_replicas,
    price_collectives,
)
from pipesim.costs.kind_routes import KindRoutes, message_rows
from pipesim.costs.microbatch_costs import cost_classes
from pipesim.costs.rows import COMPUTED, MEASURED
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import input_bytes
from pipesim.graph.skips import message_bytes as skip_message_bytes
from pipesim.graph.tasks import Kinds
from pipesim.ops import COPIES, KEPT, PART_NAMES, SEGMENTED, Op

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


Floats = NDArray[np.float64]


def price(costs: Costs, graph: TaskGraph) -> TaskCosts:
    """Return the costs of each task of ``graph``, one row a kind; see `Costs.of`.

    Values may overflow to infinity; the callers of engines check that times are finite.
    """
    routes = KindRoutes(graph, costs.network, costs.all_reduce)
    classes = cost_classes(costs, graph)
    if classes is None:
        return TaskCosts(cost_table(costs, routes), graph.kind, None, costs)
    table = _joined([cost_table(own, routes) for own in classes.costs])
    return TaskCosts(table, classes.rows(graph.kind, len(graph.kinds)), None, costs)


def _joined(tables: Sequence[CostTable]) -> CostTable:
    """Return one table with the rows of all, and as many columns of links as the widest needs."""
    width = max(table.links.shape[1] for table in tables)
    links = [
        np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1)
        for x in (table.links for table in tables)
    ]
    columns = zip(
        *(table._replace(links=own) for table, own in zip(tables, links, strict=True)), strict=True
    )
    return CostTable(*map(np.concatenate, columns))


def cost_table(costs: Costs, routes: KindRoutes, *, with_links: bool = True) -> CostTable:
    """Return the costs of each kind of a graph, maybe without the links of collectives."""
    graph = routes.graph
    kinds, n_stages = graph.kinds, graph.n_stages
    duration = _compute_seconds(costs, routes)
    nbytes, fixed = np.zeros(len(kinds)), np.zeros(len(kinds))
    messages, stages = routes.message_rows
    nbytes[messages] = costs.per_stage("output_bytes", n_stages)[stages]
    fixed[messages] = costs.per_stage("output_seconds", n_stages)[stages]
    if graph.skips or costs.skip_bytes is not None:
        nbytes += skip_message_bytes(kinds, graph.skips, graph.portals, costs.skip_sizes)
    sends, bandwidth = routes.sends
    duration[sends] = fixed[sends] + nbytes[sends] / bandwidth
    price_copies(costs, routes, duration, nbytes)
    launch = costs.per_stage("launch", n_stages)[kinds.stage]
    links = routes.links.copy() if with_links else routes.links
    share = np.ones(len(kinds))
    if routes.collectives:
        price_collectives(costs, routes, duration, nbytes, share)
        if with_links:
            links = collective_links(routes, nbytes, links)
    if costs.tied_bytes and not graph.tied:
        _add_tied_sums(costs, routes, duration)
    if costs.expert_layers or (kinds.has_segments and Op.R in kinds.ops):
        add_expert_exchanges(costs, routes, duration)
    if costs.reduce_copies and Op.STEP in routes.rows_of_ops:
        rows, stages = routes.rows_of_ops[Op.STEP]
        duration[rows] += costs.per_stage("reduce_copies", n_stages)[stages]
    return CostTable(duration, routes.latency, launch, nbytes, links, share)


def _compute_seconds(costs: Costs, routes: KindRoutes) -> Floats:
    graph, n_stages = routes.graph, routes.graph.n_stages
    duration = np.zeros(len(graph.kinds))
    for (op, part), name in COMPUTED.items():
        if op in routes.rows_of_ops:
            rows, stages = routes.rows_of_ops[op]
            if part:
                own = graph.kinds.part[rows] == PART_NAMES[op].index(part)
                rows, stages = rows[own], stages[own]
            duration[rows] = costs.per_stage(name, n_stages)[stages]
    if graph.kinds.has_segments:
        duration *= segment_shares(costs, graph)
    if costs.overlapped is not None and graph.kinds.overlapped.any():
        _price_overlaps(costs, graph, duration)
    return duration


def _add_tied_sums(costs: Costs, routes: KindRoutes, duration: Floats) -> None:
    """Add the sum of a tied matrix's gradients to STEP of the first and the last stage.

    It is for graphs without tied stages, whose REDUCE_TIED has these seconds. Each replica sums
    those of its own two copies. A device with both copies has no sum to make.
    """
    graph = routes.graph
    if isinstance(costs.tied_bytes, tuple):
        raise CostsError(
            f"tied_bytes are of {len(costs.tied_bytes)} groups of tied stages, but the graph has "
            "none; lower with tied=, such as [(0, 3)], or give one number"
        )
    kinds, last = graph.kinds, graph.n_stages - 1
    ends = (kinds.op == Op.STEP) & ((kinds.stage == 0) | (kinds.stage == last))
    for replica, devices in enumerate(graph.homes[:, [0, last]]):
        if devices[0] != devices[1]:
            rows = ends & (kinds.replica == replica)
            members = routes.true_devices(devices)
            duration[rows] += costs.network.all_reduce(costs.tied_bytes, members, "fastest")


def _price_overlaps(costs: Costs, graph: TaskGraph, duration: Floats) -> None:
    forward, backward, both = (
        costs.per_stage(name, graph.n_stages) for name in ("forward", "backward", "overlapped")
    )
    separate = forward + backward
    share = np.divide(forward, separate, out=np.full_like(separate, 0.5), where=separate > 0)
    halves = np.flatnonzero(graph.kinds.overlapped)
    first = (both * share)[graph.kinds.stage[halves]]
    whole = both[graph.kinds.stage[halves]]
    duration[halves] = np.where(graph.kinds.op[halves] == Op.F, first, whole - first)


def message_bytes(kinds: Kinds, output_bytes: Floats) -> Floats:
    """Return the bytes of each kind of message: a stage's output, or the gradient of its input.

    Messages of skip connections carry neither: they have 0 here.
    """
    nbytes = np.zeros(len(kinds))
    rows, stages = message_rows(kinds)
    nbytes[rows] = output_bytes[stages]
    return nbytes


# OFFLOAD and RELOAD, the copies between devices and host memory


def kept_inputs(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes of input that F of each stage keeps for R; shape ``(n_stages,)``.

    That of stage 0 belongs to the caller and counts as 0. Tensors of skip connections are input
    too.
    """
    n_stages = graph.n_stages
    inputs = np.zeros(n_stages)
    inputs[1:] = costs.per_stage("output_bytes", n_stages)[:-1]
    if graph.skips or costs.skip_bytes is not None:
        inputs += input_bytes(n_stages, graph.skips, costs.skip_sizes)
    return np.minimum(inputs, costs.per_stage("activation_bytes", n_stages))


def copied_bytes(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes that each kind of OFFLOAD and RELOAD moves, 0 for other kinds.

    They are the stage's share of ``activation_bytes``, unless ``offload_bytes`` are given; those of
    a recomputed micro-batch are its input.
    """
    kinds, n_stages = graph.kinds, graph.n_stages
    activation = costs.per_stage("activation_bytes", n_stages)
    moved = graph.offload_shares * activation
    if costs.offload_bytes is not None:
        moved = costs.per_stage("offload_bytes", n_stages)
    copies = kinds.is_op(COPIES)
    whole = copies & (kinds.part < 0)
    stages = np.unique(kinds.stage[whole])
    more = stages[moved[stages] > activation[stages]]
    if len(more):
        raise CostsError(
            f"offload_bytes of stage {more[0]} are {moved[more[0]]:.16g}, and its activation_bytes "
            f"{activation[more[0]]:.16g}; OFFLOAD cannot move more than there are"
        )
    nbytes = np.where(whole, moved[kinds.stage], 0.0)
    inputs = copies & (kinds.part == KEPT.index("input"))
    nbytes[inputs] = kept_inputs(graph, costs)[kinds.stage[inputs]]
    return nbytes


def price_copies(costs: Costs, routes: KindRoutes, duration: Floats, nbytes: Floats) -> None:
    """Fill the seconds and bytes of OFFLOADs and RELOADs.

    Measured seconds of a stage are those of its activations. If it copies inputs too, these take
    the share that their bytes have in those.
    """
    graph, (rows, links) = routes.graph, routes.copies
    if not len(rows):
        return
    own = copied_bytes(graph, costs)[rows]
    nbytes[rows] = own
    ops, stages, n_stages = graph.kinds.op[rows], graph.kinds.stage[rows], graph.n_stages
    is_input = graph.kinds.part[rows] == KEPT.index("input")
    for op in sorted(COPIES):
        copies, name = ops == op, MEASURED[op, ""]
        if getattr(costs, name) is not None:
            whole = np.zeros(n_stages)
            np.maximum.at(whole, stages[copies & ~is_input], own[copies & ~is_input])
            share = np.where(is_input & (whole[stages] > 0), own, 1.0)
            share[is_input] /= np.where(whole > 0, whole, 1.0)[stages[is_input]]
            seconds = costs.per_stage(name, n_stages)[stages] * share
            duration[rows[copies]] = seconds[copies]
        elif links is not None:
            duration[rows[copies]] = links.latency[copies] + own[copies] / links.bandwidth[copies]
        elif copies.any():
            raise CostsError(
                f"graph {graph.name!r} has {op.name} tasks, but the network of the costs has no "
                "link to host memory; give such as Network(host=HostLink(latency=10e-6, "
                f"bandwidth=25e9)), or {name}=, the measured seconds"
            )


# Experts: exchanges without tasks

#: Operations that contain the exchanges of their stage.
_WITH_EXCHANGES = (Op.F, Op.B, Op.I, Op.R)


def segment_shares(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the share of its operation's seconds that each kind of task takes; 1 if whole."""
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
        if rows.size and len(costs.segments) != graph.n_stages:
            raise CostsError(
                f"segments has {len(costs.segments)} values for {graph.n_stages} stages; give one "
                "a stage"
            )
        positions = {Op.F: 0, Op.B: 1, Op.I: 2}
        for row in rows.tolist():
            of_stage = costs.segments[int(kinds.stage[row])]
            shares[row] = of_stage[positions[Op(kinds.op[row])]][int(kinds.part[row])]
    return shares


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
    tokens, and between which replicas. ``overlapped`` seconds include them.
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
    graph, g = routes.graph, costs.expert_replicas
    if graph.kinds.has_segments:
        g = graph.expert_replicas or n_replicas(graph)
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
