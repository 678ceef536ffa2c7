"""Tasks: their columns, their kinds, and the codes of the streams that they run on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import GraphError
from pipesim.ops import SEGMENTED, Action, Op
from pipesim.utils.csr import Ints

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

    See Also
    --------
    pipesim.TaskGraph.task : View a task of a graph.
    pipesim.Action : Operation, stage and micro-batch alone.
    pipesim.Tasks : Columns of many tasks.

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

    `pipesim.graph.column_checks.checked_tasks` checks them when they are wired.

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

    Raises
    ------
    GraphError
        Not here, but by `pipesim.TaskGraph.build`: for columns that hold no integers, differ in
        length or have a value out of range.

    See Also
    --------
    pipesim.TaskGraph.build : Wire the tasks into a graph.
    pipesim.lower : Make a graph from a schedule instead.
    pipesim.Op : Numbers of operations.

    Examples
    --------
    Stream 0 is ``compute``:

    >>> import pipesim as ps
    >>> tasks = ps.Tasks(op=[ps.Op.F, ps.Op.F, ps.Op.B, ps.Op.B], device=[0, 0, 0, 0],
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

        Raises
        ------
        GraphError
            If numbers of devices, stages or replicas are too large to tell kinds apart.

        Examples
        --------
        Two F of one stage are of one kind:

        >>> import numpy as np
        >>> import pipesim as ps
        >>> zeros = np.zeros(3, dtype=int)
        >>> op, microbatch = np.array([ps.Op.F, ps.Op.F, ps.Op.B]), np.array([0, 1, 0])
        >>> kinds, kind = ps.Tasks(op, zeros, zeros, microbatch, stream=zeros).kinds()
        >>> len(kinds), kind.tolist()
        (2, [0, 0, 1])
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

    A graph of 10^8 tasks has a few thousand kinds. Costs and streams are per kind. Tables with
    equal columns are equal, so that functions of a table can keep their results. Graphs share
    tables: their arrays are read-only.

    Attributes
    ----------
    op, device, stage, replica
        One entry a kind.
    stream
        A `StreamKind` code.
    overlapped
        1 for halves of overlapped actions, else 0; zeros where it is not given.
    peer_stage
        The stage at the other end of a message of skip connections, else -1, also where it is not
        given.
    part
        The bucket of a REDUCE_GRAD, the group of a REDUCE_TIED, or which exchange an ALL_TO_ALL is,
        likewise.
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
        """All columns."""
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
    def homes(self) -> Ints:
        """Device that holds each replica's stages; shape ``(n_replicas, n_stages)``."""
        shape = int(self.replica.max(initial=0)) + 1, int(self.stage.max(initial=0)) + 1
        homes = np.zeros(shape, dtype=np.int64)
        homes[self.replica, self.stage] = self.device
        return _read_only(homes)

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


_COLUMNS = tuple(column.name for column in fields(Kinds))


def _read_only(array: NDArray[_T]) -> NDArray[_T]:
    """Return the array itself, which can no longer be written to."""
    array.flags.writeable = False
    return array


@lru_cache
def _marked(ops: frozenset[Op]) -> NDArray[np.bool_]:
    """Return whether each operation is one of ``ops``."""
    marked = np.zeros(len(Op), dtype=bool)
    marked[list(ops)] = True
    return marked
