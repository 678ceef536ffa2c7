"""`TaskGraph`: every task of a step as columns, and the only copy of the dependency rules.

A graph is arrays: one entry a task in each column, dependencies and stream queues as CSR (the
entries of row ``i`` are ``values[ptr[i]:ptr[i + 1]]``). Task ids are the issue order, and it is
topological: whatever a task waits for has a smaller id. `Task` objects are views, made on demand.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count
from pipesim.ops import RECVS, SENDS, Action, Op

__all__ = ["CSR", "RULES", "Rule", "Task", "TaskGraph", "Tasks"]

Ints = NDArray[np.int64]


class Rule(NamedTuple):
    """Tasks of ``ops`` need the task of ``needs``, ``stage`` stages on, of their micro-batch.

    Of several ``needs`` those count that exist. Where a message ``through`` exists, the task
    needs that instead, and the message's sender needs what is sent.
    """

    ops: tuple[Op, ...]
    needs: tuple[Op, ...]
    stage: int = 0
    through: Op | None = None


#: Rule 3 of docs/time.md. ``STEP`` needs all of its stage's; see `_edges`.
RULES = (
    Rule((Op.F,), (Op.F,), -1, Op.RECV_F),
    Rule((Op.B, Op.I), (Op.B, Op.I), +1, Op.RECV_B),
    Rule((Op.B, Op.I, Op.R), (Op.F,)),
    Rule((Op.B, Op.I), (Op.R,)),
    Rule((Op.W,), (Op.I,)),
    Rule((Op.SEND_F,), (Op.F,)),
    Rule((Op.SEND_B,), (Op.B, Op.I)),
)
_STEP_NEEDS = (Op.B, Op.W)
#: The message that a RECV receives: ``(SEND, stage offset of its sender)``.
PAIRS = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, +1)}


@dataclass(frozen=True)
class CSR:
    """Compressed rows: row ``i`` is ``values[ptr[i]:ptr[i + 1]]``."""

    ptr: Ints
    values: Ints

    @classmethod
    def from_pairs(cls, rows: Ints, values: Ints, n_rows: int) -> CSR:
        """Group ``values`` by ``rows``, keeping their order within a row."""
        order = np.argsort(rows, kind="stable")
        ptr = np.zeros(n_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=n_rows), out=ptr[1:])
        return cls(ptr, values[order].astype(np.int64))

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.ptr[row] : self.ptr[row + 1]]

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def rows(self) -> Ints:
        """Row of each value."""
        rows: Ints = np.repeat(np.arange(len(self)), np.diff(self.ptr))
        return rows

    def transposed(self) -> CSR:
        """Exchange rows and values (square: as many rows as different values)."""
        return CSR.from_pairs(self.values, self.rows, len(self))

    def of(self, rows: Ints) -> Ints:
        """Return the values of all ``rows``, one after the other."""
        counts = self.ptr[rows + 1] - self.ptr[rows]
        first = np.repeat(self.ptr[rows] - np.cumsum(counts) + counts, counts)
        found: Ints = self.values[first + np.arange(counts.sum())]
        return found


class StreamKind:
    """Codes of the ``stream`` column of `Tasks`: which of its device's streams a task is on."""

    COMPUTE = 0
    COPY = -1

    @staticmethod
    def send(peer: Ints) -> Ints:
        """Return the code of the copy stream to ``peer``."""
        return 2 * peer + 1

    @staticmethod
    def recv(peer: Ints) -> Ints:
        """Return the code of the copy stream from ``peer``."""
        return 2 * peer + 2

    @staticmethod
    def name(code: int) -> str:
        """Return ``compute``, ``copy``, ``send:3`` or ``recv:3``."""
        if code <= 0:
            return "copy" if code else "compute"
        return f"send:{code // 2}" if code % 2 else f"recv:{code // 2 - 1}"

    @staticmethod
    def code(name: str) -> int:
        """Return the code that `name` prints as ``name``."""
        kind, _, peer = name.partition(":")
        if peer:
            return 2 * int(peer) + {"send": 1, "recv": 2}[kind]
        return {"compute": StreamKind.COMPUTE, "copy": StreamKind.COPY}[kind]


@dataclass(frozen=True)
class Tasks:
    """Columns of tasks before they are wired into a graph; what lowering passes turn into more.

    Attributes
    ----------
    op, device, stage
        Operation, and where it runs.
    microbatch
        -1 for operations on a whole stage.
    stream
        A `StreamKind` code.
    """

    op: Ints
    device: Ints
    stage: Ints
    microbatch: Ints
    stream: Ints

    def __len__(self) -> int:
        return len(self.op)

    def take(self, index: NDArray[Any]) -> Tasks:
        """Return the tasks at ``index``, in that order."""
        return Tasks(*(column[index] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        """Return op, device, stage, microbatch and stream."""
        return self.op, self.device, self.stage, self.microbatch, self.stream

    @staticmethod
    def joined(*parts: Tasks) -> Tasks:
        """Concatenate."""
        columns = zip(*(part.columns() for part in parts), strict=True)
        return Tasks(*(np.concatenate(column) for column in columns))


class Task(NamedTuple):
    """A view of one task; ``str`` gives its action's text form."""

    id: int
    op: Op
    device: int
    stream: str
    stage: int
    microbatch: int | None

    @property
    def action(self) -> Action:
        """The task's action, without its place."""
        return Action(self.stage, self.op, self.microbatch)

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, eq=False, repr=False)
class TaskGraph:
    """All tasks of a step, what each needs, and the order of each stream.

    Made by `pipesim.lower`, or from your own columns by `build`.

    Attributes
    ----------
    name
        What tables and plots call it.
    n_devices, n_stages, n_microbatches
        Counts.
    op, device, stage, microbatch
        One entry a task; ``microbatch`` is -1 for operations on a whole stage.
    stream
        Index into ``streams``, whose entries are ``(device, name)``.
    dependencies
        CSR: the tasks whose end a task needs (rule 3).
    queues
        CSR: the tasks of each stream, in the order in which it runs them (rule 1).
    pair
        The SEND of a RECV and the RECV of a SEND, else -1 (rule 4).
    group
        Members of one collective share a number; -1 otherwise (rule 9).
    host
        Which host issues a device's tasks; shape ``(n_devices,)`` (rule 7).
    rendezvous
        Whether a SEND waits until its RECV is reached (rule 6).
    recompute, overlap
        What the graph was lowered with; labels only.
    """

    name: str
    n_devices: int
    n_stages: int
    n_microbatches: int
    op: NDArray[np.int8]
    device: NDArray[np.int32]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    stream: NDArray[np.int32]
    streams: tuple[tuple[int, str], ...]
    dependencies: CSR
    queues: CSR
    pair: Ints
    group: Ints
    host: Ints
    rendezvous: bool = False
    recompute: str = "never"
    overlap: bool = True

    @classmethod
    def build(
        cls,
        tasks: Tasks,
        *,
        name: str = "custom",
        group: Ints | None = None,
        hosts: Literal["one", "per_device"] = "one",
        rendezvous: bool = False,
        recompute: str = "never",
        overlap: bool = True,
    ) -> TaskGraph:
        """Wire tasks, given in issue order, into a graph whose streams run them in that order.

        Where the order is not topological it is changed as little as needed, unless tasks wait
        for each other in a circle, which `pipesim.verify` reports.
        """
        options: dict[str, Any] = {
            "name": name,
            "hosts": hosts,
            "rendezvous": rendezvous,
            "recompute": recompute,
            "overlap": overlap,
        }
        graph = cls.wire(tasks, group=group, **options)
        waits = graph.precedence
        if (waits.values < waits.rows).all():
            return graph
        order = _stable_topological_order(waits)
        if len(order) < len(tasks):
            return graph
        group = None if group is None else group[order]
        return cls.wire(tasks.take(order), group=group, **options)

    @classmethod
    def wire(
        cls,
        tasks: Tasks,
        *,
        name: str = "custom",
        group: Ints | None = None,
        hosts: str = "one",
        rendezvous: bool = False,
        recompute: str = "never",
        overlap: bool = True,
    ) -> TaskGraph:
        """Do what `build` does, but keep the ids as they are given, topological or not."""
        n_devices = int(tasks.device.max(initial=0)) + 1
        n_codes = 2 * n_devices + 2
        unique, stream = np.unique(tasks.device * n_codes + tasks.stream + 1, return_inverse=True)
        return cls(
            name=name,
            n_devices=n_devices,
            n_stages=int(tasks.stage.max(initial=0)) + 1,
            n_microbatches=int(tasks.microbatch.max(initial=0)) + 1,
            op=tasks.op.astype(np.int8),
            device=tasks.device.astype(np.int32),
            stage=tasks.stage.astype(np.int32),
            microbatch=tasks.microbatch.astype(np.int32),
            stream=stream.astype(np.int32),
            streams=tuple(
                (key // n_codes, StreamKind.name(key % n_codes - 1)) for key in unique.tolist()
            ),
            dependencies=_dependencies(tasks),
            queues=CSR.from_pairs(stream.astype(np.int64), np.arange(len(tasks)), len(unique)),
            pair=_pairs(tasks),
            group=np.full(len(tasks), -1, dtype=np.int64) if group is None else group,
            host=np.zeros(n_devices, np.int64) if hosts == "one" else np.arange(n_devices),
            rendezvous=rendezvous,
            recompute=recompute,
            overlap=overlap,
        )

    def __len__(self) -> int:
        return len(self.op)

    def __repr__(self) -> str:
        return (
            f"<TaskGraph {self.name}: {len(self)} tasks, {self.n_devices} devices, "
            f"{self.n_stages} stages, {self.n_microbatches} micro-batches, "
            f"recompute={self.recompute}>"
        )

    def _repr_html_(self) -> str:
        from pipesim.plot import graph_html

        return graph_html(self)

    def task(self, index: int) -> Task:
        """Return a view of task ``index``.

        Raises
        ------
        ArgumentError
            If there is no such task.
        """
        index = check_count("task id", index, minimum=0)
        if index >= len(self):
            raise ArgumentError(f"there is no task {index} in a graph of {len(self)} tasks")
        microbatch = int(self.microbatch[index])
        return Task(
            index,
            Op(self.op[index]),
            int(self.device[index]),
            self.streams[self.stream[index]][1],
            int(self.stage[index]),
            None if microbatch < 0 else microbatch,
        )

    def with_name(self, name: str) -> TaskGraph:
        """Return the same graph under another name."""
        return replace(self, name=name)

    def is_op(self, ops: frozenset[Op]) -> NDArray[np.bool_]:
        """Mark the tasks whose operation is one of ``ops``."""
        return np.isin(self.op, sorted(ops))

    @cached_property
    def on_compute(self) -> NDArray[np.bool_]:
        """Mark the tasks that occupy their device's compute stream."""
        compute = [name == "compute" for _, name in self.streams]
        return np.array(compute, dtype=bool)[self.stream]

    @cached_property
    def queue_predecessor(self) -> Ints:
        """The task before each on its stream, or -1."""
        before = np.full(len(self), -1, dtype=np.int64)
        follows = np.ones(len(self), dtype=bool)
        follows[self.queues.ptr[:-1]] = False
        position = np.flatnonzero(follows)
        before[self.queues.values[position]] = self.queues.values[position - 1]
        return before

    @cached_property
    def device_of_stage(self) -> Ints:
        """Device that holds each stage; shape ``(n_stages,)``."""
        device = np.zeros(self.n_stages, dtype=np.int64)
        device[self.stage] = self.device
        return device

    @cached_property
    def precedence(self) -> CSR:
        """Everything that must have begun or ended before a task can start, as CSR.

        Dependencies and the stream's predecessor; for a RECV its SEND; with rendezvous, for a
        SEND what its RECV waits for; for a collective what its other members wait for.
        """
        before = self.queue_predecessor
        queued = np.flatnonzero(before >= 0)
        rows, values = [self.dependencies.rows, queued], [self.dependencies.values, before[queued]]
        recvs = np.flatnonzero(self.is_op(RECVS) & (self.pair >= 0))
        rows.append(recvs)
        values.append(self.pair[recvs])
        if self.rendezvous:
            sends = np.flatnonzero(self.is_op(SENDS) & (self.pair >= 0))
            sends = sends[before[self.pair[sends]] >= 0]
            rows.append(sends)
            values.append(before[self.pair[sends]])
        if (self.group >= 0).any():
            own = CSR.from_pairs(np.concatenate(rows), np.concatenate(values), len(self))
            for number in np.unique(self.group[self.group >= 0]):
                members = np.flatnonzero(self.group == number)
                needed = own.of(members)
                rows.append(np.repeat(members, len(needed)))
                values.append(np.tile(needed, len(members)))
        return CSR.from_pairs(np.concatenate(rows), np.concatenate(values), len(self))

    @cached_property
    def levels(self) -> Ints:
        """Distance of each task from the first, in tasks; -1 for those that can never start."""
        return _levels(self.precedence)


def _index(tasks: Tasks, op: Op, n_stages: int, n_microbatches: int) -> Ints:
    """Return the id of ``op`` of each ``(stage, microbatch)``, or -1; stages have a border of 1."""
    index = np.full((n_stages + 2, n_microbatches), -1, dtype=np.int64)
    ids = np.flatnonzero(tasks.op == op)
    index[tasks.stage[ids] + 1, tasks.microbatch[ids]] = ids
    return index


def _dependencies(tasks: Tasks) -> CSR:
    """Apply `RULES`."""
    rows, values = _edges(tasks)
    return CSR.from_pairs(np.concatenate(rows), np.concatenate(values), len(tasks))


def _edges(tasks: Tasks) -> tuple[list[Ints], list[Ints]]:
    """Return who needs whom, rule by rule."""
    shape = int(tasks.stage.max(initial=0)) + 1, int(tasks.microbatch.max(initial=0)) + 1
    present = set(np.unique(tasks.op).tolist())
    index = {op: _index(tasks, op, *shape) for op in Op if op in present and op != Op.STEP}
    rows: list[Ints] = [np.empty(0, np.int64)]
    values: list[Ints] = [np.empty(0, np.int64)]

    def add(consumers: Ints, producers: Ints) -> None:
        exists = producers >= 0
        rows.append(consumers[exists])
        values.append(producers[exists])

    for rule in RULES:
        ids = np.flatnonzero(np.isin(tasks.op, rule.ops))
        stage, microbatch = tasks.stage[ids] + 1, tasks.microbatch[ids]
        if rule.through in index:
            message = index[rule.through][stage, microbatch]
            add(ids, message)
            ids, stage, microbatch = (x[message < 0] for x in (ids, stage, microbatch))
        for op in rule.needs:
            if op in index:
                add(ids, index[op][stage + rule.stage, microbatch])
    steps = np.full(shape[0], -1, dtype=np.int64)
    ids = np.flatnonzero(tasks.op == Op.STEP)
    steps[tasks.stage[ids]] = ids
    gradients = np.flatnonzero(np.isin(tasks.op, _STEP_NEEDS))
    step_of = steps[tasks.stage[gradients]]
    rows.append(step_of[step_of >= 0])
    values.append(gradients[step_of >= 0])
    return rows, values


def _pairs(tasks: Tasks) -> Ints:
    """Return the SEND of each RECV and the RECV of each SEND."""
    shape = int(tasks.stage.max(initial=0)) + 1, int(tasks.microbatch.max(initial=0)) + 1
    pair = np.full(len(tasks), -1, dtype=np.int64)
    for recv, (send, offset) in PAIRS.items():
        ids = np.flatnonzero(tasks.op == recv)
        senders = _index(tasks, send, *shape)[tasks.stage[ids] + 1 + offset, tasks.microbatch[ids]]
        ids, senders = ids[senders >= 0], senders[senders >= 0]
        pair[ids], pair[senders] = senders, ids
    return pair


def _levels(waits: CSR) -> Ints:
    """Return the longest distance from a task that waits for nothing; -1 within circles."""
    level = np.full(len(waits), -1, dtype=np.int64)
    remaining = np.diff(waits.ptr)
    followers = waits.transposed()
    frontier, depth = np.flatnonzero(remaining == 0), 0
    while len(frontier):
        level[frontier] = depth
        reached, times = np.unique(followers.of(frontier), return_counts=True)
        remaining[reached] -= times
        frontier, depth = reached[remaining[reached] == 0], depth + 1
    return level


def _stable_topological_order(waits: CSR) -> Ints:
    """Return a topological order that takes the smallest id it can; short if there is a circle."""
    remaining = np.diff(waits.ptr).tolist()
    followers = waits.transposed()
    ready = [task for task, count in enumerate(remaining) if count == 0]
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for follower in followers[task].tolist():
            remaining[follower] -= 1
            if remaining[follower] == 0:
                heapq.heappush(ready, follower)
    return np.array(order, dtype=np.int64)
