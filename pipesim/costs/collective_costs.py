"""Costs of collectives: seconds and bytes of reductions and exchanges, and their links (rule 9).

Replicas may share parameters, and experts of which each group of replicas has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.cost_fields import checked_exchange_bytes
from pipesim.costs.kind_routes import CollectiveRoute, KindRoutes, StageMembers, WholeReductions
from pipesim.costs.rows import MEASURED, ROWS
from pipesim.errors import CostsError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op, is_expert_exchange, part_name

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs


Floats = NDArray[np.float64]
#: Bytes of a count.
_COUNT = 8
#: Bytes that GRAD_NORM sums: a sum of squares.
NORM_BYTES = 8


def price_collectives(
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
        self.tied_bytes = _tied_bytes(costs, self.graph)
        if costs.expert_replicas > 1:
            check_expert_replicas(costs, self.graph)
        if costs.buckets is not None and routes.n_buckets.any():
            _check_buckets(costs, self.graph)

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
        whole, g = self._values(name), self.costs.expert_replicas
        if g == 1 and self.costs.reduced_share == 1:
            return np.zeros_like(whole), whole
        experts = self._values(f"expert_{name}")
        has_copies = self.graph.n_replicas * self.graph.options.n_equal >= 2 * g
        return experts * has_copies, (whole - experts) * self._values("reduced_share")

    @cached_property
    def _gradients(self) -> tuple[Floats, Floats]:
        return self._moved(Op.REDUCE_GRAD)

    def _expert_seconds(self, route: CollectiveRoute, nbytes: float) -> float:
        """Return the seconds of an all-reduce among every g-th member; 0 for one of them."""
        g = self.costs.expert_replicas
        return route.group.part(g).seconds(nbytes) if nbytes and g > 1 else 0.0

    def whole(self, op: Op, reductions: WholeReductions) -> tuple[Floats, Floats]:
        """Return seconds and bytes of reductions of whole stages, or of gathers.

        If parameters are gathered after the step, the two halves of an all-reduce are separate
        collectives: a reduce-scatter (REDUCE_GRAD) and an all-gather (UNSHARD).
        """
        routed, dense = (part[reductions.stages] for part in self._moved(op))
        measured = self._measured(op)
        if measured is not None:
            return measured[reductions.stages], dense + routed
        pairs = zip(reductions.seconds, dense.tolist(), strict=True)
        seconds = np.array([seconds(size) for seconds, size in pairs])
        if routed.any():
            pairs_of_experts = zip(reductions.routes, routed.tolist(), strict=True)
            seconds += [self._expert_seconds(route, size) for route, size in pairs_of_experts]
        return seconds / reductions.parts, dense + routed

    def bucket(self, route: CollectiveRoute, members: StageMembers) -> tuple[float, float, float]:
        """Return seconds and bytes of a bucket, and the share of the backward that it needs."""
        stage = members.stage
        buckets = self._buckets(stage, int(self.routes.n_buckets[stage]))
        share, backward_share = buckets[members.part]
        routed, dense = (share * float(part[stage]) for part in self._gradients)
        seconds = route.seconds(dense) + self._expert_seconds(route, routed)
        measured = self._measured(members.op)
        if measured is not None:
            least = route.seconds(0.0) if share < 1 else 0.0
            whole = float(measured[stage])
            seconds = min(whole, least) + share * max(0.0, whole - least)
        elif self.graph.optimizer_shares[stage] > 1:
            seconds /= 2
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
            nbytes[order] = matrix.sum(axis=1)
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


def _tied_bytes(costs: Costs, graph: TaskGraph) -> Floats:
    """Return the bytes of each group of tied stages."""
    n = len(graph.tied)
    if isinstance(costs.tied_bytes, float):
        return np.full(n, costs.tied_bytes)
    if len(costs.tied_bytes) != n and n:
        raise CostsError(
            f"tied_bytes has {len(costs.tied_bytes)} values, but the graph has {n} groups of tied "
            "stages; give one number for all, or one a group"
        )
    return np.array(costs.tied_bytes)


def _check_buckets(costs: Costs, graph: TaskGraph) -> None:
    if costs.buckets is not None and len(costs.buckets) != graph.n_stages:
        raise CostsError(
            f"buckets has {len(costs.buckets)} values for {graph.n_stages} stages; give one a stage"
        )


def exchange_name(part: int) -> str:
    """Return the name of an exchange, given the part of an ALL_TO_ALL.

    Gradients of experts' tokens take the same way back: their exchanges have the names of those of
    the tokens.
    """
    if not is_expert_exchange(Op.ALL_TO_ALL, part):
        return EXCHANGES[part]
    return "dispatch" if part_name(Op.ALL_TO_ALL, part).startswith("dispatch") else "combine"


def collective_links(
    routes: KindRoutes, nbytes: Floats, links: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return links with those that members of collectives hold, in more columns if needed."""
    for route in routes.collectives:
        if (nbytes[route.rows[-1].kinds] > 0).any():
            missing = route.links.shape[1] - links.shape[1]
            if missing > 0:
                links = np.pad(links, ((0, 0), (0, missing)), constant_values=-1)
            links[route.members, : route.links.shape[1]] = route.links
    return links


# Bytes that replicas share

#: What a replica holds of a stage.
Held = Literal["parameter", "gradient", "optimizer"]


def n_replicas(graph: TaskGraph) -> int:
    """Return the number of data-parallel replicas that a graph stands for."""
    return (1 + int(copy_of_replicas(graph.homes).max())) * graph.options.n_equal


def check_expert_replicas(costs: Costs, graph: TaskGraph) -> None:
    """Raise `CostsError` unless the replicas of a graph are groups that have all experts.

    One copy of the pipeline may stand for one of such a group, if the costs have the seconds of its
    exchanges.
    """
    g = costs.expert_replicas
    n = n_replicas(graph)
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
