"""What a task is: its columns, its kind, and the stream it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from pipesim.csr import Ints
from pipesim.ops import Action, Op

__all__ = ["Kinds", "StreamKind", "Task", "Tasks"]


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

    Attributes
    ----------
    op, device, stage
        Operation, and where it runs.
    microbatch
        -1 for operations on a whole stage.
    stream
        A `StreamKind` code.
    replica
        Which data-parallel replica of the pipeline; None where there is one.
    """

    op: Ints
    device: Ints
    stage: Ints
    microbatch: Ints
    stream: Ints
    replica: Ints | None = None

    def __len__(self) -> int:
        return len(self.op)

    def take(self, index: Ints) -> Tasks:
        """Return the tasks at ``index``, in that order."""
        columns = (self.op, self.device, self.stage, self.microbatch, self.stream, self.replica)
        return Tasks(*(None if c is None else c[index] for c in columns))  # type: ignore[arg-type]

    def kinds(self) -> tuple[Kinds, Ints]:
        """Return the different kinds among the tasks, in order, and each task's."""
        replica = np.zeros_like(self.op) if self.replica is None else self.replica
        columns = (self.device, self.stream, self.op, self.stage, replica)
        lowest = [int(column.min(initial=0)) for column in columns]
        widths = [int(c.max(initial=0)) - low + 1 for c, low in zip(columns, lowest, strict=True)]
        key = np.zeros(len(self), dtype=np.int64)
        for column, low, width in zip(columns, lowest, widths, strict=True):
            key = key * width + (column - low)
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        device, stream, op, stage, replica = (column[first] for column in columns)
        return Kinds(op, device, stage, replica, stream), kind.astype(np.int32)


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
    """

    op: Ints
    device: Ints
    stage: Ints
    replica: Ints
    stream: Ints

    def __post_init__(self) -> None:
        for name in ("op", "device", "stage", "replica", "stream"):
            object.__setattr__(self, name, getattr(self, name).astype(np.int64))

    def __len__(self) -> int:
        return len(self.op)

    def is_op(self, ops: frozenset[Op]) -> Ints:
        """Mark the kinds whose operation is one of ``ops``."""
        marked = np.zeros(len(Op), dtype=bool)
        marked[list(ops)] = True
        return marked[self.op]

    def joined(self, *others: Kinds) -> Kinds:
        """Return the kinds of all, these first."""
        columns = ((k.op, k.device, k.stage, k.replica, k.stream) for k in (self, *others))
        return Kinds(*map(np.concatenate, zip(*columns, strict=True)))

    def replicated(self, n_replicas: int, n_devices: int) -> Kinds:
        """Return ``n_replicas`` copies, each on ``n_devices`` devices of its own.

        Kind ``k`` of replica ``r`` is number ``r * len(self) + k``.
        """
        replica = np.repeat(np.arange(n_replicas), len(self))
        op, device, stage, stream = (
            np.tile(column, n_replicas)
            for column in (self.op, self.device, self.stage, self.stream)
        )
        stream = np.where(stream > 0, stream + 2 * n_devices * replica, stream)  # of its peer
        return Kinds(op, device + n_devices * replica, stage, replica, stream)
