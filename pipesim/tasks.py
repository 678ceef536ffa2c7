"""What a task is: its columns, its kind, and the stream it runs on."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field, fields
from typing import ClassVar, NamedTuple

import numpy as np

from pipesim.capacity import check_memory
from pipesim.csr import Ints
from pipesim.errors import GraphError
from pipesim.ops import OF_STAGES, Action, Op

__all__ = ["Kinds", "StreamKind", "Task", "Tasks", "checked_tasks"]


#: Largest number of a device, stage, replica or micro-batch, so that counts of them fit 32 bits.
_LARGEST = 2**31 - 2
_FROM_0 = "number them from 0"
#: Lowest and highest value of each column, and what to do.
_RANGES = {
    "op": (0, len(Op) - 1, f"operations are {', '.join(f'{op:d} {op.name}' for op in Op)}"),
    "device": (0, _LARGEST, _FROM_0),
    "stage": (0, _LARGEST, _FROM_0),
    "microbatch": (-1, _LARGEST, f"{_FROM_0}, and give -1 for operations on a whole stage"),
    "replica": (0, _LARGEST, _FROM_0),
    "overlapped": (0, 1, "mark both halves of an overlapped F and B by 1"),
    "group": (-1, 2**63 - 1, "give -1 to tasks that are of no collective"),
}


class StreamKind:
    """Codes of the ``stream`` column of `Tasks`: which of its device's streams a task is on."""

    COMPUTE = 0
    COPY = -1
    COLLECTIVE = -2
    _NAMES: ClassVar = {COMPUTE: "compute", COPY: "copy", COLLECTIVE: "collective"}

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
        """Return ``compute``, ``copy``, ``collective``, ``send:3`` or ``recv:3``."""
        if code <= 0:
            return StreamKind._NAMES[code]
        return f"send:{code // 2}" if code % 2 else f"recv:{code // 2 - 1}"

    @staticmethod
    def code(name: str) -> int:
        """Return the code that `name` prints as ``name``."""
        kind, _, peer = name.partition(":")
        if peer:
            return 2 * int(peer) + {"send": 1, "recv": 2}[kind]
        return {name: code for code, name in StreamKind._NAMES.items()}[kind]


class Task(NamedTuple):
    """A view of one task; ``str`` gives its action's text form."""

    id: int
    op: Op
    device: int
    stream: str
    stage: int
    microbatch: int | None
    replica: int = 0

    @property
    def action(self) -> Action:
        """The task's action, without its place."""
        return Action(self.stage, self.op, self.microbatch)

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True)
class Tasks:
    """Columns of tasks before they are wired into a graph; one entry a task.

    They are checked when they are wired: `checked_tasks` says for what.

    Attributes
    ----------
    op, device, stage
        Operation, and where it runs.
    microbatch
        -1 for operations on a whole stage.
    stream
        A `StreamKind` code.
    replica
        Which copy of the model: a data-parallel replica, or a path of a bidirectional pipeline;
        None where there is one.
    overlapped
        1 for an F, and the B right after it on the compute stream, that run as one action, else 0;
        None where there are none.
    """

    op: Ints
    device: Ints
    stage: Ints
    microbatch: Ints
    stream: Ints
    replica: Ints | None = None
    overlapped: Ints | None = None

    def __len__(self) -> int:
        return len(self.op)

    def kinds(self) -> tuple[Kinds, Ints]:
        """Return the different kinds among the tasks, in order, and each task's."""
        replica, overlapped = (
            np.zeros_like(self.op) if column is None else column
            for column in (self.replica, self.overlapped)
        )
        columns = (self.device, self.stream, self.op, self.stage, replica, overlapped)
        lowest = [int(column.min(initial=0)) for column in columns]
        widths = [int(c.max(initial=0)) - low + 1 for c, low in zip(columns, lowest, strict=True)]
        if math.prod(widths) >= 2**63:
            raise GraphError(
                f"tasks: numbers of devices to {self.device.max()}, of stages to "
                f"{self.stage.max()} and of replicas to {replica.max()} are too large to tell "
                f"their kinds apart; {_FROM_0}, without gaps"
            )
        key = np.zeros(len(self), dtype=np.int64)
        for column, low, width in zip(columns, lowest, widths, strict=True):
            key = key * width + (column - low)
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        device, stream, op, stage, replica, overlapped = (column[first] for column in columns)
        return Kinds(op, device, stage, replica, stream, overlapped), kind.astype(np.int32)


@dataclass(frozen=True)
class Kinds:
    """A table of kinds: what all tasks of one operation, stage and replica have in common.

    A graph of 10^8 tasks has a few thousand kinds, and costs and streams are theirs.

    Attributes
    ----------
    op, device, stage, replica
        One entry a kind.
    stream
        A `StreamKind` code.
    overlapped
        1 for halves of overlapped actions, else 0; zeros where it is not given.
    """

    op: Ints
    device: Ints
    stage: Ints
    replica: Ints
    stream: Ints
    overlapped: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.overlapped) != len(self.op):
            object.__setattr__(self, "overlapped", np.zeros_like(self.op))
        for column in fields(self):
            object.__setattr__(self, column.name, getattr(self, column.name).astype(np.int64))

    def __len__(self) -> int:
        return len(self.op)

    def is_op(self, ops: frozenset[Op]) -> Ints:
        """Mark the kinds whose operation is one of ``ops``."""
        marked = np.zeros(len(Op), dtype=bool)
        marked[list(ops)] = True
        return marked[self.op]

    def joined(self, *others: Kinds) -> Kinds:
        """Return the kinds of all, these first."""
        return Kinds(
            *(
                np.concatenate([getattr(kinds, column.name) for kinds in (self, *others)])
                for column in fields(self)
            )
        )

    def replicated(self, n_replicas: int, n_devices: int) -> Kinds:
        """Return ``n_replicas`` copies, each on ``n_devices`` devices of its own.

        Kind ``k`` of copy ``c`` is number ``c * len(self) + k``; what was replica ``r`` of ``n``
        is replica ``c * n + r``.
        """
        copy = np.repeat(np.arange(n_replicas), len(self))
        op, device, stage, replica, stream, overlapped = (
            np.tile(getattr(self, column.name), n_replicas) for column in fields(self)
        )
        stream = np.where(stream > 0, stream + 2 * n_devices * copy, stream)  # of its peer
        replica += copy * (int(self.replica.max(initial=0)) + 1)
        return Kinds(op, device + n_devices * copy, stage, replica, stream, overlapped)


def checked_tasks(tasks: object, group: object = None) -> tuple[Tasks, Ints | None]:
    """Return tasks, and the number of each one's collective, as columns of 64-bit integers.

    Raises
    ------
    GraphError
        For columns that hold no integers or differ in length, and for values out of range: an
        operation that is none, a number below 0 (-1 where there may be no micro-batch or no
        collective), the stream of a device that is not there; naming column and row.
    CapacityError
        If tables for devices, stages and replicas of such numbers would not fit in memory.
    """
    if not isinstance(tasks, Tasks):
        raise GraphError(f"a graph is wired from pipesim.Tasks, got {type(tasks).__name__}")
    given = {column.name: getattr(tasks, column.name) for column in fields(Tasks)}
    given["group"] = group
    columns = {
        name: _integers(name, column)
        for name, column in given.items()
        if column is not None or name not in ("replica", "overlapped", "group")
    }
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise GraphError(f"tasks: columns differ in length ({lengths}); give one value a task")
    for name, column in columns.items():
        if name != "stream":
            _check_range(name, column, *_RANGES[name])
    n_devices = int(columns["device"].max(initial=0)) + 1
    last = StreamKind.name(2 * n_devices)
    advice = f"there are {n_devices} devices, the last stream is {last}; StreamKind has the codes"
    _check_range("stream", columns["stream"], StreamKind.COLLECTIVE, 2 * n_devices, advice)
    columns = {name: column.astype(np.int64, copy=False) for name, column in columns.items()}
    _check_microbatches(columns["op"], columns["stage"], columns["microbatch"])
    collective = columns.pop("group", None)
    checked = Tasks(**columns)
    _check_size(checked, n_devices)
    return checked, collective


def _integers(name: str, values: object) -> Ints:
    """Return a column as an array of integers, which may still be of any size."""
    try:
        column = np.asarray(values)
    except (TypeError, ValueError):  # a ragged sequence, or nothing that has values
        column = np.empty((0, 0))
    if column.ndim != 1:
        raise GraphError(
            f"tasks: column {name!r} must be a sequence of integers, one a task, got {values!r:.60}"
        )
    if column.dtype.kind in "iu":
        return column
    if isinstance(values, (list, tuple)):  # as they were before numpy made one type of them
        column = np.empty(len(values), dtype=object)
        column[:] = values
    for row, value in enumerate(column):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
            raise GraphError(
                f"tasks: row {row}: {name} must be an integer, got {value!r} "
                f"({type(value).__name__}); give arrays or lists of integers"
            )
    return column if len(column) else np.empty(0, dtype=np.int64)


def _check_range(name: str, column: Ints, lowest: int, highest: int, advice: str) -> None:
    if len(column) and (column.min() < lowest or column.max() > highest):
        row = np.flatnonzero((column < lowest) | (column > highest))[0]
        raise GraphError(
            f"tasks: row {row}: {name} must be {lowest} to {highest}, got {column[row]}; {advice}"
        )


def _check_microbatches(op: Ints, stage: Ints, microbatch: Ints) -> None:
    """Raise for an operation that is of a micro-batch and has none."""
    none = np.flatnonzero(microbatch < 0)
    none = none[~np.isin(op[none], sorted(OF_STAGES))]
    if len(none):
        row = none[0]
        raise GraphError(
            f"tasks: row {row}: microbatch is -1, but {Op(op[row])} of stage {stage[row]} is of "
            f"one micro-batch; give its number (only {', '.join(map(str, sorted(OF_STAGES)))} may "
            "be on a whole stage)"
        )


def _check_size(tasks: Tasks, n_devices: int) -> None:
    """Raise for numbers so large that what a graph keeps of each of them would not fit."""
    stage = int(tasks.stage.max(initial=0))
    replica = 0 if tasks.replica is None else int(tasks.replica.max(initial=0))
    cells = len(Op) * (stage + 2) * (replica + 1)
    check_memory(
        f"a graph of devices to {n_devices - 1}, stages to {stage} and replicas to {replica}",
        16 * cells + 8 * n_devices,  # cells and their running number; the host of each device
        f"{_FROM_0}, without gaps",
    )
