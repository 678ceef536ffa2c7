"""Check the columns of `pipesim.Tasks` that users give."""

from __future__ import annotations

import numbers
from dataclasses import fields

import numpy as np

from pipesim.errors import GraphError
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.ops import (
    COPIES,
    EXCHANGES,
    EXPERT_EXCHANGES,
    KEPT,
    NUMBERED,
    OF_STAGES,
    PASSES,
    REORDERED,
    Op,
    expert_exchange,
)
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

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
    "overlapped": (0, 1, "mark both halves of an overlapped F and B by 1"),
    "group": (-1, 2**63 - 1, "give -1 to tasks without a collective"),
}
#: Columns that may be omitted.
_OPTIONAL = ("replica", "overlapped", "peer_stage", "part", "group")


def checked_tasks(tasks: object, group: object = None) -> tuple[Tasks, Ints | None]:
    """Return tasks, and the collective's number of each task, as columns of 64-bit integers.

    Raises
    ------
    GraphError
        For columns of another type than integers or of different lengths, and for values out of
        range: an unknown operation, a number below 0 (below -1 for columns in which -1 means none),
        the stream of a device that does not exist. The message has the column and the row.
    CapacityError
        If tables for the largest numbers of devices, stages and replicas would not fit in memory.
    """
    if not isinstance(tasks, Tasks):
        raise GraphError(f"a graph is wired from pipesim.Tasks, got {type(tasks).__name__}")
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
    _check_peers(checked)
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


def _check_peers(tasks: Tasks) -> None:
    """Raise for tasks with a ``peer_stage`` that are no messages of a skip to or from it."""
    if tasks.peer_stage is None:
        return
    direction = np.sign(tasks.peer_stage - tasks.stage)
    exists = tasks.peer_stage <= tasks.stage.max(initial=-1)
    right = np.zeros(len(tasks), dtype=bool)
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
