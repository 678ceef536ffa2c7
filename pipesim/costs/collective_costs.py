"""What collectives cost: seconds of reductions and exchanges, links that they hold (rule 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.network.network import Network
from pipesim.ops import COLLECTIVES, EXCHANGES, Op

__all__ = ["MEASURED_COLLECTIVES", "Buckets", "CollectiveCosts", "Priced", "checked_buckets"]

Floats = NDArray[np.float64]
#: Of each stage, its buckets: share of the bytes, or of the seconds as they were measured, which
#: sum to more where overlap slows them; and share of the backward when it is complete.
Buckets = tuple[tuple[tuple[float, float], ...], ...]
#: Field that says how long a collective takes, where that was measured.
MEASURED_COLLECTIVES = {
    "REDUCE_GRAD": "reduce_grad",
    "UNSHARD": "unshard",
    "counts": "exchange_counts",
    "keys": "exchange_keys",
    "vectors": "exchange_vectors",
    "gradients": "exchange_gradients",
    "accumulated": "exchange_accumulated",
}
#: Bytes of a count.
_COUNT = 8


class Priced(NamedTuple):
    """Seconds, bytes that a member brings, and links of each kind of task; shares of backwards.

    ``share`` is the part of its backward after which a bucket is reduced.
    """

    duration: Floats
    nbytes: Floats
    links: NDArray[np.int64]
    share: Floats


class CollectiveCosts(NamedTuple):
    """What the seconds of collectives follow from; arrays have one value a stage.

    Attributes
    ----------
    network, all_reduce
        Links, and the algorithm of REDUCE_GRAD.
    gradient_bytes, parameter_bytes, key_bytes, vector_bytes
        Bytes of a stage's gradients, and parameters; of a micro-batch's keys, and of their vectors.
    measured
        Seconds of REDUCE_GRAD, UNSHARD and of each exchange by name, where they were measured.
    buckets
        How gradients are shared by buckets; None for evenly.
    exchange_bytes
        Bytes from replica to replica of the exchanges of a stage, by name, where they are uneven.
    """

    network: Network
    all_reduce: str
    gradient_bytes: Floats
    parameter_bytes: Floats
    key_bytes: Floats
    vector_bytes: Floats
    measured: Mapping[str, Floats]
    buckets: Buckets | None
    exchange_bytes: Mapping[int, Mapping[str, Floats]]

    def price(self, graph: TaskGraph, priced: Priced) -> Priced:
        """Fill the rows of collectives; return them, with links as wide as they need."""
        kinds, done = graph.kinds, ~graph.kinds.is_op(COLLECTIVES)
        n_buckets = _n_buckets(graph)
        unsharded = np.flatnonzero(graph.optimizer_shares > 1)
        links = priced.links
        for row in range(len(graph.collectives)):
            members = graph.kind[graph.collectives[row]]
            if done[members].all():
                continue
            devices = np.unique(kinds.device[members])
            moves = False
            for stage in np.unique(kinds.stage[members]).tolist():
                of = members[kinds.stage[members] == stage]
                op, part = Op(kinds.op[of[0]]), int(kinds.part[of[0]])
                if op == Op.ALL_TO_ALL:
                    seconds, nbytes = self._exchange(graph, stage, part, of)
                else:
                    share, whole = 1.0, 1.0
                    if part >= 0:
                        parts = self._buckets(stage, int(n_buckets[stage]))
                        share, priced.share[of] = parts[part]
                        whole = sum(of_bytes for of_bytes, _ in parts)
                    halves = stage in unsharded
                    seconds, nbytes = self._reduction(op, stage, share, devices, halves)
                    nbytes /= whole  # shares of measured seconds may sum to more than 1
                priced.duration[of], priced.nbytes[of] = seconds, nbytes
                moves = bool(np.any(priced.nbytes[of] > 0))
            if moves:
                name = "all_to_all" if (kinds.op[members] == Op.ALL_TO_ALL).any() else (
                    "ring" if np.isin(kinds.stage[members], unsharded).any() else self.all_reduce
                )  # fmt: skip
                held = self.network.collective_links(name, devices, graph.n_devices)
                links = with_links(
                    links, members, held[np.searchsorted(devices, kinds.device[members])]
                )
            done[members] = True
        steps = kinds.op == Op.STEP
        priced.duration[steps] /= graph.optimizer_shares[kinds.stage[steps]]
        return priced._replace(links=links)

    def _reduction(
        self, op: Op, stage: int, part: float, devices: NDArray[Any], halves: bool
    ) -> tuple[float, float]:
        """Return seconds and bytes of a part of a stage's REDUCE_GRAD, or of its UNSHARD.

        Where parameters are gathered after the step, an all-reduce's two halves are a collective
        each: a reduce-scatter, and this all-gather.
        """
        whole_bytes = self.parameter_bytes if op == Op.UNSHARD else self.gradient_bytes
        nbytes = part * float(whole_bytes[stage])
        algorithm = "ring" if halves else self.all_reduce
        seconds = self.network.all_reduce(nbytes, devices, algorithm)
        known = self.measured.get(op.name)
        if known is not None:
            least = self.network.all_reduce(0.0, devices, algorithm) if part < 1 else 0.0
            whole = float(known[stage])
            return min(whole, least) + part * max(0.0, whole - least), nbytes
        return seconds / (2 if halves else 1), nbytes

    def _exchange(
        self, graph: TaskGraph, stage: int, part: int, of: NDArray[Any]
    ) -> tuple[float, float | Floats]:
        """Return seconds, and bytes of each member, of one of a sharded stage's exchanges.

        ``of`` are the kinds of its members.
        """
        kinds = graph.kinds
        name, n = EXCHANGES[part], len(of)
        nbytes: float | Floats
        if name in (given := self.exchange_bytes.get(stage, {})):
            matrix = given[name]
            if len(matrix) != n:
                raise CostsError(
                    f"exchange_bytes of {name} of stage {stage} are of {len(matrix)} replicas, but "
                    f"the graph has {n}; give a matrix of shape ({n}, {n})"
                )
            order = np.argsort(kinds.replica[of], kind="stable")
            devices = kinds.device[of[order]]
            nbytes = np.empty(n)
            nbytes[order] = matrix.sum(axis=1)
            moved: float | Floats = matrix
        else:
            sizes = {
                "counts": _COUNT * n,
                "keys": self.key_bytes[stage],
                "accumulated": graph.n_microbatches * self.vector_bytes[stage],
            }
            devices = np.unique(kinds.device[of])
            nbytes = moved = float(sizes.get(name, self.vector_bytes[stage]))
        known = self.measured.get(name)
        if known is not None:
            return float(known[stage]), nbytes
        return self.network.all_to_all(moved, devices), nbytes

    def _buckets(self, stage: int, n: int) -> Sequence[tuple[float, float]]:
        """Return the share of the bytes, and of the backward, of each of a stage's buckets."""
        if self.buckets is None:
            return [(1 / n, (k + 1) / n) for k in range(n)]
        found = self.buckets[stage] if stage < len(self.buckets) else ()
        if len(found) != n:
            raise CostsError(
                f"buckets has {len(found)} of stage {stage}, but the graph reduces its gradients "
                f"in {n}; give (share of bytes, share of the backward) of each"
            )
        return found


def _n_buckets(graph: TaskGraph) -> NDArray[np.int64]:
    """Return how many buckets of gradients each stage has; 0 where it reduces them in one."""
    found = np.zeros(graph.n_stages, dtype=np.int64)
    of = graph.kinds.op == Op.REDUCE_GRAD
    np.maximum.at(found, graph.kinds.stage[of], graph.kinds.part[of] + 1)
    return found


def checked_buckets(buckets: object) -> Buckets | None:
    """Return buckets as tuples.

    Raises
    ------
    CostsError
        For anything but pairs of shares, the second 0 to 1, of which the first sum to at least 1.
    """
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
                "shares that sum to 1, or more where they are of measured seconds"
            )
    return stages


def with_links(
    links: NDArray[np.int64], rows: NDArray[Any], held: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ``links`` with those that some rows hold, as wide as it takes."""
    missing = held.shape[1] - links.shape[1]
    if missing > 0:
        links = np.pad(links, ((0, 0), (0, missing)), constant_values=-1)
    links[rows, : held.shape[1]] = held
    return links
