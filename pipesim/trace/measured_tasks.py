"""`MeasuredTasks`: the tasks of one measured step, from which its `Timeline` is built.

A recording has the times of calls on each device, by the device's own clock. It seldom has every
message. `timeline_of` aligns the clocks, adds the messages, and wires the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.pricing import message_bytes
from pipesim.errors import AccuracyWarning, CapacityError, PipeError, TimelineError
from pipesim.graph.compute_tasks import overlapped_halves
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.graph.verify import verify
from pipesim.ops import (
    COLLECTIVES,
    COMPUTE,
    IN_REPLICA,
    OF_DEVICES,
    OF_STAGES,
    SCHEDULED,
    TRANSFERS,
    Op,
)
from pipesim.scheduling.registry import options_of_schedules, schedule
from pipesim.timeline.timeline import Timeline, align_collectives
from pipesim.trace.clock_offsets import ClockBounds, align_clocks
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.csr import Ints
from pipesim.utils.texts import Bytes, in_bytes

#: Options that follow from the number of stages of a device, and that number over the option.
_CHUNKS = {"n_chunks": 1, "n_waves": 2}


def schedule_name(tasks: MeasuredTasks) -> str | None:
    """Return the name of the first schedule with the orders of the first replica, or None.

    Recomputes are ignored: a schedule has the same orders with and without them. Schedules whose
    orders depend on other options than the number of chunks are tried with the options' defaults.
    """
    rows = tasks.in_order(SCHEDULED)
    rows = rows[tasks.replica[rows] == 0]
    columns = (tasks.device, tasks.op, tasks.stage, tasks.microbatch, tasks.other_half >= 0)
    own = [column[rows] for column in columns]
    n_devices, n_stages, n_microbatches = (int(own[k].max()) + 1 for k in (0, 2, 3))
    if n_stages % n_devices:
        return None
    n_chunks = n_stages // n_devices
    for name, options in options_of_schedules().items():
        chosen = {x: n_chunks // _CHUNKS[x] for x in options if x in _CHUNKS and n_chunks > 1}
        try:
            named = schedule(name, n_devices, n_microbatches, **chosen)
        except PipeError:  # not of these counts
            continue
        columns = (named.device, named.op, named.stage, named.microbatch, overlapped_halves(named))
        others = [column[np.isin(named.op, sorted(SCHEDULED))] for column in columns]
        if all(map(np.array_equal, own, others)):
            return name
    return None


Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
#: Largest residual, relative to the makespan, without a warning that the clocks disagree.
_LARGE_RESIDUAL = 0.01
_BACKWARDS = (Op.B, Op.I)
#: Columns that tell a task from all others of its step.
_IDENTITY = ("replica", "stage", "microbatch", "peer_stage", "part", "op")


@dataclass(frozen=True, eq=False)
class MeasuredTasks:
    """Columns of the tasks of one step; one entry a task, as in `pipesim.graph.Tasks`.

    - ``start``, ``end``: seconds, by the clock of the task's device.
    - ``on_device``: whether a GPU recorded the times, and not the program that called it.
    - ``other_half``: the other half of an overlapped action, else -1.
    - ``nbytes``: bytes of a message; NaN if unknown.
    - ``microbatch``, ``peer_stage`` and ``part`` are -1 for none.
    """

    op: Ints
    device: Ints
    stage: Ints
    microbatch: Ints
    start: Floats
    end: Floats
    replica: Ints
    peer_stage: Ints
    part: Ints
    on_device: Flags
    other_half: Ints
    nbytes: Floats

    @classmethod
    def make(
        cls, op: Ints, device: Ints, stage: Ints, microbatch: Ints, start: Floats, end: Floats,
        **columns: NDArray[np.generic],
    ) -> MeasuredTasks:  # fmt: skip
        """Return tasks; columns that are left out have the value of a task without them."""
        n = len(op)
        others = {
            "replica": np.zeros(n, np.int64),
            "peer_stage": np.full(n, -1),
            "part": np.full(n, -1),
            "on_device": np.zeros(n, bool),
            "other_half": np.full(n, -1),
            "nbytes": np.full(n, np.nan),
        }
        return cls(op, device, stage, microbatch, start, end, **{**others, **columns})

    def __len__(self) -> int:
        return len(self.op)

    def __getitem__(self, rows: Ints | Flags) -> MeasuredTasks:
        """Return some rows; of overlapped actions, both halves or none."""
        numbers = np.full(len(self) + 1, -1)  # the last entry is for tasks without another half
        numbers[:-1][rows] = np.arange(len(self.op[rows]))
        columns = {x.name: getattr(self, x.name)[rows] for x in fields(self)}
        return replace(self, **columns | {"other_half": numbers[columns["other_half"]]})

    @property
    def place(self) -> Ints:
        """Number of the stage and replica of each task."""
        return self.replica * (int(self.stage.max()) + 1) + self.stage

    def is_op(self, ops: Collection[Op]) -> Flags:
        """Return whether each task has one of ``ops``."""
        return np.isin(self.op, sorted(ops))

    def in_order(self, ops: Collection[Op]) -> Ints:
        """Return the rows of the tasks of ``ops`` by device, then by start and end."""
        rows = np.flatnonzero(self.is_op(ops))
        return rows[np.lexsort((self.end[rows], self.start[rows], self.device[rows]))]

    def keys(self, **columns: Ints | int) -> Ints:
        """Return a number for each task that tells it from all others of its step.

        ``columns`` replace those of the tasks, to compute the keys of other tasks.
        """
        key, size = np.zeros(1, np.int64), 1
        for name in _IDENTITY:
            width = len(Op) if name == "op" else int(getattr(self, name).max(initial=0)) + 3
            size *= width
            if size >= 2**63:
                raise CapacityError(
                    "the numbers of stages, micro-batches and replicas are too large to tell tasks "
                    "apart; number them from 0, without gaps"
                )
            key = key * width + (columns.get(name, getattr(self, name)) + 1)
        return key


class MeasuredStep(NamedTuple):
    """The timeline of a measured step, and how well the clocks of its devices agree.

    ``offsets`` has the seconds that were added to each device's clock. ``residual`` has those by
    which the worst message is still used before it was sent.
    """

    timeline: Timeline
    offsets: Floats
    residual: float


class _Messages(NamedTuple):
    """Rows of the producers, the recorded ends (-1 for none) and the consumers of messages.

    ``peer`` and ``origin`` are the ``peer_stage`` of the SEND and of the RECV.
    """

    producer: Ints
    send: Ints
    recv: Ints
    consumer: Ints
    peer: Ints
    origin: Ints

    def take(self, rows: Ints | Flags) -> _Messages:
        return _Messages(*(column[rows] for column in self))


def timeline_of(
    tasks: MeasuredTasks,
    *,
    n_devices: int,
    output_bytes: Bytes | Sequence[Bytes] = 0.0,
    gaps: str = "keep",
    name: str = "",
) -> MeasuredStep:
    """Return the timeline of the tasks of a step, complete and each of them once.

    Clocks are aligned as `pipesim.trace.clock_offsets.align_clocks` says. Each message between
    devices gets a SEND and a RECV. A recorded SEND keeps its times, but begins no earlier than its
    producer ends, and ends before its message is used. Where the RECV was called later, or one call
    did several messages, only the time in which both ends took part counts. A missing SEND is
    placed at the end of its producer and takes no time.

    A recorded RECV shows when it was posted, seldom when the message arrived. Arrivals are:

    - recorded, for a GPU's own communication;
    - the start of the consumer, for a message whose device was idle when it left: the device
      waited for it. The median of these is how long a message usually takes;
    - else that long after the message left, or the start of the consumer, if that is sooner or if
      the device was idle by then.

    All members of a collective start when the last one does (rule 9 of docs/time.md).

    Parameters
    ----------
    output_bytes
        Bytes of each message of unknown size, as in `Costs`.
    gaps
        Time in which a device waited for no message: ``"keep"`` leaves it, ``"stages"`` adds it to
        the operations on whole stages beside it, ``"charge"`` also to any other task after it.
    name
        By default that of the schedule with the same orders, or "measured".

    Warns
    -----
    AccuracyWarning
        If a message is still used before it was sent, by more than 1 % of the makespan; and for
        devices whose times do not overlap, if nothing tells the offset of their clocks.
    """
    tasks = tasks[np.lexsort((tasks.end, tasks.op, tasks.end > tasks.start, tasks.start))]
    messages = _messages(tasks)  # rows, which stay while times change
    bounds = _clock_bounds(tasks, messages)
    _warn_of_unconnected(tasks, bounds, n_devices)
    offsets, residual = align_clocks(bounds, n_devices)
    shift = offsets[tasks.device]
    tasks = replace(tasks, start=tasks.start + shift, end=tasks.end + shift)
    if gaps != "keep":
        tasks = _charge_stages(tasks, messages)
    if gaps == "charge":
        tasks = _charge_gaps(tasks, messages)
    tasks, stream, issue = _with_transfers(tasks, messages)
    begin = tasks.start.min()  # of a RECV: not its call, but when its message left
    tasks = replace(tasks, start=tasks.start - begin, end=tasks.end - begin)
    moves = tasks.is_op(TRANSFERS)
    # Megatron-LM sums tied gradients before it reduces the others, the graph after that (rule 3).
    last = np.full(n_devices, -np.inf)
    reduces = tasks.op == Op.REDUCE_GRAD
    np.maximum.at(last, tasks.device[reduces], issue[reduces])
    issue = np.where(tasks.op == Op.REDUCE_TIED, np.maximum(issue, last[tasks.device]), issue)
    # A message is issued right after the task whose result it carries, and received in the order
    # of the senders. Of two tasks that start at once, the one without duration is first.
    works = ~moves & (tasks.end > tasks.start)
    order = np.lexsort((tasks.end, tasks.op, works, moves, issue))
    tasks, stream = tasks[order], stream[order]
    graph = _graph(tasks, stream, name)
    by_stage = in_bytes("output_bytes", output_bytes)
    sizes = Costs(0.0, output_bytes=by_stage).per_stage("output_bytes", graph.n_stages)
    columns = {key: getattr(graph, key).astype(np.int64) for key in _IDENTITY}
    rows = _Finder(tasks).rows(tasks.keys(**columns))  # of each task of the graph
    measured = tasks.nbytes[rows]
    is_known = graph.is_op(TRANSFERS) & ~np.isnan(measured)
    nbytes = np.where(is_known, measured, message_bytes(graph.kinds, sizes)[graph.kind])
    times = align_collectives(graph, tasks.start[rows], tasks.end[rows])
    timeline = Timeline(graph, *times, nbytes)
    if residual > _LARGE_RESIDUAL * timeline.makespan:
        warn_caller(
            f"after joining the clocks of the devices, a message is still used {residual:.2e} s "
            "before it was sent: clocks drift, or times do not cover the work; times between "
            "devices are no better than that",
            AccuracyWarning,
        )
    return MeasuredStep(timeline, offsets, residual)


def with_parts(tasks: MeasuredTasks) -> MeasuredTasks:
    """Return the tasks with the parts of operations on whole stages, in order of time.

    - Several REDUCE_GRADs of a stage are its buckets.
    - An UNSHARD gathers parameters for the next F or backward of its stage, or after its STEP.
    - All tied stages are one group.
    """
    part, microbatch = tasks.part.copy(), tasks.microbatch.copy()
    place = tasks.place
    part[tasks.op == Op.REDUCE_TIED] = 0
    own = np.flatnonzero(tasks.op == Op.REDUCE_GRAD)
    own = own[np.lexsort((tasks.start[own], place[own]))]
    _, first, count = np.unique(place[own], return_index=True, return_counts=True)
    bucket = np.arange(len(own)) - np.repeat(first, count)
    part[own] = np.where(np.repeat(count, count) > 1, bucket, -1)

    gathers = tasks.op == Op.UNSHARD
    passes = np.flatnonzero(tasks.is_op((Op.F, Op.B, Op.I)) | gathers)
    passes = passes[np.lexsort((~gathers[passes], tasks.start[passes], place[passes]))]
    position = np.where(gathers[passes], len(passes), np.arange(len(passes)))
    following = np.minimum.accumulate(position[::-1])[::-1]  # the next F or backward
    own, user = passes[gathers[passes]], np.append(passes, -1)[following[gathers[passes]]]
    own, user = (x[(user >= 0) & (place[own] == place[user])] for x in (own, user))
    part[own], microbatch[own] = tasks.op[user] != Op.F, microbatch[user]
    return replace(tasks, part=part, microbatch=microbatch)


def _graph(tasks: MeasuredTasks, stream: Ints, name: str) -> TaskGraph:
    """Return the verified graph of a step, its tasks in the order in which they were issued."""
    ops = {Op(op) for op in np.unique(tasks.op)}
    tied = tasks.stage[tasks.op == Op.REDUCE_TIED]
    try:
        graph = TaskGraph.build(
            Tasks(
                tasks.op,
                tasks.device,
                tasks.stage,
                tasks.microbatch,
                stream,
                replica=tasks.replica,
                overlapped=(tasks.other_half >= 0).astype(np.int64),
                peer_stage=tasks.peer_stage,
                part=tasks.part,
            ),
            name=name or schedule_name(tasks) or "measured",
            hosts="per_device",
            recompute="some" if Op.R in ops else "never",
            tied=[np.unique(tied).tolist()] if len(tied) else (),
            forward_only=ops.isdisjoint(_BACKWARDS),
        )
        verify(graph)
    except PipeError as error:
        raise TimelineError(f"the tasks are of no step that could run: {error}") from error
    return graph


class _Finder:
    def __init__(self, tasks: MeasuredTasks) -> None:
        self.tasks, keys = tasks, tasks.keys()
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def rows(self, keys: Ints) -> Ints:
        """Return the row of each key's task, -1 for none."""
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._order[place], -1)

    def like(self, rows: Ints, **columns: Ints | int) -> Ints:
        """Return the tasks that differ from those of ``rows`` in some columns, -1 for none."""
        own = {name: getattr(self.tasks, name)[rows] for name in _IDENTITY}
        return self.rows(self.tasks.keys(**own | columns))

    def backward(self, rows: Ints, **columns: Ints | int) -> Ints:
        """Return the B that is like tasks, or else the I, -1 for none."""
        whole, part = (self.like(rows, op=op, **columns) for op in _BACKWARDS)
        return np.where(whole >= 0, whole, part)


def _messages(tasks: MeasuredTasks) -> _Messages:
    """Return the messages between devices: outputs to the next stage, gradients back, skips."""
    finder, parts = _Finder(tasks), []
    for ops, send, recv, step in (
        ((Op.F,), Op.SEND_F, Op.RECV_F, 1),
        (_BACKWARDS, Op.SEND_B, Op.RECV_B, -1),
    ):
        rows = np.flatnonzero(tasks.is_op(ops))
        target = tasks.stage[rows] + step
        find = finder.like if ops == (Op.F,) else finder.backward
        columns: dict[str, Ints | int] = {"op": Op.F} if ops == (Op.F,) else {}
        none = np.full(len(rows), -1)
        parts.append(
            _Messages(
                rows,
                finder.like(rows, op=send),
                finder.like(rows, op=recv, stage=target),
                find(rows, stage=target, **columns),
                none,
                none,
            )
        )
        # Messages of skips, where at least one end was recorded.
        ends = np.flatnonzero(tasks.is_op((send, recv)) & (tasks.peer_stage >= 0))
        is_send = tasks.op[ends] == send
        source = np.where(is_send, tasks.stage[ends], tasks.peer_stage[ends])
        target = np.where(is_send, tasks.peer_stage[ends], tasks.stage[ends])
        columns = {**columns, "peer_stage": -1}
        skips = _Messages(
            find(ends, stage=source, **columns),
            finder.like(ends, op=send, stage=source, peer_stage=target),
            finder.like(ends, op=recv, stage=target, peer_stage=source),
            find(ends, stage=target, **columns),
            target,
            source,
        )
        _, first = np.unique(np.stack(skips[:4]), axis=1, return_index=True)
        parts.append(skips.take(first))
    messages = _Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    exists = (messages.producer >= 0) & (messages.consumer >= 0)
    messages = messages.take(exists)
    crosses = tasks.device[messages.producer] != tasks.device[messages.consumer]
    return messages.take(crosses)


def _half(tasks: MeasuredTasks, rows: Ints, *, last: bool) -> Ints:
    """Return the first or last half of the overlapped actions of tasks, or the tasks themselves."""
    other = tasks.other_half[rows]
    is_first = tasks.op[rows] == Op.F
    return np.where((other >= 0) & (is_first == last), other, rows)


def _departures(tasks: MeasuredTasks, messages: _Messages) -> tuple[Floats, Floats]:
    """Return when each message began to leave, and when it had left (s); see `timeline_of`."""
    ready = tasks.end[_half(tasks, messages.producer, last=True)]
    used = tasks.start[messages.consumer]
    send, recv = messages.send, messages.recv
    called = np.minimum(tasks.start[send], used)
    start = np.where(send >= 0, np.maximum(ready, called), ready)
    last = np.where(send >= 0, np.minimum(tasks.end[send], used), ready)
    both = (send >= 0) & (recv >= 0) & (tasks.end[recv] > start)
    moved = np.minimum(last - start, tasks.end[recv] - np.maximum(start, tasks.start[recv]))
    sent = np.where(both, start + np.maximum(0.0, moved), np.maximum(start, last))
    return start, sent


def _clock_bounds(tasks: MeasuredTasks, messages: _Messages) -> ClockBounds:
    """Return the messages and collectives that constrain the offsets between device clocks.

    No member of a collective ends before the last one starts. Messages from the F and to the B of
    an overlapped action are left out: the times at which it ended the F and started the B may be
    guessed.
    """
    producer, consumer = messages.producer, messages.consumer
    sure = _half(tasks, producer, last=True) == producer
    sure &= _half(tasks, consumer, last=False) == consumer
    producer, consumer = producer[sure], consumer[sure]
    member = np.flatnonzero(tasks.is_op(COLLECTIVES))
    _, first, group = np.unique(_calls(tasks)[member], return_index=True, return_inverse=True)
    first = member[first[group]]
    pairs = [(producer, consumer), (first, member), (member, first)]
    source, target = (np.concatenate(x) for x in zip(*pairs, strict=True))
    n = len(producer)
    sent = np.concatenate([tasks.end[source[:n]], tasks.start[source[n:]]])
    used = np.concatenate([tasks.start[target[:n]], tasks.end[target[n:]]])
    return ClockBounds(tasks.device[source], tasks.device[target], sent, used)


def _calls(tasks: MeasuredTasks) -> Ints:
    """Return a number for each task that the members of one collective (rule 9) share, or STEPs."""
    return tasks.keys(
        replica=np.where(tasks.is_op(OF_STAGES - IN_REPLICA), -1, tasks.replica),
        stage=np.where(tasks.is_op(OF_DEVICES | {Op.STEP}), -1, tasks.stage),
    )


def _warn_of_unconnected(tasks: MeasuredTasks, bounds: ClockBounds, n_devices: int) -> None:
    """Warn of devices whose times do not overlap, if nothing tells the offset of their clocks."""
    group = np.arange(n_devices)
    while True:  # each device gets the lowest number of its neighbours, until nothing changes
        lowest = group.copy()
        np.minimum.at(lowest, bounds.source, group[bounds.target])
        np.minimum.at(lowest, bounds.target, group[bounds.source])
        if np.array_equal(lowest, group):
            break
        group = lowest[lowest]
    start, end = np.full(n_devices, np.inf), np.full(n_devices, -np.inf)
    np.minimum.at(start, group[tasks.device], tasks.start)
    np.maximum.at(end, group[tasks.device], tasks.end)
    order = np.argsort(start[np.unique(group)])
    first = np.unique(group)[order]
    apart = np.flatnonzero(start[first[1:]] > np.maximum.accumulate(end[first])[:-1])
    for k in apart[:1].tolist():
        warn_caller(
            f"devices {first[k]} and {first[k + 1]} have no messages or collectives in common, and "
            f"their times are {start[first[k + 1]] - end[first[k]]:.6g} s apart: the offset of "
            "their clocks is unknown, and the makespan counts that time; read each replica alone",
            AccuracyWarning,
        )


def _previous_ends(tasks: MeasuredTasks) -> Floats:
    """Return, for each compute task, the end of the task before it on its device (s), or -inf."""
    previous = np.full(len(tasks), -np.inf)
    rows = tasks.in_order(COMPUTE)
    same = tasks.device[rows[1:]] == tasks.device[rows[:-1]]
    previous[rows[1:][same]] = tasks.end[rows[:-1][same]]
    return previous


def _consumers(tasks: MeasuredTasks, messages: _Messages, sent: Floats) -> Ints:
    """Return the tasks that used messages.

    An overlapped action used a message from its start, if it had left by then.
    """
    first = _half(tasks, messages.consumer, last=False)
    return np.where(sent <= tasks.start[first], first, messages.consumer)


def _last_sent(tasks: MeasuredTasks, messages: _Messages) -> Floats:
    """Return when the last message to each task had left (s), -inf without messages."""
    last_sent = np.full(len(tasks), -np.inf)
    _, sent = _departures(tasks, messages)
    np.maximum.at(last_sent, _consumers(tasks, messages, sent), sent)
    return last_sent


def _charge_stages(tasks: MeasuredTasks, messages: _Messages) -> MeasuredTasks:
    """Add the time beside operations on whole stages to them, unless a device waited for a message.

    Before such an operation, a device copies gradients or prepares the call. Of a collective and
    of all STEPs, the shortest such time of a member counts: another member may wait for what was
    not recorded. After an UNSHARD, a device loads data. The first operation of a device begins with
    the step.
    """
    start, end = tasks.start.copy(), tasks.end.copy()
    rows = tasks.in_order(set(Op) - TRANSFERS)
    first = np.diff(tasks.device[rows], prepend=-1) > 0
    latest = latest_ends(tasks.device[rows], end[rows])
    before = np.where(first, start.min(), np.roll(latest, 1))
    whole = tasks.is_op(OF_STAGES)[rows]
    gap = np.maximum(0.0, start[rows] - before)[whole]
    _, group = np.unique(_calls(tasks)[rows[whole]], return_inverse=True)
    shortest = np.full(len(gap), np.inf)
    np.minimum.at(shortest, group, gap)
    start[rows[whole]] -= shortest[group]
    follows = np.flatnonzero(~first & ~whole & np.roll(whole, 1))
    own, task = rows[follows - 1], rows[follows]
    idle = (end[own] == before[follows]) & (_last_sent(tasks, messages)[task] <= end[own])
    end[own[idle]] = np.maximum(end[own], tasks.start[task])[idle]
    return replace(tasks, start=start, end=end)


def _charge_gaps(tasks: MeasuredTasks, messages: _Messages) -> MeasuredTasks:
    """Start tasks where the task before them on their device ended, unless they waited.

    A task waited if a message to it left after that end. Otherwise the device was busy between the
    two: it posted and fetched messages, or ran the program between them.
    """
    previous, last_sent = _previous_ends(tasks), _last_sent(tasks, messages)
    charged = ~tasks.is_op(OF_STAGES) & np.isfinite(previous) & (last_sent <= previous)
    return replace(tasks, start=np.where(charged, np.minimum(tasks.start, previous), tasks.start))


def _with_transfers(
    tasks: MeasuredTasks, messages: _Messages
) -> tuple[MeasuredTasks, Ints, Floats]:
    """Return the tasks with a SEND and a RECV for each message; their streams and issue times."""
    previous = _previous_ends(tasks)
    start, sent = _departures(tasks, messages)
    order = np.argsort(start, kind="stable")
    messages, start, sent = messages.take(order), start[order], sent[order]
    producer, send, recv = messages.producer, messages.send, messages.recv
    consumer = _consumers(tasks, messages, sent)
    used, idle_since = tasks.start[consumer], previous[consumer]
    waited = (sent >= idle_since) & (used > idle_since)
    usual = max(0.0, float(np.median((used - sent)[waited]))) if waited.any() else 0.0

    source, target = tasks.device[producer], tasks.device[consumer]
    channel = source * (int(tasks.device.max()) + 1) + target
    left, ends = _one_by_one(channel, start, np.maximum(start, sent))
    arrival = np.where(ends + usual >= idle_since, used, ends + usual)
    recorded = (recv >= 0) & tasks.on_device[recv]
    arrival = np.where(recorded, tasks.end[recv], arrival)
    arrival = np.minimum(np.maximum(arrival, left), used)
    posted = np.where(recv >= 0, np.maximum(left, tasks.start[recv]), left)
    posted, arrival = _one_by_one(channel, np.minimum(posted, arrival), arrival)

    rest = ~tasks.is_op(TRANSFERS)
    forward = tasks.op[producer] == Op.F
    sends = MeasuredTasks.make(
        np.where(forward, Op.SEND_F, Op.SEND_B),
        source,
        tasks.stage[producer],
        tasks.microbatch[producer],
        left,
        ends,
        replica=tasks.replica[producer],
        peer_stage=messages.peer,
        nbytes=np.where(send >= 0, tasks.nbytes[send], tasks.nbytes[recv] * (recv >= 0)),
    )
    recvs = replace(
        sends,
        op=np.where(forward, Op.RECV_F, Op.RECV_B),
        device=target,
        stage=tasks.stage[messages.consumer],
        start=posted,
        end=arrival,
        peer_stage=messages.origin,
    )
    kept = tasks[rest]
    every = MeasuredTasks(
        *(
            np.concatenate([getattr(x, column.name) for x in (kept, sends, recvs)])
            for column in fields(kept)
        )
    )
    moved = kept.is_op(COLLECTIVES - {Op.GRAD_NORM})  # which is on the compute stream
    gathers = (kept.op == Op.UNSHARD) & (kept.part >= 0)
    stream = np.select(
        [gathers, moved], [StreamKind.UNSHARD, StreamKind.COLLECTIVE], StreamKind.COMPUTE
    )
    streams = np.concatenate([stream, StreamKind.send(target), StreamKind.recv(source)])
    return every, streams, np.concatenate([kept.start, left, left])


def _one_by_one(channel: Ints, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return times of messages in order, each no earlier than the end of that before it.

    ``channel`` is the stream of each message, ``end`` no earlier than ``start``.
    """
    order = np.argsort(channel, kind="stable")
    latest = latest_ends(channel[order], end[order])
    previous = np.roll(latest, 1)
    previous[np.flatnonzero(np.diff(channel[order], prepend=-1))] = -np.inf
    starts, ends = np.empty_like(start), np.empty_like(end)
    starts[order], ends[order] = np.maximum(start[order], previous), latest
    return starts, ends


def latest_ends(device: Ints, end: Floats) -> Floats:
    """Return the latest end of each task and those before it on its device; by device."""
    if not len(end):
        return end
    _, number = np.unique(device, return_inverse=True)
    ranked = np.argsort(end, kind="stable")
    rank = np.empty_like(ranked)
    rank[ranked] = np.arange(len(rank))
    # The greatest rank so far of each device: later devices have greater numbers.
    latest: Floats = end[ranked[np.maximum.accumulate(number * len(rank) + rank) % len(rank)]]
    return latest
