"""Price each kind of task of a graph: the work behind `Costs.of`.

Costs are found per kind of task (`pipesim.graph.tasks.Kinds`), not per task, so that the time
depends on the number of stages and not on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.cost_fields import checked_exchange_bytes, checked_launch_by_op
from pipesim.costs.kind_routes import (
    CollectiveRoute,
    KindRoutes,
    StageMembers,
    WholeReductions,
    message_rows,
    widened,
)
from pipesim.costs.microbatch_costs import cost_classes
from pipesim.costs.rows import ADDED, COMPUTED, MEASURED, ROWS
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.errors import CostsError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import Tied, checked_tied
from pipesim.graph.skips import Skip, SkipBytes, input_bytes
from pipesim.graph.skips import message_bytes as skip_message_bytes
from pipesim.graph.tasks import Kinds
from pipesim.ops import (
    COPIES,
    EXCHANGES,
    KEPT,
    PART_NAMES,
    SEGMENTED,
    Op,
    is_expert_exchange,
    part_name,
)
from pipesim.scheduling.placement import follows_previous

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


Floats = NDArray[np.float64]


def price(costs: Costs, graph: TaskGraph) -> TaskCosts:
    """Return the costs of each task of ``graph``, one row a kind; see `Costs.of`.

    Values may overflow to infinity; the callers of engines check that times are finite.
    """
    if costs.last_logits and not graph.forward_only:
        raise CostsError(
            "costs have the logits of last tokens alone and no loss (last_logits=True), but the "
            "graph trains; give forward_only=True to lower, or costs without last_logits"
        )
    routes = KindRoutes(graph, costs.network, costs.all_reduce)
    classes = cost_classes(costs, graph)
    if classes is None:
        return TaskCosts(cost_table(costs, routes), graph.kind, None, costs)
    table = _joined([cost_table(own, routes) for own in classes.costs])
    return TaskCosts(table, classes.rows(graph.kind, len(graph.kinds)), None, costs)


def _joined(tables: Sequence[CostTable]) -> CostTable:
    """Return one table with the rows of all, and as many columns of links as the widest needs."""
    width = max(table.links.shape[1] for table in tables)
    own_tables = (table._replace(links=widened(table.links, width)) for table in tables)
    columns = zip(*own_tables, strict=True)
    whole: Any = (None if own[0] is None else np.concatenate(own) for own in columns)
    return CostTable(*whole)


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
        nbytes += skip_message_bytes(kinds, graph.skips, graph.portals, skip_sizes(graph, costs))
    if graph.edges:
        apart = np.flatnonzero(kinds.peer_stage >= 0)
        sources = np.minimum(kinds.stage, kinds.peer_stage)[apart]
        fixed[apart] = costs.per_stage("output_seconds", n_stages)[sources]
    sends, bandwidth = routes.sends
    duration[sends] = fixed[sends] + nbytes[sends] / bandwidth
    price_copies(costs, routes, duration, nbytes)
    launch = launches(costs, graph)
    links = routes.links.copy() if with_links else routes.links
    share, overlap_cost = np.ones(len(kinds)), None
    if routes.collectives:
        _price_collectives(costs, routes, duration, nbytes, share)
        if with_links:
            links = _collective_links(routes, nbytes, links)
        if costs.overlap_cost:
            overlap_cost = _overlap_costs(costs, routes, duration, nbytes)
    if costs.tied_bytes and not graph.tied and (graph.kinds.op == Op.STEP).any():
        _add_tied_sums(costs, routes, duration)
    if costs.expert_layers or (kinds.has_segments and Op.R in kinds.ops):
        add_expert_exchanges(costs, routes, duration)
    for name, op in ADDED.items():
        if getattr(costs, name) and op in routes.rows_of_ops:
            rows, stages = routes.rows_of_ops[op]
            duration[rows] += costs.per_stage(name, n_stages)[stages]
    return CostTable(duration, routes.latency, launch, nbytes, links, share, overlap_cost)


def launches(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the seconds of a host to issue a task of each kind."""
    seconds: Floats = costs.per_stage("launch", graph.n_stages)[graph.kinds.stage]
    for name, own in checked_launch_by_op(costs.launch_by_op) or ():
        seconds[graph.kinds.op == Op[name]] = own
    return seconds


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
    """Add the sums of tied matrices' gradients to STEP of the stages that have copies.

    It is for graphs without tied stages, whose REDUCE_TIED has these seconds. Each replica sums
    those of its own copies, once a device. A device with all copies has no sum to make.
    """
    graph = routes.graph
    if graph.edges and not costs.tied:
        name = "costs.tied_stages" if costs.tied_stages else "such as [(2, 5)], to name the stages"
        raise CostsError(
            "tied_bytes are of the first and the last stage of a chain, but the stages of the "
            f"graph have edges; lower with tied={name}"
        )
    if isinstance(costs.tied_bytes, tuple) and not costs.tied:
        raise CostsError(
            f"tied_bytes are of {len(costs.tied_bytes)} groups of tied stages, but the graph has "
            "none; lower with tied=, such as [(0, 3)], or give one number"
        )
    kinds, is_step = graph.kinds, graph.kinds.op == Op.STEP
    groups = costs.tied_stages or ((0, graph.n_stages - 1),)
    if costs.tied:
        groups = checked_tied(costs.tied, graph.n_stages)
    for group, nbytes in zip(groups, _tied_bytes(costs, groups).tolist(), strict=True):
        for replica, homes in enumerate(graph.homes[:, group]):
            devices, first = np.unique(homes, return_index=True)
            if len(devices) > 1:
                own = (kinds.replica == replica) & np.isin(kinds.stage, np.array(group)[first])
                rows = is_step & own
                members = routes.true_devices(devices)
                duration[rows] += costs.network.all_reduce(nbytes, members, "fastest")


def _price_overlaps(costs: Costs, graph: TaskGraph, duration: Floats) -> None:
    """Give F and B their shares of ``overlapped``, and I what it is of its B."""
    forward, backward, both = (
        costs.per_stage(name, graph.n_stages) for name in ("forward", "backward", "overlapped")
    )
    separate = forward + backward
    share = np.divide(forward, separate, out=np.full_like(separate, 0.5), where=separate > 0)
    halves = np.flatnonzero(graph.kinds.overlapped)
    stage, op, first = graph.kinds.stage[halves], graph.kinds.op[halves], both * share
    is_part = (op == Op.I) & (backward[stage] > 0)
    of_inputs = np.divide(duration[halves], backward[stage], where=is_part, out=np.ones(len(op)))
    second = of_inputs * (both - first)[stage]
    duration[halves] = np.where(op == Op.F, first[stage], second)


def message_bytes(kinds: Kinds, output_bytes: Floats) -> Floats:
    """Return the bytes of each kind of message: a stage's output, or the gradient of its input.

    Messages of skip connections carry neither: they have 0 here. `skip_sizes` has theirs.
    """
    nbytes = np.zeros(len(kinds))
    rows, stages = message_rows(kinds)
    nbytes[rows] = output_bytes[stages]
    return nbytes


def skip_sizes(graph: TaskGraph, costs: Costs) -> SkipBytes | None:
    """Return the bytes of all skip connections of a graph, or of each.

    An edge of stages that are no chain has the bytes that the costs give it as a skip, or else the
    output_bytes of its source.
    """
    own = costs.skip_sizes
    if not graph.edges or not (own is None or isinstance(own, tuple)):
        return own
    outputs = costs.per_stage("output_bytes", graph.n_stages)
    sizes: dict[Skip, Any] = {skip: float(outputs[skip[0]]) for skip in graph.skips}
    return tuple((sizes | dict(own or ())).items())


# Collectives (rule 9)

#: Bytes of a count.
_COUNT = 8
#: Bytes that GRAD_NORM sums: a sum of squares.
NORM_BYTES = 8


def _price_collectives(
    costs: Costs, routes: KindRoutes, duration: Floats, nbytes: Floats, share: Floats
) -> None:
    """Fill the rows of collectives, and divide the seconds of STEPs that replicas share.

    ``nbytes`` are those that a member contributes, ``share`` is that of its backward after which a
    bucket is complete. Collectives whose members have the same kinds are priced once.
    """
    prices = _Prices(costs, routes)
    for op, reductions in routes.whole_reductions.items():
        seconds, sizes = prices.whole(op, reductions)
        duration[reductions.kinds] = seconds[reductions.row]
        nbytes[reductions.kinds] = sizes[reductions.row]
    for route, members in routes.partial_members:
        rows = members.kinds
        if members.op == Op.ALL_TO_ALL:
            duration[rows], nbytes[rows] = prices.exchange(members.stage, rows)
        else:
            duration[rows], nbytes[rows], share[rows] = prices.bucket(route, members)
    for route in routes.device_collectives:
        is_norm = route.rows[0].op == Op.GRAD_NORM
        cost = prices.norm(route) if is_norm else prices.tied_sum(route)
        duration[route.members], nbytes[route.members] = cost
    if Op.STEP in routes.rows_of_ops:
        steps, stages = routes.rows_of_ops[Op.STEP]
        duration[steps] /= prices.step_parts[stages]


class _Prices:
    """Seconds and bytes of each collective of a graph."""

    def __init__(self, costs: Costs, routes: KindRoutes) -> None:
        self.costs, self.routes, self.graph = costs, routes, routes.graph
        self.step_parts = optimizer_parts(costs, self.graph)
        self.exchange_bytes = _uneven_bytes(costs, self.graph)
        self.tied_bytes = _tied_bytes(costs, self.graph.tied)
        if costs.expert_replicas > 1:
            check_expert_replicas(costs, self.graph)
        n, buckets = self.graph.n_stages, costs.buckets
        if buckets is not None and routes.n_buckets.any() and len(buckets) != n:
            raise CostsError(f"buckets has {len(buckets)} values for {n} stages; give one a stage")

    def _values(self, name: str) -> Floats:
        return self.costs.per_stage(name, self.graph.n_stages)

    def _measured(self, op: Op, part: str = "") -> Floats | None:
        """Return the measured seconds of each stage; None if they follow from the network."""
        name = MEASURED[op, part]
        return None if getattr(self.costs, name) is None else self._values(name)

    def _moved(self, op: Op) -> tuple[Floats, Floats]:
        """Return the bytes that an operation moves of each stage: those of experts, and others.

        Experts that no other replica has stay.
        """
        name = ROWS[MEASURED[op, ""]].sizes[0]
        ratio = self.costs.exchanged_gradients if op == Op.REDUCE_GRAD else 1.0
        whole, g = self._values(name) * ratio, self.costs.expert_replicas
        if g == 1 and self.costs.reduced_share == 1:
            return np.zeros_like(whole), whole
        experts = self._values(f"expert_{name}") * ratio
        has_copies = self.graph.n_replicas * self.graph.options.n_equal >= 2 * g
        return experts * has_copies, (whole - experts) * self._values("reduced_share")

    @cached_property
    def _gradients(self) -> tuple[Floats, Floats]:
        return self._moved(Op.REDUCE_GRAD)

    def _expert_seconds(self, route: CollectiveRoute, nbytes: float, is_half: bool) -> float:
        """Return the seconds of an all-reduce, or half of one, among every g-th member.

        They are 0 for one member.
        """
        g = self.costs.expert_replicas
        return route.group.part(g).formula(is_half)(nbytes) if nbytes and g > 1 else 0.0

    def whole(self, op: Op, reductions: WholeReductions) -> tuple[Floats, Floats]:
        """Return seconds and bytes of reductions of whole stages, or of gathers.

        If parameters are gathered after the step, the two halves of an all-reduce are separate
        collectives: a reduce-scatter (REDUCE_GRAD) and an all-gather (UNSHARD). Gradients may have
        an all-reduce all the same.
        """
        routed, dense = (part[reductions.stages] for part in self._moved(op))
        measured = self._measured(op)
        if measured is not None:
            return measured[reductions.stages], dense + routed
        formulas, halves = reductions.seconds, reductions.halves
        if op == Op.REDUCE_GRAD and self._sums_whole:
            formulas = tuple(route.seconds for route in reductions.routes)
            halves = (False,) * len(halves)
        pairs = zip(formulas, dense.tolist(), strict=True)
        seconds = np.array([seconds(size) for seconds, size in pairs])
        if routed.any():
            rows = zip(reductions.routes, routed.tolist(), halves, strict=True)
            seconds += [self._expert_seconds(*row) for row in rows]
        return seconds, dense + routed

    @property
    def _sums_whole(self) -> bool:
        """Whether each replica has all sums of gradients, also where it needs a share alone."""
        return self.costs.gradient_exchange == "all_reduce"

    def bucket(self, route: CollectiveRoute, members: StageMembers) -> tuple[float, float, float]:
        """Return seconds and bytes of a bucket, and the share of the backward that it needs."""
        stage = members.stage
        buckets = self._buckets(stage, int(self.routes.n_buckets[stage]))
        share, backward_share = buckets[members.part]
        routed, dense = (share * float(part[stage]) for part in self._gradients)
        is_half = bool(self.graph.optimizer_shares[stage] > 1) and not self._sums_whole
        seconds = route.group.formula(is_half)(dense)
        seconds += self._expert_seconds(route, routed, is_half)
        measured = self._measured(members.op)
        if measured is not None:
            least = route.seconds(0.0) if share < 1 else 0.0
            whole = float(measured[stage])
            seconds = min(whole, least) + share * max(0.0, whole - least)
        total = sum(of_bytes for of_bytes, _ in buckets)  # those of measured seconds may exceed 1
        return seconds, (dense + routed) / total, backward_share

    def _buckets(self, stage: int, n: int) -> Sequence[tuple[float, float]]:
        """Return the share of the bytes, and of the backward, of each of a stage's n buckets."""
        if self.costs.buckets is None:
            return [(1 / n, (k + 1) / n) for k in range(n)]
        buckets = self.costs.buckets[stage]
        if len(buckets) != n:
            raise CostsError(
                f"buckets has {len(buckets)} of stage {stage}, but the graph reduces its gradients "
                f"in {n}; give (share of bytes, share of the backward) of each"
            )
        return buckets

    def exchange(self, stage: int, rows: NDArray[Any]) -> tuple[float, float | Floats]:
        """Return seconds, and bytes of each member, of an exchange between the kinds ``rows``."""
        kinds, n = self.graph.kinds, len(rows)
        name = exchange_name(int(kinds.part[rows[0]]))
        nbytes: float | Floats
        sent: float | Floats
        if name in (matrices := self.exchange_bytes.get(stage, {})):
            matrix = matrices[name]
            if len(matrix) != n:
                raise CostsError(
                    f"exchange_bytes of {name} of stage {stage} are of {len(matrix)} replicas, but "
                    f"the graph has {n}; give a matrix of shape ({n}, {n})"
                )
            order = np.argsort(kinds.replica[rows], kind="stable")
            devices = kinds.device[rows[order]]
            nbytes = np.empty(n)
            nbytes[order] = matrix.sum(axis=1) - matrix.diagonal()
            sent = matrix
        else:
            of_stages = self._values(ROWS[MEASURED[Op.ALL_TO_ALL, name]].sizes[0])
            nbytes = _COUNT * n if name == "counts" else float(of_stages[stage])
            nbytes *= self.graph.n_microbatches if name == "accumulated" else 1
            devices, sent = np.unique(kinds.device[rows]), nbytes
        measured = self._measured(Op.ALL_TO_ALL, name)
        if measured is not None:
            return float(measured[stage]), nbytes
        return self.costs.network.all_to_all(sent, devices), nbytes

    def tied_sum(self, route: CollectiveRoute) -> tuple[float, float]:
        """Return seconds and bytes of a REDUCE_TIED; it moves none if all copies are on a device.

        Measured seconds are those of the lowest stage of the group.
        """
        part = route.rows[0].part
        nbytes = float(self.tied_bytes[part]) if len(route.members) > 1 else 0.0
        measured = self._measured(Op.REDUCE_TIED)
        if measured is not None:
            return float(measured[self.graph.tied[part][0]]), nbytes
        return route.seconds(nbytes), nbytes

    def norm(self, route: CollectiveRoute) -> tuple[float, float]:
        """Return seconds and bytes of GRAD_NORM: those of the slowest device, and the all-reduce.

        A member has the stages of its replica on its device, of which replicas share the gradients
        if they share the optimizer.
        """
        kinds, seconds = self.graph.kinds, self._values("grad_norm") / self.step_parts
        homes, members = self.graph.homes[kinds.replica[route.members]], route.members
        of_members = ((homes == kinds.device[members][:, None]) * seconds).sum(axis=1)
        nbytes = float(NORM_BYTES) if len(members) > 1 else 0.0
        return float(of_members.max()) + route.seconds(nbytes), nbytes


def _uneven_bytes(costs: Costs, graph: TaskGraph) -> dict[int, dict[str, Floats]]:
    """Return ``exchange_bytes`` as arrays, by stage and exchange."""
    stages = dict(checked_exchange_bytes(costs.exchange_bytes) or ())
    for stage in stages:
        if stage >= graph.n_stages:
            raise CostsError(
                f"exchange_bytes are of stage {stage}, but the graph has {graph.n_stages} stages, "
                f"0..{graph.n_stages - 1}; give those of its sharded stages"
            )
        if graph.sharded and stage not in graph.sharded:
            raise CostsError(
                f"exchange_bytes are of stage {stage}, but the graph was lowered with "
                f"sharded={list(graph.sharded)}: no other stage exchanges; give theirs"
            )
    return {stage: {k: np.array(matrix) for k, matrix in own} for stage, own in stages.items()}


def _tied_bytes(costs: Costs, groups: Tied) -> Floats:
    """Return the bytes of each group of tied stages."""
    n = len(groups)
    if isinstance(costs.tied_bytes, float):
        return np.full(n, costs.tied_bytes)
    own = costs.tied_stages if costs.tied else groups
    if len(costs.tied_bytes) != len(own) and n:
        raise CostsError(
            f"tied_bytes has {len(costs.tied_bytes)} values, but the graph has {n} groups of tied "
            "stages; give one number for all, or one a group"
        )
    sizes = dict(zip(own, costs.tied_bytes, strict=False))
    for group in groups:
        if group not in sizes:
            raise CostsError(
                f"tied_bytes are of tied={list(own)}, but the graph was lowered with "
                f"tied={list(groups)}; lower with tied=costs.tied_stages, or name all groups with "
                "dataclasses.replace(costs, tied=..., tied_bytes=...)"
            )
    return np.array([sizes[group] for group in groups], dtype=float)


def exchange_name(part: int) -> str:
    """Return the name of an exchange, given the part of an ALL_TO_ALL.

    Gradients of experts' tokens take the same way back: their exchanges have the names of those of
    the tokens.
    """
    if not is_expert_exchange(Op.ALL_TO_ALL, part):
        return EXCHANGES[part]
    return "dispatch" if part_name(Op.ALL_TO_ALL, part).startswith("dispatch") else "combine"


#: Bytes a second that a GPU sends, from which on a collective costs compute all of
#: `Costs.overlap_cost`: an all-gather over NVLink of A100, https://github.com/NVIDIA/nccl/issues/1428.
OVERLAP_RATE = 210e9


def _overlap_costs(costs: Costs, routes: KindRoutes, duration: Floats, nbytes: Floats) -> Floats:
    """Return ``overlap_cost`` of `CostTable` of each kind.

    Of n members, each sends (n-1)/n of its bytes, and twice that in a whole all-reduce.
    """
    sent = np.zeros(len(duration))
    shares_sums = costs.gradient_exchange != "all_reduce"
    for route in routes.collectives:
        n = len(route.group.devices)
        for members in route.rows:
            is_half = members.op in (Op.UNSHARD, Op.ALL_TO_ALL)
            if members.op == Op.REDUCE_GRAD:
                is_half = shares_sums and routes.graph.optimizer_shares[members.stage] > 1
            sent[members.kinds] = (1 if is_half else 2) * (n - 1) / n * nbytes[members.kinds]
    rate = np.divide(sent, duration, out=np.zeros_like(sent), where=duration > 0)
    lost: Floats = costs.overlap_cost * np.minimum(1.0, rate / OVERLAP_RATE)
    return lost


def _collective_links(
    routes: KindRoutes, nbytes: Floats, links: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return links with those that members of collectives hold, in more columns if needed."""
    for route in routes.collectives:
        if (nbytes[route.rows[-1].kinds] > 0).any():
            links = widened(links, route.links.shape[1])
            links[route.members, : route.links.shape[1]] = route.links
    return links


# OFFLOAD and RELOAD, the copies of activations to host memory or a peer, and back


def outputs_before(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes that each stage takes of the stage before it; shape ``(n_stages,)``."""
    outputs = np.roll(costs.per_stage("output_bytes", graph.n_stages), 1)
    return np.where(follows_previous(graph.edges, graph.n_stages), outputs, 0.0)


def kept_inputs(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes of input that F of each stage keeps for R; shape ``(n_stages,)``.

    That of a stage without a stage before it belongs to the caller and counts as 0. Tensors of skip
    connections are input too.
    """
    n_stages, inputs = graph.n_stages, outputs_before(graph, costs)
    if graph.skips or costs.skip_bytes is not None:
        inputs += input_bytes(n_stages, graph.skips, skip_sizes(graph, costs))
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


# Exchanges of experts without tasks

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


# Bytes that replicas share

#: What a replica holds of a stage.
Held = Literal["parameter", "gradient", "optimizer"]


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


def optimizer_parts(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the number by which the seconds of STEP of each stage are divided."""
    if costs.expert_replicas == 1 or not np.any(costs.expert_optimizer_bytes):
        return np.asarray(graph.optimizer_shares)
    whole = costs.per_stage("optimizer_bytes", graph.n_stages)
    held = held_bytes(costs, graph, "optimizer")
    return np.divide(whole, held, out=np.ones_like(whole), where=held > 0)
