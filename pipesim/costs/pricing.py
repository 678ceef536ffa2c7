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
    MEASURED_COLLECTIVES,
    CollectiveCosts,
    ExpertReductions,
    Priced,
)
from pipesim.costs.copy_costs import price_copies
from pipesim.costs.exchange_bytes import as_mapping, checked_exchange_bytes
from pipesim.costs.expert_pricing import (
    add_copy_sums,
    add_expert_exchanges,
    check_expert_replicas,
    n_expert_copies,
    optimizer_parts,
    routed_bytes,
    segment_shares,
)
from pipesim.costs.kind_routes import KindRoutes, message_rows
from pipesim.costs.microbatch_costs import cost_classes
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import message_bytes as skip_message_bytes
from pipesim.graph.tasks import Kinds
from pipesim.ops import EXCHANGES, Op

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


Floats = NDArray[np.float64]
#: Field of `Costs` with the seconds of an operation. The network prices messages and collectives.
DURATION_OF = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.R: "recompute",
    Op.STEP: "optimizer_step",
    Op.DISPATCH: "dispatch",
    Op.REORDER: "reorder",
}


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
    """Return the costs of each kind of a graph, whose network is that of ``routes``.

    Without ``with_links`` the links of collectives are left out.
    """
    graph = routes.graph
    kinds, n_stages = graph.kinds, graph.n_stages
    duration = _compute_seconds(costs, routes)
    nbytes = _bytes_of_messages(costs.per_stage("output_bytes", n_stages), routes)
    if graph.skips or costs.skip_bytes is not None:
        nbytes += skip_message_bytes(kinds, graph.skips, graph.portals, costs.skip_sizes)
    sends, bandwidth = routes.sends
    fixed = _bytes_of_messages(costs.per_stage("output_seconds", n_stages), routes)
    duration[sends] = fixed[sends] + nbytes[sends] / bandwidth
    price_copies(costs, routes, duration, nbytes)
    launch = costs.per_stage("launch", n_stages)[kinds.stage]
    links = routes.links.copy() if with_links else routes.links
    share = np.ones(len(kinds))
    if routes.collectives:
        priced = Priced(duration, nbytes, links, share)
        duration, nbytes, links, share = _collective_costs(costs, routes).price(
            routes, priced, with_links=with_links
        )
    if costs.tied_bytes and not graph.tied:
        _add_tied_sums(costs, routes, duration)
    if costs.expert_layers or (kinds.has_segments and Op.R in kinds.ops):
        add_expert_exchanges(costs, routes, duration)
    if costs.reduce_copies:
        add_copy_sums(costs, routes, duration)
    return CostTable(duration, routes.latency, launch, nbytes, links, share)


def _compute_seconds(costs: Costs, routes: KindRoutes) -> Floats:
    """Return the seconds of each kind that computes, 0 for the others."""
    graph, n_stages = routes.graph, routes.graph.n_stages
    duration = np.zeros(len(graph.kinds))
    for op, name in DURATION_OF.items():
        if op in routes.rows_of_ops:
            rows, stages = routes.rows_of_ops[op]
            duration[rows] = costs.per_stage(name, n_stages)[stages]
    if Op.REORDER in routes.rows_of_ops:
        rows, stages = routes.rows_of_ops[Op.REORDER]
        of_gradients = graph.kinds.part[rows] == EXCHANGES.index("gradients")
        rows, stages = rows[of_gradients], stages[of_gradients]
        duration[rows] = costs.per_stage("reorder_gradients", n_stages)[stages]
    if graph.kinds.has_segments:
        duration *= segment_shares(costs, graph)
    if costs.overlapped is not None and graph.kinds.overlapped.any():
        _price_overlaps(costs, graph, duration)
    return duration


def _add_tied_sums(costs: Costs, routes: KindRoutes, duration: Floats) -> None:
    """Add the sum of a tied matrix's gradients to STEP of the first and the last stage.

    It is for graphs without tied stages, whose REDUCE_TIED has these seconds. Each replica sums
    those of its own two copies. A device with both copies has no sum to make.

    Raises
    ------
    CostsError
        For bytes of several groups of tied stages.
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
    """Fill the seconds of the halves of overlapped actions."""
    forward, backward, both = (
        costs.per_stage(name, graph.n_stages) for name in ("forward", "backward", "overlapped")
    )
    separate = forward + backward
    share = np.divide(forward, separate, out=np.full_like(separate, 0.5), where=separate > 0)
    halves = np.flatnonzero(graph.kinds.overlapped)
    first = (both * share)[graph.kinds.stage[halves]]
    whole = both[graph.kinds.stage[halves]]
    duration[halves] = np.where(graph.kinds.op[halves] == Op.F, first, whole - first)


def _collective_costs(costs: Costs, routes: KindRoutes) -> CollectiveCosts:
    """Return the values that the seconds of collectives follow from.

    Raises
    ------
    CostsError
        For bytes of exchanges of a stage that is not in the graph, or that is not sharded.
    """
    graph, n_stages = routes.graph, routes.graph.n_stages
    exchange_bytes = as_mapping(checked_exchange_bytes(costs.exchange_bytes))
    for stage in exchange_bytes:
        if stage >= n_stages:
            raise CostsError(
                f"exchange_bytes are of stage {stage}, but the graph has {n_stages} stages, "
                f"0..{n_stages - 1}; give those of its sharded stages"
            )
        if graph.sharded and stage not in graph.sharded:
            raise CostsError(
                f"exchange_bytes are of stage {stage}, but the graph was lowered with "
                f"sharded={list(graph.sharded)}: no other stage exchanges; give theirs"
            )
    measured = {
        name: costs.per_stage(field, n_stages)
        for name, field in MEASURED_COLLECTIVES.items()
        if getattr(costs, field) is not None
    }
    key_bytes = vector_bytes = np.empty(0)
    if Op.ALL_TO_ALL in routes.rows_of_ops:
        key_bytes, vector_bytes = (
            costs.per_stage(name, n_stages) for name in ("key_bytes", "vector_bytes")
        )
    return CollectiveCosts(
        costs.network,
        costs.all_reduce,
        gradient_bytes=costs.per_stage("gradient_bytes", n_stages),
        parameter_bytes=costs.per_stage("parameter_bytes", n_stages),
        key_bytes=key_bytes,
        vector_bytes=vector_bytes,
        measured=measured,
        buckets=costs.buckets,
        exchange_bytes=exchange_bytes,
        tied_bytes=_tied_bytes(costs, graph),
        grad_norm=costs.per_stage("grad_norm", n_stages),
        routed_bytes=routed_bytes(costs, graph),
        step_parts=optimizer_parts(costs, graph),
        experts=_expert_reductions(costs, graph),
    )


def _expert_reductions(costs: Costs, graph: TaskGraph) -> ExpertReductions | None:
    """Return what reductions of experts and of copies need; None if there are none."""
    g = costs.expert_replicas
    if g == 1 and costs.reduced_share == 1:
        return None
    if g > 1:
        check_expert_replicas(costs, graph)
    gradients, parameters, share = (
        costs.per_stage(name, graph.n_stages)
        for name in ("expert_gradient_bytes", "expert_parameter_bytes", "reduced_share")
    )
    return ExpertReductions(g, n_expert_copies(costs, graph), gradients, parameters, share)


def _tied_bytes(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the bytes of each group of tied stages of a graph.

    Raises
    ------
    CostsError
        For bytes of another number of groups.
    """
    n = len(graph.tied)
    if isinstance(costs.tied_bytes, float):
        return np.full(n, costs.tied_bytes)
    if len(costs.tied_bytes) != n and n:
        raise CostsError(
            f"tied_bytes has {len(costs.tied_bytes)} values, but the graph has {n} groups of tied "
            "stages; give one number for all, or one a group"
        )
    return np.array(costs.tied_bytes)


def message_bytes(kinds: Kinds, output_bytes: Floats) -> Floats:
    """Return the bytes of each kind of message: a stage's output, or the gradient of its input.

    Messages of skip connections carry neither: they have 0 here.
    """
    nbytes = np.zeros(len(kinds))
    rows, stages = message_rows(kinds)
    nbytes[rows] = output_bytes[stages]
    return nbytes


def _bytes_of_messages(output_bytes: Floats, routes: KindRoutes) -> Floats:
    """Return `message_bytes`."""
    nbytes = np.zeros(len(routes.graph.kinds))
    rows, stages = routes.message_rows
    nbytes[rows] = output_bytes[stages]
    return nbytes
