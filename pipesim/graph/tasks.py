"""Tasks: their columns, their kinds, and the codes of the streams that they run on."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import GraphError, number
from pipesim.ops import (
    COPIES,
    EXCHANGES,
    EXPERT_EXCHANGES,
    KEPT,
    LISTED,
    NUMBERED,
    OF_STAGES,
    PASSES,
    REORDERED,
    SEGMENTED,
    Action,
    Op,
    expert_exchange,
)
from pipesim.scheduling.placement import is_first_on_device
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

_T = TypeVar("_T", bound=np.generic)


class StreamKind:
    """Codes of the ``stream`` column of `Tasks`: which of its device's streams a task is on."""

    COMPUTE = 0
    COPY = -1
    COLLECTIVE = -2
    OFFLOAD = -3
    RELOAD = -4
    UNSHARD = -5
    EXCHANGE = -6
    _NAMES: ClassVar = {
        COMPUTE: "compute",
        COPY: "copy",
        COLLECTIVE: "collective",
        OFFLOAD: "offload",
        RELOAD: "reload",
        UNSHARD: "unshard",
        EXCHANGE: "exchange",
    }
    #: The lowest code of a stream that is not of one micro-batch.
    LOWEST = EXCHANGE
    #: Codes of streams of one micro-batch are below all others: from the first on, for each code
    #: of `send` and `recv`, as many as there can be micro-batches.
    _FIRST, _MICROBATCHES = -(2**63), 2**31

    @staticmethod
    def send(peer: Ints) -> Ints:
        """Return the code of the copy stream to ``peer``."""
        return 2 * peer + 1

    @staticmethod
    def recv(peer: Ints) -> Ints:
        """Return the code of the copy stream from ``peer``."""
        return 2 * peer + 2

    @staticmethod
    def of_microbatch(code: Ints, microbatch: Ints) -> Ints:
        """Return the code of the stream for one micro-batch, of a code of `send` or `recv`.

        Devices and micro-batches are numbered below 2**31 - 1, as all columns of tasks are.
        """
        return StreamKind._FIRST + code * StreamKind._MICROBATCHES + microbatch

    @staticmethod
    def is_of_microbatch(code: Ints) -> Ints:
        """Return whether each code is one of `of_microbatch`."""
        return code < StreamKind.LOWEST

    @staticmethod
    def peer(code: Ints) -> Ints:
        """Return the device at the other end of each code's stream, -1 for none."""
        own = np.asarray(code, dtype=np.int64)
        of_peer = own // StreamKind._MICROBATCHES + 2**32
        code = np.where(StreamKind.is_of_microbatch(own), of_peer, own)
        return np.where(code > 0, (code - 1) // 2, -1)

    @staticmethod
    def name(code: int) -> str:
        """Return ``compute``, ``send:3``, ``recv:3``, ``send:3/5`` and other names of streams.

        The last is the stream to device 3 of micro-batch 5. Streams without a peer are named
        ``compute``, ``copy``, ``collective``, ``offload``, ``reload``, ``unshard``, ``exchange``.
        """
        if code < StreamKind.LOWEST:
            of_peer, microbatch = divmod(code - StreamKind._FIRST, StreamKind._MICROBATCHES)
            return f"{StreamKind.name(of_peer)}/{microbatch}"
        if code <= 0:
            return StreamKind._NAMES[code]
        return f"send:{code // 2}" if code % 2 else f"recv:{code // 2 - 1}"

    @staticmethod
    def code(name: str) -> int:
        """Return the code of a stream's name; the inverse of `name`."""
        whole, _, microbatch = name.partition("/")
        if microbatch:
            of_peer, number = StreamKind.code(whole), int(microbatch)
            if not (0 < of_peer <= 2**32 - 2 and 0 <= number < StreamKind._MICROBATCHES):
                raise ValueError(f"{name!r} is no stream of a micro-batch")
            return StreamKind._FIRST + of_peer * StreamKind._MICROBATCHES + number
        kind, _, peer = name.partition(":")
        if peer:
            return 2 * int(peer) + {"send": 1, "recv": 2}[kind]
        return {name: code for code, name in StreamKind._NAMES.items()}[kind]


class Task(NamedTuple):
    """View of one task; ``str`` gives the text form of its action.

    Attributes
    ----------
    id
        Number of the task in its graph, from 0.
    op
        Operation.
    device
        Number of the device.
    stream
        Name of the stream, such as ``"compute"`` or ``"send:1"``.
    stage
        Number of the stage.
    microbatch
        Number of the micro-batch; None for operations on a whole stage.
    replica
        Number of the copy of the model.
    peer_stage
        Stage at the other end of a message of skip connections; -1 for other tasks.
    part
        Bucket, exchange or another part of `pipesim.Action`; -1 for other tasks.

    Examples
    --------
    >>> import pipesim as ps
    >>> task = ps.lower(ps.schedule("gpipe", 2, 2)).task(4)
    >>> str(task), task.op, task.device, task.stage, task.microbatch
    ('1F0', <Op.F: 0>, 1, 1, 0)
    """

    id: int
    op: Op
    device: int
    stream: str
    stage: int
    microbatch: int | None
    replica: int = 0
    peer_stage: int = -1
    part: int = -1

    @property
    def action(self) -> Action:
        """Action of the task, without device and stream."""
        return Action(self.stage, self.op, self.microbatch, self.peer_stage, self.part)

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True)
class Tasks:
    """Columns of tasks before they are wired into a graph; one entry a task.

    `pipesim.TaskGraph.build` wires them, and checks them then.

    Attributes
    ----------
    op, device, stage
        Operation, and the device and stage that run it.
    microbatch
        -1 for operations on a whole stage.
    stream
        A `StreamKind` code.
    replica
        Number of the copy of the model: a data-parallel replica, or a path of a bidirectional
        pipeline; None for one copy.
    overlapped
        1 for an F, and the B right after it on the compute stream, that run as one action, else 0;
        None without overlapped actions.
    peer_stage
        The stage at the other end of a message of skip connections, -1 for any other task, the
        pipeline's own messages included; None without skips.
    part
        Part of an operation that has several, as `pipesim.Action` describes, such as the bucket of
        a REDUCE_GRAD; -1 for any other task. None without such tasks.

    Examples
    --------
    Stream 0 is ``compute``:

    >>> import pipesim as ps
    >>> from pipesim.graph import Tasks
    >>> tasks = Tasks(op=[ps.Op.F, ps.Op.F, ps.Op.B, ps.Op.B], device=[0, 0, 0, 0],
    ...                  stage=[0, 0, 0, 0], microbatch=[0, 1, 1, 0], stream=[0, 0, 0, 0])
    >>> len(tasks)
    4
    >>> ps.simulate(ps.TaskGraph.build(tasks), ps.Costs(forward=1, backward=2)).makespan
    6.0
    """

    op: Ints
    device: Ints
    stage: Ints
    microbatch: Ints
    stream: Ints
    replica: Ints | None = None
    overlapped: Ints | None = None
    peer_stage: Ints | None = None
    part: Ints | None = None

    def __len__(self) -> int:
        return len(self.op)

    def kinds(self) -> tuple[Kinds, Ints]:
        """Return the different kinds among the tasks, and the kind of each task.

        Columns must be arrays here.

        Returns
        -------
        Kinds
            A table of the kinds, sorted by device and stream.
        numpy.ndarray
            Index of each task's kind; shape ``(len(tasks),)``.
        """
        replica, overlapped = (
            np.zeros_like(self.op) if column is None else column
            for column in (self.replica, self.overlapped)
        )
        peer, part = (
            np.full_like(self.op, -1) if column is None else column
            for column in (self.peer_stage, self.part)
        )
        stream, codes = self.stream, None
        if StreamKind.is_of_microbatch(stream).any():  # whose codes are far apart
            codes, stream = np.unique(stream, return_inverse=True)
        columns = (self.device, stream, self.op, self.stage, replica, overlapped, peer, part)
        lowest = [int(column.min(initial=0)) for column in columns]
        widths = [int(c.max(initial=0)) - low + 1 for c, low in zip(columns, lowest, strict=True)]
        if math.prod(widths) >= 2**63:
            raise GraphError(
                f"tasks: numbers of devices to {self.device.max()}, of stages to "
                f"{self.stage.max()} and of replicas to {replica.max()} are too large to tell "
                f"their kinds apart; number them from 0, without gaps"
            )
        key = np.zeros(len(self), dtype=np.int64)
        for column, low, width in zip(columns, lowest, widths, strict=True):
            key = key * width + (column - low)
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        device, stream, op, stage, replica, overlapped, peer, part = (c[first] for c in columns)
        stream = stream if codes is None else codes[stream]
        kinds = Kinds(op, device, stage, replica, stream, overlapped, peer, part)
        return kinds, kind.astype(np.int32)


@dataclass(frozen=True, eq=False)
class Kinds:
    """A table of kinds: tasks of one operation, stage, replica, device, stream, peer and part.

    Columns are those of `Tasks`, with one entry a kind; the last three may be omitted. A graph of
    10^8 tasks has a few thousand kinds. Costs and streams are per kind. Tables with equal columns
    are equal, so that functions of a table can keep their results. Graphs share tables: their
    arrays are read-only.
    """

    op: Ints
    device: Ints
    stage: Ints
    replica: Ints
    stream: Ints
    overlapped: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    peer_stage: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    part: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        for name, value in (("overlapped", 0), ("peer_stage", -1), ("part", -1)):
            if len(getattr(self, name)) != len(self.op):
                object.__setattr__(self, name, np.full(len(self.op), value))
        for name in _COLUMNS:
            object.__setattr__(self, name, _read_only(np.array(getattr(self, name), np.int64)))

    def __len__(self) -> int:
        return len(self.op)

    @cached_property
    def _bytes(self) -> bytes:
        return np.concatenate([getattr(self, name) for name in _COLUMNS]).tobytes()

    def __getstate__(self) -> dict[str, Any]:
        """Return the columns, for copies and pickles: equal tables have equal pickles."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kinds) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    def is_op(self, ops: frozenset[Op]) -> NDArray[np.bool_]:
        """Mark the kinds whose operation is one of ``ops``."""
        marked: NDArray[np.bool_] = _marked(ops)[self.op]
        return marked

    @cached_property
    def ops(self) -> frozenset[int]:
        """Operations of the table."""
        return frozenset(self.op.tolist())

    @cached_property
    def has_segments(self) -> bool:
        """Whether any action is several segments, with exchanges of experts between them."""
        return bool((self.is_op(SEGMENTED) & (self.part >= 0)).any())

    @cached_property
    def returns_tokens(self) -> NDArray[np.bool_]:
        """Whether kinds are messages of the last stage to the first, for the next decode step."""
        to_earlier = (
            (self.op == Op.SEND_F) & (self.peer_stage >= 0) & (self.peer_stage < self.stage)
        )
        tokens: NDArray[np.bool_] = to_earlier | (
            (self.op == Op.RECV_F) & (self.peer_stage > self.stage)
        )
        return tokens

    @cached_property
    def gathers_shards(self) -> NDArray[np.bool_]:
        """Whether tasks of each kind gather sharded parameters, which are freed after a use (FSDP).

        Other UNSHARDs are of a sharded optimizer, once a step.
        """
        gathers = (self.op == Op.UNSHARD) & (self.part >= 0)
        again = gathers & (self.part == PASSES.index("backward"))
        shards: NDArray[np.bool_] = gathers & np.isin(
            self.stage, self.stage[again | (self.op == Op.RESHARD)]
        )
        return shards

    @cached_property
    def homes(self) -> Ints:
        """Device that holds each replica's stages; shape ``(n_replicas, n_stages)``."""
        shape = int(self.replica.max(initial=0)) + 1, int(self.stage.max(initial=0)) + 1
        homes = np.zeros(shape, dtype=np.int64)
        homes[self.replica, self.stage] = self.device
        return _read_only(homes)

    @cached_property
    def holds(self) -> NDArray[np.bool_]:
        """Whether each replica is the lowest with each stage on its device; shape as `homes`.

        Replicas with a stage on one device share it. This one has its reductions and its optimizer
        steps.
        """
        homes = -1 - np.arange(self.homes.size).reshape(self.homes.shape)  # where it has none
        homes[self.replica, self.stage] = self.device
        return _read_only(is_first_on_device(homes))

    @cached_property
    def shares_stages(self) -> bool:
        """Whether several replicas have a stage on one device."""
        return not self.holds.all()

    @cached_property
    def streams(self) -> tuple[tuple[tuple[int, str], ...], NDArray[np.int32]]:
        """Device and name of each stream, and the stream of each kind.

        Streams are sorted by device and then by code; those of one micro-batch come last.
        """
        codes, position = np.unique(self.stream, return_inverse=True)
        n_codes, n_last = len(codes), int(StreamKind.is_of_microbatch(codes).sum())
        codes = np.roll(codes, -n_last)
        keys, stream_of_kind = np.unique(
            self.device * n_codes + (position - n_last) % n_codes, return_inverse=True
        )
        streams = tuple(
            (key // n_codes, StreamKind.name(int(codes[key % n_codes]))) for key in keys.tolist()
        )
        return streams, _read_only(stream_of_kind.astype(np.int32))

    @cached_property
    def begins(self) -> NDArray[np.bool_]:
        """Whether tasks of each kind begin their action: all but later segments of a stage."""
        return ~self.is_op(SEGMENTED) | (self.part <= 0)

    @cached_property
    def completes(self) -> NDArray[np.bool_]:
        """Whether tasks of each kind complete their action: all but earlier segments of a stage."""
        completes = np.ones(len(self), dtype=bool)
        own = np.flatnonzero(self.is_op(SEGMENTED) & (self.part >= 0))
        if len(own):
            place = np.stack([self.op[own], self.replica[own], self.stage[own]])
            _, cell = np.unique(place, axis=1, return_inverse=True)
            last = np.zeros(int(cell.max()) + 1, dtype=np.int64)
            np.maximum.at(last, cell.ravel(), self.part[own])
            completes[own] = self.part[own] == last[cell.ravel()]
        return completes

    def joined(self, *others: Kinds) -> Kinds:
        """Return the kinds of all tables, these first."""
        tables = (self, *others)
        return Kinds(
            *(np.concatenate([getattr(table, name) for table in tables]) for name in _COLUMNS)
        )

    def without_streams(self) -> Ints:
        """Return a number for each kind, the same for kinds that differ in their stream alone."""
        columns = [getattr(self, name) for name in _COLUMNS if name != "stream"]
        _, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return number.ravel()


class ListedTasks(NamedTuple):
    """Listed compute tasks, device after device, each in its order."""

    #: Position of each task in the issue order.
    tasks: Ints
    #: Number of each task among those of all devices; halves of an overlapped action share one.
    place: Ints
    #: Position of the first and the last task of each place.
    first: Ints
    last: Ints

    @classmethod
    def by_device(cls, kinds: Kinds, kind: Ints) -> ListedTasks:
        """Return the listed ones among tasks in issue order, given the kind of each."""
        tasks = np.flatnonzero(kinds.is_op(LISTED)[kind])
        tasks = tasks[np.argsort(kinds.device[kind[tasks]], kind="stable")]
        own = kind[tasks]
        is_first = (kinds.overlapped[own] == 0) | (kinds.op[own] == Op.F)
        begins = np.flatnonzero(is_first)
        ends = np.append(begins[1:], len(tasks))[: len(begins)] - 1
        return cls(tasks, np.cumsum(is_first) - 1, tasks[begins], tasks[ends])


_COLUMNS = tuple(column.name for column in fields(Kinds))


def _read_only(array: NDArray[_T]) -> NDArray[_T]:
    """Return the array itself, which can no longer be written to."""
    array.flags.writeable = False
    return array


@lru_cache
def _marked(ops: frozenset[Op]) -> NDArray[np.bool_]:
    marked = np.zeros(len(Op), dtype=bool)
    marked[list(ops)] = True
    return marked


# Checks of the columns of `Tasks` that users give

#: Largest number of a device, stage, replica or micro-batch, so that counts of them fit 32 bits.
_LARGEST = 2**31 - 2
_FROM_0 = "number them from 0"
#: Most parts of ALL_TO_ALL: those of 10,000 layers with experts.
_MOST_EXCHANGES = expert_exchange(EXPERT_EXCHANGES[0], 10_000)
#: Lowest and highest value of each column, and advice for error messages.
_RANGES = {
    "op": (0, len(Op) - 1, f"operations are {', '.join(f'{op:d} {op.name}' for op in Op)}"),
    "device": (0, _LARGEST, _FROM_0),
    "stage": (0, _LARGEST, _FROM_0),
    "microbatch": (-1, _LARGEST, f"{_FROM_0}, and give -1 for operations on a whole stage"),
    "replica": (0, _LARGEST, _FROM_0),
    "peer_stage": (-1, _LARGEST, f"{_FROM_0}, and give -1 to all but messages of skips"),
    "part": (-1, _LARGEST, f"{_FROM_0}, and give -1 to tasks without parts"),
    "overlapped": (0, 1, "mark both halves of an overlapped F and B or I by 1"),
    "group": (-1, 2**63 - 1, "give -1 to tasks without a collective"),
}
#: Columns that may be omitted.
_OPTIONAL = ("replica", "overlapped", "peer_stage", "part", "group")


def checked_tasks(
    tasks: object, group: object = None, *, decodes: object = False
) -> tuple[Tasks, Ints | None]:
    """Return tasks, and the collective's number of each task, as columns of 64-bit integers.

    If the graph ``decodes``, the last stage may send tokens to the first.
    """
    if not isinstance(tasks, Tasks):
        raise GraphError(f"a graph is wired from pipesim.graph.Tasks, got {type(tasks).__name__}")
    all_columns = {column.name: getattr(tasks, column.name) for column in fields(Tasks)}
    all_columns["group"] = group
    columns = {
        name: _integers(name, column)
        for name, column in all_columns.items()
        if column is not None or name not in _OPTIONAL
    }
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise GraphError(f"tasks: columns differ in length ({lengths}); give one value a task")
    for name, column in columns.items():
        if name != "stream":
            _check_range(name, column, *_RANGES[name])
    n_devices = int(columns["device"].max(initial=0)) + 1
    _check_streams(columns["stream"], n_devices)
    columns = {name: column.astype(np.int64, copy=False) for name, column in columns.items()}
    _check_microbatches(columns["op"], columns["stage"], columns["microbatch"])
    collective = columns.pop("group", None)
    checked = Tasks(**columns)
    _check_peers(checked, decodes=bool(number(decodes)))
    _check_parts(checked)
    _check_size(checked, n_devices)
    return checked, collective


def _integers(name: str, values: object) -> Ints:
    """Return a column as an array of integers, of any type and size; raise for other values."""
    try:
        column = np.asarray(values)
    except (TypeError, ValueError):  # a ragged sequence, or no sequence
        column = np.empty((0, 0))
    if column.ndim != 1:
        raise GraphError(
            f"tasks: column {name!r} must be a sequence of integers, one a task, got {values!r:.60}"
        )
    if column.dtype.kind in "iu":
        return column
    if isinstance(values, (list, tuple)):  # the user's values, before numpy gave them one type
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


def _check_streams(column: Ints, n_devices: int) -> None:
    """Raise for an unknown code of a stream, and for a stream to a device that does not exist."""
    last = StreamKind.name(2 * n_devices)
    advice = f"there are {n_devices} devices, the last stream is {last}; StreamKind has the codes"
    if column.dtype.kind == "i":
        peer = StreamKind.peer(column)
        has_stream = StreamKind.is_of_microbatch(column) & (peer >= 0) & (peer < n_devices)
        column = np.where(has_stream, StreamKind.COMPUTE, column)
    _check_range("stream", column, StreamKind.LOWEST, 2 * n_devices, advice)


def _check_microbatches(op: Ints, stage: Ints, microbatch: Ints) -> None:
    """Raise for an operation without the micro-batch that it needs."""
    none = np.flatnonzero(microbatch < 0)
    none = none[~np.isin(op[none], sorted(OF_STAGES))]
    if len(none):
        row = none[0]
        raise GraphError(
            f"tasks: row {row}: microbatch is -1, but {Op(op[row])} of stage {stage[row]} is of "
            f"one micro-batch; give its number (only {', '.join(map(str, sorted(OF_STAGES)))} may "
            "be on a whole stage)"
        )


def _check_peers(tasks: Tasks, *, decodes: bool) -> None:
    """Raise for tasks with a ``peer_stage`` that are no messages of a skip, or token, with it."""
    if tasks.peer_stage is None:
        return
    direction = np.sign(tasks.peer_stage - tasks.stage)
    ends = np.sort([tasks.stage, tasks.peer_stage], axis=0)
    is_token = decodes & (ends[0] == 0) & (ends[1] == tasks.stage.max(initial=-1))
    exists = tasks.peer_stage <= tasks.stage.max(initial=-1)
    right = is_token & np.isin(tasks.op, [Op.SEND_F, Op.RECV_F])
    for op, sign in ((Op.SEND_F, 1), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 1)):
        right |= (tasks.op == op) & (direction == sign) & exists
    wrong = np.flatnonzero((tasks.peer_stage >= 0) & ~right)
    if len(wrong):
        row = wrong[0]
        raise GraphError(
            f"tasks: row {row}: {Op(tasks.op[row])} of stage {tasks.stage[row]} has peer_stage "
            f"{tasks.peer_stage[row]}; SEND_F and RECV_B of a skip name a later stage, RECV_F and "
            f"SEND_B an earlier one, of stages 0..{tasks.stage.max()}; any other task has -1"
        )


def _check_parts(tasks: Tasks) -> None:
    """Raise for tasks with a part that have no parts, and for unknown exchanges."""
    part = np.full(len(tasks), -1) if tasks.part is None else tasks.part
    numbers = [EXCHANGES.index(name) for name in REORDERED]
    n_parts = np.zeros(len(Op), dtype=np.int64)
    n_parts[Op.ALL_TO_ALL], n_parts[[Op.UNSHARD, Op.RESHARD]] = _MOST_EXCHANGES, len(PASSES)
    n_parts[sorted(COPIES)] = len(KEPT)
    wrong = part >= n_parts[tasks.op]
    is_numbered = np.isin(tasks.op, sorted(NUMBERED))
    wrong &= ~is_numbered & ~((tasks.op == Op.REORDER) & np.isin(part, numbers))
    for row in np.flatnonzero(wrong)[:1].tolist():
        names = ", ".join(f"{number} {name}" for number, name in enumerate(EXCHANGES))
        raise GraphError(
            f"tasks: row {row}: {Op(tasks.op[row])} of stage {tasks.stage[row]} has part "
            f"{part[row]}; those of ALL_TO_ALL are {names} and from there on 4 for each layer with "
            f"experts, those of REORDER are {' and '.join(map(str, numbers))} of them, buckets of "
            "REDUCE_GRAD, groups of REDUCE_TIED and segments of F, B and I count from 0, UNSHARD "
            "and RESHARD of a micro-batch are 0 forward or 1 backward, OFFLOAD and RELOAD of an "
            "input are 0, and any other task has -1"
        )


def _check_size(tasks: Tasks, n_devices: int) -> None:
    """Raise for numbers so large that the tables of a graph would not fit in memory."""
    stage = int(tasks.stage.max(initial=0))
    replica = 0 if tasks.replica is None else int(tasks.replica.max(initial=0))
    columns = [column for column in (tasks.peer_stage, tasks.part) if column is not None]
    highest = (int(column.max(initial=-1)) + 1 for column in columns)
    others = max(len(EXCHANGES), *highest, 0)
    cells = (len(Op) + 1) * (stage + 2) * (replica + 1) * (1 + others)
    check_memory(
        f"a graph of devices to {n_devices - 1}, stages to {stage} and replicas to {replica}",
        16 * cells + 8 * n_devices,  # cells and their running number; the host of each device
        f"{_FROM_0}, without gaps",
    )
