"""Add the kinds of messages and collectives to the compute tasks of a graph, and order messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.options import GradSyncs
from pipesim.graph.rules import PAIRS
from pipesim.graph.skips import Skip
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.lowering.exchanges import Exchanges, exchange_kinds
from pipesim.lowering.expert_segments import expert_exchange_kinds
from pipesim.lowering.issue_order import Partners
from pipesim.ops import INPUT_GRADS, RECVS, TRANSFERS, WEIGHT_GRADS, Op
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.scheduling.placement import Edges, neighbors
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.host_memory import check_memory


class _Messages(NamedTuple):
    """Messages of one direction, and the kinds of compute task that produce or need them."""

    #: Kind ``producer[k]`` produces message ``produced[k]``.
    producer: Ints
    produced: Ints
    #: Kind ``consumer[k]`` needs message ``consumed[k]``.
    consumer: Ints
    consumed: Ints
    #: Replica, source stage and target stage of each message, and whether it is of skips.
    replica: Ints
    stage: Ints
    to: Ints
    is_skip: NDArray[np.bool_]


class Collectives(NamedTuple):
    """The collectives of a graph."""

    grad_sync: GradSyncs
    #: Number of REDUCE_GRADs in which each stage reduces its gradients, 0 for one copy alone; empty
    #: for no reductions.
    buckets: tuple[int, ...]
    #: Number of micro-batches after which each stage reduces; 0 for once a mini-batch.
    groups: tuple[int, ...]
    #: Exchanges of sharded stages, which reduce no gradients.
    exchanges: Exchanges
    #: Whether replicas gather the parameters of each stage, each of them stepped by one; or empty.
    unshards: tuple[bool, ...]


@lru_cache(maxsize=32)
def add_partners(
    compute: Kinds,
    sends_beside: bool,
    overlap: bool,
    streams: str,
    collectives: Collectives,
    borders: tuple[Skip, ...],
    edges: Edges = (),
) -> tuple[Kinds, Partners]:
    """Add the kinds of collectives, and those of messages between stages on different devices.

    Messages with ``sends_beside``, and collectives with ``overlap``, run beside compute.
    The kinds of ``compute`` come first. ``borders`` are the pairs of stages between which skips
    have messages, ``edges`` those of `pipesim.Placement`.
    """
    kinds, messages = _add_messages(compute, sends_beside, streams, borders, edges)
    stream = StreamKind.COLLECTIVE if overlap else StreamKind.COMPUTE
    kinds, adds_to, reduce = _add_reductions(compute, kinds, stream, collectives)
    before, after, kinds = exchange_kinds(compute, kinds, stream, collectives.exchanges, borders)
    after, kinds = expert_exchange_kinds(compute, kinds, after, overlap)
    return kinds, Partners(*messages, adds_to, reduce, before, after)


def _add_messages(
    compute: Kinds, overlap: bool, streams: str, borders: Sequence[Skip], edges: Edges
) -> tuple[Kinds, tuple[Ints, Ints, Ints, CSR, CSR]]:
    """Add the kinds of messages; return also the first five columns of `Partners`."""
    kinds, homes, n_kinds = compute, compute.homes, len(compute)
    ends: list[tuple[Ints, ...]] = []  # columns SEND, RECV and channel of each direction
    out: list[tuple[Ints, Ints]] = []
    into: list[tuple[Ints, Ints]] = []
    n, tables = 0, list[Kinds]()
    for recv, (send, offset) in PAIRS.items():
        producers = frozenset({Op.F}) if send == Op.SEND_F else INPUT_GRADS
        messages = _messages(compute, producers, -offset, borders, edges)
        replica, stage, to = messages.replica, messages.stage, messages.to
        source, target = homes[replica, stage], homes[replica, to]
        if not overlap:
            codes = [np.full_like(stage, StreamKind.COMPUTE)] * 2
        elif streams == "single":
            codes = [np.full_like(stage, StreamKind.COPY)] * 2
        else:
            codes = [StreamKind.send(target), StreamKind.recv(source)]
        numbers = n_kinds + 2 * n + np.arange(2 * len(stage), dtype=np.int32).reshape(2, -1)
        ends.append((*numbers, source * (int(homes.max()) + 1) + target))
        out.append((messages.producer, n + messages.produced))
        into.append((messages.consumer, n + messages.consumed))
        n += len(stage)
        none = np.zeros_like(stage)
        send_peer, recv_peer = (np.where(messages.is_skip, peer, -1) for peer in (to, stage))
        tables += [
            Kinds(np.full_like(stage, send), source, stage, replica, codes[0], none, send_peer),
            Kinds(np.full_like(stage, recv), target, to, replica, codes[1], none, recv_peer),
        ]
    send_kind, recv_kind, pairs = (np.concatenate(column) for column in zip(*ends, strict=True))
    channel = np.unique(pairs, return_inverse=True)[1]
    kinds = kinds.joined(*tables)
    return kinds, (send_kind, recv_kind, channel, _rows(out, n_kinds), _rows(into, n_kinds))


def _rows(parts: Sequence[tuple[Ints, Ints]], n_rows: int) -> CSR:
    """Return the values of each row as CSR, from parts of rows and values."""
    rows, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CSR.from_pairs(rows, values, n_rows)


def _messages(
    kinds: Kinds, producers: frozenset[Op], step: int, borders: Sequence[Skip], edges: Edges
) -> _Messages:
    """Return messages of the ``producers`` to the stage at offset ``step``, and those of skips."""
    homes, n_stages = kinds.homes, kinds.homes.shape[1]
    own = np.flatnonzero(kinds.is_op(producers) & kinds.completes)
    users = np.flatnonzero(kinds.is_op(producers) & kinds.begins)
    pairs = np.array(borders, dtype=np.int64).reshape(-1, 2).T[::step]
    which, border = np.nonzero(kinds.stage[own][:, None] == pairs[0])
    producer = np.concatenate([own, own[which]])
    # At either end of a chain, the target is the stage itself, which needs no message.
    to = np.concatenate([neighbors(edges, n_stages, step)[kinds.stage[own]], pairs[1][border]])
    is_skip = np.arange(len(producer)) >= len(own)
    is_remote = homes[kinds.replica[producer], to] != kinds.device[producer]
    producer, to, is_skip = producer[is_remote], to[is_remote], is_skip[is_remote]
    # B and I of a stage share the kinds of their message.
    cell = kinds.replica[producer] * n_stages + kinds.stage[producer]
    key = (2 * cell + is_skip) * n_stages + to
    _, first, produced = np.unique(key, return_index=True, return_inverse=True)
    replica, stage = np.divmod(cell[first], n_stages)
    to, is_skip = to[first], is_skip[first]
    kinds_of_cell = CSR.group(kinds.replica[users] * n_stages + kinds.stage[users], homes.size)
    target = replica * n_stages + to
    consumer = users[kinds_of_cell.gather(target)]
    consumed = np.repeat(np.arange(len(target)), np.diff(kinds_of_cell.ptr)[target])
    return _Messages(producer, produced, consumer, consumed, replica, stage, to, is_skip)


def _add_reductions(
    compute: Kinds, kinds: Kinds, stream: int, collectives: Collectives
) -> tuple[Kinds, Ints, Ints]:
    """Add the kinds of reductions and gathers; return also ``adds_to`` and ``reduce``."""
    homes = compute.homes
    adds_to: Ints = np.full(len(compute), -1, dtype=np.int32)
    n_buckets = np.array(collectives.buckets, dtype=np.int64)
    reduce = np.full((len(n_buckets), n_buckets.max(initial=0), len(homes)), -1, dtype=np.int32)
    is_bucket = (np.arange(reduce.shape[1]) < n_buckets[:, None])[..., None]
    is_member = is_bucket & compute.holds.T[:, None][: len(n_buckets)]
    reduce[is_member] = len(kinds) + np.arange(is_member.sum())
    is_dense = ~np.isin(compute.stage, collectives.exchanges.sharded)
    if len(n_buckets):
        gradients = compute.is_op(WEIGHT_GRADS) & compute.completes
        last = np.flatnonzero(gradients & is_dense)
        adds_to[last] = compute.stage[last]
        kinds = kinds.joined(_reduction_kinds(homes, is_member, stream))
    if collectives.unshards:
        gather, is_member = np.full_like(reduce, -1), np.zeros(reduce.shape, dtype=bool)
        is_member[:, 0] = compute.holds.T & np.array(collectives.unshards)[:, None]
        gather[is_member] = len(kinds) + np.arange(is_member.sum())
        reduce = np.concatenate([reduce, gather])
        steps = np.flatnonzero((compute.op == Op.STEP) & is_dense)
        adds_to[steps] = homes.shape[1] + compute.stage[steps]
        kinds = kinds.joined(_reduction_kinds(homes, is_member, stream, Op.UNSHARD))
    return kinds, adds_to, reduce


def _reduction_kinds(
    homes: Ints, is_member: NDArray[np.bool_], stream: int, collective: Op = Op.REDUCE_GRAD
) -> Kinds:
    """Return the kinds that sum the gradients of each stage, bucket by bucket, over all paths.

    ``is_member`` marks those of each stage, bucket and path.
    """
    stage, bucket, replica = np.nonzero(is_member)
    op, code = np.full_like(stage, collective), np.full_like(stage, stream)
    part = np.where(is_member.any(axis=2).sum(axis=1)[stage] > 1, bucket, -1)
    return Kinds(op, homes[replica, stage], stage, replica, code, part=part)


def gradients_first(kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]) -> Ints:
    """Return the order in which each RECV_B comes before the R of its stage and micro-batch.

    Messages of a channel keep their order: those before the RECV_B move with it.
    """
    op, stage, replica = kinds.op[kind], kinds.stage[kind], kinds.replica[kind]
    place = np.arange(len(kind), dtype=np.float64)
    cell = (replica, stage, np.maximum(microbatch, 0))
    recompute = np.full([int(column.max(initial=0)) + 1 for column in cell], np.inf)
    of_r = np.flatnonzero(op == Op.R)
    recompute[tuple(column[of_r] for column in cell)] = place[of_r] - 0.5
    received = np.flatnonzero(op == Op.RECV_B)
    before = recompute[tuple(column[received] for column in cell)]
    place[received] = np.minimum(place[received], before)
    received = np.flatnonzero(kinds.is_op(RECVS)[kind])
    channel = _channels(kinds)[kind[received]]
    for number in np.unique(channel):
        own = received[channel == number]
        place[own] = np.minimum.accumulate(place[own][::-1])[::-1]
    order: Ints = np.argsort(place, kind="stable")
    return order


def _channels(kinds: Kinds) -> Ints:
    """Return the number of the pair of devices of each kind of RECV; -1 for other kinds."""
    channels = np.full(len(kinds), -1, dtype=np.int64)
    for recv, (_, offset) in PAIRS.items():
        own = np.flatnonzero(kinds.op == recv)
        peer = kinds.peer_stage[own]
        peer = np.where(peer < 0, kinds.stage[own] + offset, peer)
        source = kinds.homes[kinds.replica[own], peer]
        channels[own] = source * (int(kinds.device.max()) + 1) + kinds.device[own]
    return channels


#: A kind and its costs, and a stream with its queue, by measurement.
_BYTES_PER_STREAM = 1000


def with_streams_of_microbatches(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> tuple[Kinds, NDArray[np.int32]]:
    """Split the copy stream of each peer and direction into one stream for each micro-batch.

    torchgpipe copies each micro-batch on its own stream (arXiv 2004.09910, section 3.2.2), so that
    a message waits for no message of another micro-batch::

        per_peer             per_microbatch
        send:1   |a0|a1|a2|  send:1/0  |a0|
                             send:1/1  |a1|
                             send:1/2  |a2|
    """
    is_message = kinds.is_op(TRANSFERS)
    others = np.flatnonzero(~is_message)
    number = np.full(len(kinds), -1, dtype=np.int32)
    number[others] = np.arange(len(others))
    messages = np.flatnonzero(is_message[kind])
    check_memory(
        f'streams="per_microbatch" with {len(messages):,} messages',
        _BYTES_PER_STREAM * len(messages),
        FEWER_TASKS,
    )
    width = int(microbatch.max(initial=0)) + 1
    cells, position = np.unique(
        kind[messages].astype(np.int64) * width + microbatch[messages], return_inverse=True
    )
    kind_of_cell, own = np.divmod(cells, width)
    columns = {column.name: getattr(kinds, column.name) for column in fields(kinds)}
    added = {name: column[kind_of_cell] for name, column in columns.items()}
    added["stream"] = StreamKind.of_microbatch(added["stream"], own)
    new = number[kind]
    new[messages] = len(others) + position
    return Kinds(**{name: np.r_[columns[name][others], added[name]] for name in columns}), new
