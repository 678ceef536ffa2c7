"""Costs of collectives: seconds and bytes of reductions and exchanges, and their links (rule 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.kind_routes import CollectiveRoute, KindRoutes, StageMembers, WholeReductions
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.network.network import Network
from pipesim.ops import EXCHANGES, Op, is_expert_exchange, part_name

Floats = NDArray[np.float64]
#: For each stage, its buckets of gradients as pairs. First the share of the bytes, or of measured
#: seconds, which sum to more than 1 where overlap slows reductions. Then the share of the backward
#: after which the bucket is complete.
Buckets = tuple[tuple[tuple[float, float], ...], ...]
#: Field of `Costs` with the measured seconds of a collective.
MEASURED_COLLECTIVES = {
    "REDUCE_GRAD": "reduce_grad",
    "UNSHARD": "unshard",
    "REDUCE_TIED": "reduce_tied",
    "counts": "exchange_counts",
    "keys": "exchange_keys",
    "vectors": "exchange_vectors",
    "gradients": "exchange_gradients",
    "accumulated": "exchange_accumulated",
    "dispatch": "exchange_dispatch",
    "combine": "exchange_combine",
}
#: Bytes of a count.
_COUNT = 8
#: Bytes that GRAD_NORM sums: a sum of squares.
NORM_BYTES = 8


class Priced(NamedTuple):
    """Costs of each kind of task, one row a kind; the columns of `CostTable` that prices fill.

    ``nbytes`` of a collective are those that a member contributes. ``share`` is the share of its
    backward after which a bucket is complete.
    """

    duration: Floats
    nbytes: Floats
    links: NDArray[np.int64]
    share: Floats


class ExpertReductions(NamedTuple):
    """Bytes reduced over some replicas only, or by parts; arrays have one value a stage."""

    n_replicas: int  # that together have all experts, g: every g-th has the same
    n_copies: int  # replicas that have the same experts
    gradient_bytes: Floats  # of a replica's experts
    parameter_bytes: Floats
    share: Floats  # of the other bytes that a GPU reduces, and gathers

    def moved(self, whole: Floats, op: Op) -> tuple[Floats, Floats]:
        """Return the bytes that an operation moves of each stage: those of experts, and others.

        ``whole`` are all bytes of the stages. Experts that no other replica has stay.
        """
        experts = self.parameter_bytes if op == Op.UNSHARD else self.gradient_bytes
        return experts * (self.n_copies > 1), (whole - experts) * self.share

    def seconds(self, route: CollectiveRoute, nbytes: float) -> float:
        """Return the seconds of an all-reduce among every g-th member; 0 for one of them."""
        g = self.n_replicas
        return route.group.part(g).seconds(nbytes) if nbytes and g > 1 else 0.0


class CollectiveCosts(NamedTuple):
    """Inputs of the costs of collectives, as in `pipesim.Costs`; arrays have one value a stage."""

    network: Network
    all_reduce: str
    gradient_bytes: Floats
    parameter_bytes: Floats
    key_bytes: Floats  # empty without exchanges, as are vector_bytes
    vector_bytes: Floats
    measured: Mapping[str, Floats]  # seconds by name; `network` prices collectives without an entry
    buckets: Buckets | None  # None for even shares
    exchange_bytes: Mapping[int, Mapping[str, Floats]]
    tied_bytes: Floats  # of each group of tied stages
    grad_norm: Floats  # seconds
    routed_bytes: Mapping[str, Floats]  # of tokens; empty without exchanges of experts
    step_parts: Floats  # by which the seconds of STEP, and of norms of gradients, are divided
    experts: ExpertReductions | None = None

    def price(self, routes: KindRoutes, priced: Priced, *, with_links: bool = True) -> Priced:
        """Fill the rows of collectives; return all rows, with as many columns of links as needed.

        Collectives whose members have the same kinds cost the same and are priced once.
        """
        graph, shares = routes.graph, routes.graph.optimizer_shares
        for op, reductions in routes.whole_reductions.items():
            seconds, nbytes = self._whole(op, reductions)
            priced.duration[reductions.kinds] = seconds[reductions.row]
            priced.nbytes[reductions.kinds] = nbytes[reductions.row]
        for route, members in routes.partial_members:
            rows = members.kinds
            if members.op == Op.ALL_TO_ALL:
                cost = self._exchange(graph, members.stage, rows)
            else:
                is_half = bool(shares[members.stage] > 1)
                cost = self._bucket(route, members, routes, priced.share, is_half=is_half)
            priced.duration[rows], priced.nbytes[rows] = cost
        for route in routes.device_collectives:
            is_norm = route.rows[0].op == Op.GRAD_NORM
            cost = self._norm(graph, route) if is_norm else self._tied_sum(graph, route)
            priced.duration[route.members], priced.nbytes[route.members] = cost
        if with_links:
            for route in routes.collectives:
                if (priced.nbytes[route.rows[-1].kinds] > 0).any():
                    links = _with_links(priced.links, route.members, route.links)
                    priced = priced._replace(links=links)
        if Op.STEP in routes.rows_of_ops:
            steps, stages = routes.rows_of_ops[Op.STEP]
            priced.duration[steps] /= self.step_parts[stages]
        return priced

    def _whole(self, op: Op, reductions: WholeReductions) -> tuple[Floats, Floats]:
        """Return seconds and bytes of reductions of whole stages, or of gathers.

        If parameters are gathered after the step, the two halves of an all-reduce are separate
        collectives: a reduce-scatter (REDUCE_GRAD) and an all-gather (UNSHARD).
        """
        nbytes = self.parameter_bytes if op == Op.UNSHARD else self.gradient_bytes
        measured, experts = self.measured.get(op.name), self.experts
        if experts is None:
            nbytes = nbytes[reductions.stages]
            if measured is not None:
                return measured[reductions.stages], nbytes
            pairs = zip(reductions.seconds, nbytes.tolist(), strict=True)
            return np.array([seconds(size) for seconds, size in pairs]) / reductions.parts, nbytes
        routed, dense = (part[reductions.stages] for part in experts.moved(nbytes, op))
        if measured is not None:
            return measured[reductions.stages], dense + routed
        both = [
            route.seconds(own) + experts.seconds(route, size)
            for route, own, size in zip(reductions.routes, dense, routed, strict=True)
        ]
        return np.array(both) / reductions.parts, dense + routed

    def _bucket(
        self,
        route: CollectiveRoute,
        members: StageMembers,
        routes: KindRoutes,
        backward_share: Floats,
        *,
        is_half: bool,
    ) -> tuple[float, float]:
        """Return seconds and bytes of a bucket; fill ``backward_share`` of its kinds."""
        stage = members.stage
        buckets = self._buckets(stage, int(routes.n_buckets[stage]))
        share, backward_share[members.kinds] = buckets[members.part]
        sum_of_shares = sum(byte_share for byte_share, _ in buckets)
        nbytes = share * float(self.gradient_bytes[stage])
        routed = 0.0
        if self.experts is not None:
            parts = self.experts.moved(self.gradient_bytes, members.op)
            routed, nbytes = (share * float(part[stage]) for part in parts)
        seconds = route.seconds(nbytes)
        if routed and self.experts is not None:
            seconds += self.experts.seconds(route, routed)
            nbytes += routed
        measured = self.measured.get(members.op.name)
        if measured is not None:
            least = route.seconds(0.0) if share < 1 else 0.0
            whole = float(measured[stage])
            seconds = min(whole, least) + share * max(0.0, whole - least)
        elif is_half:
            seconds /= 2
        return seconds, nbytes / sum_of_shares  # shares of measured seconds may sum to more than 1

    def _exchange(
        self, graph: TaskGraph, stage: int, rows: NDArray[Any]
    ) -> tuple[float, float | Floats]:
        """Return seconds, and bytes of each member, of an exchange between the kinds ``rows``."""
        kinds = graph.kinds
        name, n = exchange_name(int(kinds.part[rows[0]])), len(rows)
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
            sizes = {
                "counts": _COUNT * n,
                "keys": self.key_bytes[stage],
                "accumulated": graph.n_microbatches * self.vector_bytes[stage],
                **{direction: sizes[stage] for direction, sizes in self.routed_bytes.items()},
            }
            devices = np.unique(kinds.device[rows])
            nbytes = sent = float(sizes.get(name, self.vector_bytes[stage]))
        measured = self.measured.get(name)
        if measured is not None:
            return float(measured[stage]), nbytes
        return self.network.all_to_all(sent, devices), nbytes

    def _tied_sum(self, graph: TaskGraph, route: CollectiveRoute) -> tuple[float, float]:
        """Return seconds and bytes of a REDUCE_TIED; it moves none if all copies are on a device.

        Measured seconds are those of the lowest stage of the group.
        """
        part = route.rows[0].part
        nbytes = float(self.tied_bytes[part]) if len(route.members) > 1 else 0.0
        measured = self.measured.get(Op.REDUCE_TIED.name)
        if measured is not None:
            return float(measured[graph.tied[part][0]]), nbytes
        return route.seconds(nbytes), nbytes

    def _norm(self, graph: TaskGraph, route: CollectiveRoute) -> tuple[float, float]:
        """Return seconds and bytes of GRAD_NORM: those of the slowest device, and the all-reduce.

        A member has the stages of its replica on its device, of which replicas share the gradients
        if they share the optimizer.
        """
        kinds, seconds = graph.kinds, self.grad_norm / self.step_parts
        homes, members = graph.homes[kinds.replica[route.members]], route.members
        of_members = ((homes == kinds.device[members][:, None]) * seconds).sum(axis=1)
        nbytes = float(NORM_BYTES) if len(members) > 1 else 0.0
        return float(of_members.max()) + route.seconds(nbytes), nbytes

    def _buckets(self, stage: int, n: int) -> Sequence[tuple[float, float]]:
        """Return the share of the bytes, and of the backward, of each of a stage's n buckets."""
        if self.buckets is None:
            return [(1 / n, (k + 1) / n) for k in range(n)]
        buckets = self.buckets[stage] if stage < len(self.buckets) else ()
        if len(buckets) != n:
            raise CostsError(
                f"buckets has {len(buckets)} of stage {stage}, but the graph reduces its gradients "
                f"in {n}; give (share of bytes, share of the backward) of each"
            )
        return buckets


def exchange_name(part: int) -> str:
    """Return the name of an exchange in `MEASURED_COLLECTIVES`, given the part of an ALL_TO_ALL.

    Gradients of experts' tokens take the same way back: their exchanges have the names of those of
    the tokens.
    """
    if not is_expert_exchange(Op.ALL_TO_ALL, part):
        return EXCHANGES[part]
    return "dispatch" if part_name(Op.ALL_TO_ALL, part).startswith("dispatch") else "combine"


def checked_buckets(buckets: object) -> Buckets | None:
    """Return buckets as tuples."""
    if buckets is None:
        return None
    try:
        if isinstance(buckets, (str, bytes, Mapping)):
            raise TypeError
        stages = tuple(
            tuple((float(a), float(b)) for a, b in stage)
            for stage in buckets  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise CostsError(
            "buckets must be, of each stage, pairs (share of bytes, share of the backward), such "
            f"as [[(0.5, 0.4), (0.5, 1.0)]], got {buckets!r}"
        ) from None
    for index, stage in enumerate(stages):
        if not all(0 <= a < math.inf and 0 <= b <= 1 for a, b in stage):
            raise CostsError(
                f"buckets of stage {index} must be shares >= 0, those of the backward at most 1, "
                f"got {stage!r}"
            )
        if stage and sum(a for a, _ in stage) < 1 - 1e-6:
            raise CostsError(
                f"buckets of stage {index} have {sum(a for a, _ in stage):g} of its bytes; give "
                "shares that sum to 1, or more if they are shares of measured seconds"
            )
    return stages


def _with_links(
    links: NDArray[np.int64], rows: NDArray[Any], held: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ``links`` with ``held`` in ``rows``, and with more columns if needed."""
    missing = held.shape[1] - links.shape[1]
    if missing > 0:
        links = np.pad(links, ((0, 0), (0, missing)), constant_values=-1)
    links[rows, : held.shape[1]] = held
    return links
