"""Add the tasks around a sharded stage: exchanges, and the sorting of keys and vectors.

Tasks of micro-batch 3 on a sharded stage 0, in order::

    0DISPATCH3                group keys by owner                       exchange_work="compute"
    0ALL_TO_ALL3.counts
    0ALL_TO_ALL3.keys         or those of micro-batch 4, before 0F3     prefetch_keys=True
    0F3                       look up
    0ALL_TO_ALL3.vectors
    0REORDER3.vectors         vectors in the order of the input         exchange_work="compute"
    ...
    0REORDER3.gradients       sum the gradients of each key             exchange_work="compute"
    0ALL_TO_ALL3.gradients                                              sparse_grad_sync="every"
    0B3
    0ALL_TO_ALL.accumulated   once, after the last backward             sparse_grad_sync="last"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count
from pipesim.graph.skips import Skip
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.lowering.issue_order import Issued
from pipesim.ops import EXCHANGES, WEIGHT_GRADS, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import CSR, Ints

SparseGradSync = Literal["every", "last"]
ExchangeWork = Literal["collective", "compute"]
_COUNTS, _KEYS, _VECTORS, _GRADIENTS, _ACCUMULATED = range(len(EXCHANGES))


class Exchanges(NamedTuple):
    """Options of the exchanges of sharded stages."""

    sharded: tuple[int, ...] = ()
    #: Whether tasks on the compute stream group keys and put vectors in order.
    dispatches: bool = False
    #: Whether the first stage exchanges keys of a micro-batch before the F of the previous one.
    prefetches: bool = False
    #: Whether one exchange at the end has the gradients of all micro-batches.
    accumulates: bool = False


def checked_exchanges(
    schedule: Schedule,
    sharded: Iterable[int] | int,
    exchange_work: ExchangeWork,
    prefetch_keys: bool,
    sparse_grad_sync: SparseGradSync,
) -> Exchanges:
    """Check the options of `pipesim.lower` for exchanges of sharded stages, and return them."""
    stages = _checked_sharded(sharded, schedule)
    needs_shards = {
        'exchange_work="compute"': exchange_work == "compute",
        'sparse_grad_sync="last"': sparse_grad_sync == "last",
    }
    for text in [text for text, is_given in needs_shards.items() if is_given and not stages]:
        raise ArgumentError(
            f"{text}, but no stage is sharded, so there are no exchanges; add sharded=, such as "
            f"sharded=[0], or leave {text.partition('=')[0]} out"
        )
    if prefetch_keys and 0 not in stages:
        raise ArgumentError(
            f"prefetch_keys=True, but stage 0 is not among sharded={list(stages)}: a later stage "
            "gets its keys from the stage before, which are not available earlier; shard stage "
            "0, or leave prefetch_keys out"
        )
    return Exchanges(stages, exchange_work == "compute", prefetch_keys, sparse_grad_sync == "last")


def _checked_sharded(sharded: Iterable[int] | int, schedule: Schedule) -> tuple[int, ...]:
    """Return the numbers of the sharded stages."""
    n_stages, n_paths, n_batches = schedule.n_stages, schedule.placement.n_paths, schedule.n_batches
    try:
        if isinstance(sharded, (str, Mapping)):
            raise TypeError
        sequence = (sharded,) if isinstance(sharded, (int, np.integer)) else sharded
        stages = tuple(itertools.islice(sequence, n_stages + 1))
    except TypeError:
        raise ArgumentError(
            f"sharded must be the numbers of stages, such as [0], got {sharded!r}"
        ) from None
    for stage in stages:
        if check_count("sharded: a stage", stage, 0) >= n_stages:
            raise ArgumentError(
                f"sharded names stage {stage}; there are {n_stages} stages, 0..{n_stages - 1}"
            )
        if stage == n_stages - 1:
            raise ArgumentError(
                f"sharded names stage {stage}, the last one, which computes the loss; its vectors "
                "have to go to a stage after it"
            )
    if len(set(stages)) < len(stages):
        raise ArgumentError(f"sharded names a stage twice: {list(stages)}; name each once")
    if stages and schedule.placement.edges:
        raise ArgumentError(
            f"sharded={list(stages)}, but the stages of schedule {schedule.name!r} have edges; "
            "sharded embeddings are simulated in a chain of stages: take a placement without edges"
        )
    if stages and n_paths > 1:
        raise ArgumentError(
            f"sharded={list(stages)}, but schedule {schedule.name!r} has {n_paths} paths, each "
            "with other micro-batches; take a schedule of one path"
        )
    if stages and n_batches > 1:
        raise ArgumentError(
            f"sharded={list(stages)}, but schedule {schedule.name!r} steps {n_batches} times while "
            "micro-batches are in flight, and shards have no versions of their weights; take a "
            "schedule of one mini-batch"
        )
    return stages


def exchange_kinds(
    own: Kinds, kinds: Kinds, stream: int, exchanges: Exchanges, borders: Sequence[Skip]
) -> tuple[CSR, CSR, Kinds]:
    """Add the kinds of exchanges; return the exchanges before and after each kind of task.

    ``own`` are the kinds of the compute tasks, the first of ``kinds``. Row ``k`` of the first CSR
    has the kinds before a task of kind ``k``, row ``k`` of the second those after it, in order.
    Exchanges of accumulated gradients are in neither: `ordered_exchanges` adds their tasks.
    Vectors are put in order when the next stage needs them, if no message takes them elsewhere;
    ``borders`` are the pairs of stages between which skips have messages.
    """
    before: list[tuple[int, int]] = []
    after: list[tuple[int, int]] = []
    added: dict[tuple[int, ...], int] = {}  # B and I of a stage share their exchanges
    homes = own.homes

    def add(side: list[tuple[int, int]], kind: int, stage: int, op: Op, part: int = -1) -> None:
        replica = int(own.replica[kind])
        code = stream if op == Op.ALL_TO_ALL else StreamKind.COMPUTE
        key = (int(homes[replica, stage]), stage, replica, int(op), code, part)
        side.append((kind, len(kinds) + added.setdefault(key, len(added))))

    for kind in range(len(own)) if exchanges.sharded else ():
        op, stage, replica = Op(own.op[kind]), int(own.stage[kind]), int(own.replica[kind])
        waits = np.diff(homes[replica]) == 0  # whether vectors of a stage wait for the next stage
        for source, target in borders:
            waits[source] &= homes[replica, source] == homes[replica, target]
        is_next = stage > 0 and stage - 1 in exchanges.sharded and waits[stage - 1]
        if op == Op.F and exchanges.dispatches and is_next and own.begins[kind]:
            add(before, kind, stage - 1, Op.REORDER, _VECTORS)
        if stage not in exchanges.sharded:
            continue
        if op == Op.F:
            if exchanges.dispatches:
                add(before, kind, stage, Op.DISPATCH)
            for part in (_COUNTS, _KEYS):
                add(before, kind, stage, Op.ALL_TO_ALL, part)
            add(after, kind, stage, Op.ALL_TO_ALL, _VECTORS)
            if exchanges.dispatches and not waits[stage]:
                add(after, kind, stage, Op.REORDER, _VECTORS)
        elif op in (Op.B, Op.I):
            if exchanges.dispatches:
                add(before, kind, stage, Op.REORDER, _GRADIENTS)
            if not exchanges.accumulates:
                add(before, kind, stage, Op.ALL_TO_ALL, _GRADIENTS)
    rows = [np.array(side, dtype=np.int64).reshape(-1, 2).T for side in (before, after)]
    if exchanges.accumulates:
        for replica, stage in np.ndindex(homes.shape):
            key = (int(homes[replica, stage]), stage, replica, Op.ALL_TO_ALL, stream, _ACCUMULATED)
            if stage in exchanges.sharded:
                added[key] = len(added)
    if added:
        device, of_stage, of_replica, ops, code, part = np.array(list(added)).T
        kinds = kinds.joined(Kinds(ops, device, of_stage, of_replica, code, part=part))
    first, second = (CSR.from_pairs(row, value, len(own)) for row, value in rows)
    return first, second, kinds


def ordered_exchanges(exchanges: Exchanges, kinds: Kinds, issued: Issued) -> Issued:
    """Return the tasks of one replica with early exchanges of keys and late ones of gradients.

    Exchanges of keys move earlier if ``exchanges.prefetches``. Exchanges of accumulated gradients
    are added after the last backward if ``exchanges.accumulates``. Each moved or added task is a
    phase of its own, so that members of all replicas are issued together.
    """
    if not (exchanges.prefetches or exchanges.accumulates):
        return issued
    kind, microbatch, phase = issued.kind, issued.microbatch, issued.phase
    if exchanges.prefetches:
        order = _prefetched(kinds, kind, microbatch)
        kind, microbatch, phase = kind[order], microbatch[order], phase[order]
    gradients = kinds.is_op(WEIGHT_GRADS)
    is_exchange = (kinds.op == Op.ALL_TO_ALL) & (kinds.part == _ACCUMULATED)
    for stage in exchanges.sharded if exchanges.accumulates else ():
        end = 1 + np.flatnonzero((gradients & (kinds.stage == stage))[kind])[-1]
        (own,) = np.flatnonzero(is_exchange & (kinds.stage == stage))
        kind, microbatch = np.insert(kind, end, own), np.insert(microbatch, end, -1)
        phase = np.insert(phase, end, -1 - stage)
    return Issued.of_phases(kind, microbatch, phase)


def _prefetched(kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]) -> Ints:
    """Return the task order in which the first stage exchanges keys one micro-batch early.

    The exchange comes before the F of the previous micro-batch: the keys of the whole batch are
    known when a step begins.
    """
    first = kinds.stage == 0
    early = first & (
        (kinds.op == Op.DISPATCH)
        | ((kinds.op == Op.ALL_TO_ALL) & np.isin(kinds.part, (_COUNTS, _KEYS)))
    )
    place = np.arange(len(kind), dtype=np.float64)
    moved = np.flatnonzero(early[kind])
    forwards = (first & (kinds.op == Op.F))[kind]
    turns = microbatch[forwards]
    ends = np.zeros(int(microbatch.max()) + 1)  # position after the keys of each micro-batch
    np.maximum.at(ends, microbatch[moved], place[moved])
    earlier = np.full_like(ends, -1)
    earlier[turns[1:]] = ends[turns[:-1]]
    goal = earlier[microbatch[moved]]
    place[moved] = np.where(goal >= 0, goal + 0.5, place[moved])
    order: Ints = np.argsort(place, kind="stable")
    return order
