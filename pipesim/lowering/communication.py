"""The kinds of messages and reductions that come with the compute tasks of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.rules import PAIRS
from pipesim.graph.skips import Skip
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.lowering.clock_cycles import Partners
from pipesim.lowering.exchanges import Exchanges, exchange_kinds
from pipesim.ops import Op
from pipesim.utils.csr import CSR, Ints

__all__ = ["Collectives", "add_partners"]


class _Messages(NamedTuple):
    """Messages of one direction, and the kinds of compute task that make and that need them.

    Message ``made[k]`` is made by kind ``makes[k]``, and likewise for ``needed`` and ``needs``. The
    other columns are of the messages, which lead from ``stage`` to stage ``to``.
    """

    makes: Ints
    made: Ints
    needs: Ints
    needed: Ints
    replica: Ints
    stage: Ints
    to: Ints
    is_skip: NDArray[np.bool_]


class Collectives(NamedTuple):
    """Which collectives there are beside the compute tasks.

    Attributes
    ----------
    buckets
        Number of REDUCE_GRADs that the gradients of each stage are reduced in; empty for none.
    groups
        After how many micro-batches each stage reduces; 0 for once a mini-batch.
    exchanges
        How sharded stages exchange, whose rows are spread over the replicas: they reduce nothing.
    unshards
        Whether replicas gather the parameters that each of them has stepped.
    """

    buckets: Sequence[int] = ()
    groups: Sequence[int] = ()
    exchanges: Exchanges = Exchanges()
    unshards: bool = False

    @property
    def sharded(self) -> tuple[int, ...]:
        """Stages whose rows are spread over the replicas."""
        return self.exchanges.sharded


def add_partners(
    compute: TaskGraph,
    overlap: bool,
    streams: str,
    collectives: Collectives,
    borders: Sequence[Skip],
) -> tuple[Kinds, Partners]:
    """Add the kinds of messages, wherever they lead to another device, and of collectives.

    ``borders`` are the pairs of stages between which skips have messages.
    """
    kinds, homes, n_kinds = compute.kinds, compute.homes, len(compute.kinds)
    ends: list[tuple[Ints, ...]] = []  # of each direction, as the next two
    out: list[tuple[Ints, Ints]] = []
    into: list[tuple[Ints, Ints]] = []
    n = 0
    for recv, (send, offset) in PAIRS.items():
        carried = frozenset({Op.F} if send == Op.SEND_F else {Op.B, Op.I})
        found = _messages(compute, carried, -offset, borders)
        replica, stage, to = found.replica, found.stage, found.to
        source, target = homes[replica, stage], homes[replica, to]
        if not overlap:
            codes = [np.full_like(stage, StreamKind.COMPUTE)] * 2
        elif streams == "single":
            codes = [np.full_like(stage, StreamKind.COPY)] * 2
        else:
            codes = [StreamKind.send(target), StreamKind.recv(source)]
        numbers = len(kinds) + np.arange(2 * len(stage), dtype=np.int32).reshape(2, -1)
        ends.append((*numbers, source * (int(homes.max()) + 1) + target))
        out.append((found.makes, n + found.made))
        into.append((found.needs, n + found.needed))
        n += len(stage)
        none = np.zeros_like(stage)
        ahead, behind = (np.where(found.is_skip, other, -1) for other in (to, stage))
        kinds = kinds.joined(
            Kinds(np.full_like(stage, send), source, stage, replica, codes[0], none, ahead),
            Kinds(np.full_like(stage, recv), target, to, replica, codes[1], none, behind),
        )
    adds_to: Ints = np.full(n_kinds, -1, dtype=np.int32)
    stream = StreamKind.COLLECTIVE if overlap else StreamKind.COMPUTE
    n_buckets = np.array(collectives.buckets, dtype=np.int64)
    reduce = np.full((len(n_buckets), n_buckets.max(initial=0), len(homes)), -1, dtype=np.int32)
    there = np.arange(reduce.shape[1]) < n_buckets[:, None]
    reduce[there] = len(kinds) + np.arange(there.sum() * len(homes)).reshape(-1, len(homes))
    if len(n_buckets):
        of = np.flatnonzero(kinds.is_op(frozenset({Op.B, Op.W})))
        of = of[~np.isin(kinds.stage[of], collectives.sharded)]
        adds_to[of] = kinds.stage[of]
        kinds = kinds.joined(_reductions(homes, stream, n_buckets))
    if collectives.unshards:
        gather = np.full_like(reduce, -1)
        gather[:, 0] = len(kinds) + np.arange(homes.size).reshape(homes.T.shape)
        reduce = np.concatenate([reduce, gather])
        of = np.flatnonzero(compute.kinds.op == Op.STEP)
        of = of[~np.isin(kinds.stage[of], collectives.sharded)]
        adds_to[of] = homes.shape[1] + kinds.stage[of]
        one = np.ones_like(n_buckets)
        kinds = kinds.joined(_reductions(homes, stream, one, Op.UNSHARD))
    before, after, kinds = exchange_kinds(compute, kinds, stream, collectives.exchanges)
    send_kind, recv_kind, channel = (np.concatenate(column) for column in zip(*ends, strict=True))
    made, needed = _rows(out, n_kinds), _rows(into, n_kinds)
    return kinds, Partners(
        send_kind, recv_kind, channel, made, needed, adds_to, reduce, before, after
    )


def _rows(parts: Sequence[tuple[Ints, Ints]], n_rows: int) -> CSR:
    """Return the values of each row, given parts of rows and values."""
    rows, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CSR.from_pairs(rows, values, n_rows)


def _messages(
    compute: TaskGraph, carried: frozenset[Op], step: int, borders: Sequence[Skip]
) -> _Messages:
    """Return the messages of what ``carried`` makes: ``step`` stages on, and those of skips."""
    kinds, homes, n_stages = compute.kinds, compute.homes, compute.n_stages
    of = np.flatnonzero(kinds.is_op(carried))
    pairs = np.array(borders, dtype=np.int64).reshape(-1, 2).T[::step]
    which, border = np.nonzero(kinds.stage[of][:, None] == pairs[0])
    makes = np.concatenate([of, of[which]])
    # Past either end of the pipeline is the stage itself, which is not away.
    to = np.concatenate([(kinds.stage[of] + step).clip(0, n_stages - 1), pairs[1][border]])
    is_skip = np.arange(len(makes)) >= len(of)
    away = homes[kinds.replica[makes], to] != kinds.device[makes]
    makes, to, is_skip = makes[away], to[away], is_skip[away]
    # B and I of a stage share the kinds of their message.
    place = kinds.replica[makes] * n_stages + kinds.stage[makes]
    key = (2 * place + is_skip) * n_stages + to
    _, first, made = np.unique(key, return_index=True, return_inverse=True)
    replica, stage = np.divmod(place[first], n_stages)
    to, is_skip = to[first], is_skip[first]
    of_place = CSR.group(kinds.replica[of] * n_stages + kinds.stage[of], homes.size)
    at = replica * n_stages + to
    needs = of[of_place.gather(at)]
    needed = np.repeat(np.arange(len(at)), np.diff(of_place.ptr)[at])
    return _Messages(makes, made, needs, needed, replica, stage, to, is_skip)


def _reductions(
    homes: Ints, stream: int, n_buckets: Ints, collective: Op = Op.REDUCE_GRAD
) -> Kinds:
    """Return the kinds that sum the gradients of each stage, bucket by bucket, over all paths."""
    shape = homes.shape[1], int(n_buckets.max()), len(homes)
    stage, bucket, replica = (x.ravel() for x in np.indices(shape))
    there = bucket < n_buckets[stage]
    stage, bucket, replica = stage[there], bucket[there], replica[there]
    op, code = np.full_like(stage, collective), np.full_like(stage, stream)
    part = np.where(n_buckets[stage] > 1, bucket, -1)
    return Kinds(op, homes[replica, stage], stage, replica, code, part=part)
