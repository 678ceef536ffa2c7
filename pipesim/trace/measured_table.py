"""Read a table of measured tasks, such as another framework or a study writes, as a `Timeline`."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    TimelineError,
    check_name,
    check_text,
    suggestion,
)
from pipesim.graph.tasks import Tasks
from pipesim.ops import COMPUTE, INPUT_GRADS, OF_STAGES, TRANSFERS, Action, Op
from pipesim.timeline.arrow_tables import read_frame
from pipesim.timeline.tables import check_all_tasks, check_rows
from pipesim.timeline.timeline import Timeline
from pipesim.trace.measured_tasks import (
    MeasuredStep,
    MeasuredTasks,
    latest_ends,
    timeline_of,
    with_parts,
)
from pipesim.trace.range_names import WORDS, Ops, check_mapping, check_ops, word_key
from pipesim.utils.csr import Ints
from pipesim.utils.files import check_path, gunzip, read_bytes
from pipesim.utils.packages import import_extra

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]
_WHAT = "a table of tasks from"
#: Columns that are read, and what each has.
_COLUMNS = {
    "op": "the operation",
    "microbatch": "the micro-batch",
    "stage": "the stage",
    "device": "the device",
    "start": "the start",
    "end": "the end",
    "duration": "the duration",
    "replica": "the replica",
    "chunk": "the chunk of the device",
    "nbytes": "the bytes of a message",
    "step": "the step",
}
#: Units of times, in seconds.
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Seconds by which tasks of a device may overlap, as times are rounded, and the share of the
#: shorter task, as the next one may be called before the one before it has ended.
_ROUNDED, _EARLY = 5e-6, 0.01
#: Most steps that a message names.
_SHOWN = 8
#: Tasks up to which missing ones are looked for.
_FEW = 1_000_000
_DIGITS = re.compile(r"([0-9]+)")
#: Operations of which a table tells too little: their parts, or what they exchange.
_UNREAD = (Op.ALL_TO_ALL, Op.DISPATCH, Op.REORDER, Op.RESHARD, Op.OFFLOAD, Op.RELOAD)


def read_step(
    table: object,
    *,
    columns: Mapping[str, str] | None = None,
    ops: Mapping[str, str | None] | None = None,
    unit: str = "s",
    step: object = None,
    gaps: str = "stages",
    name: str = "",
) -> MeasuredStep:
    """Read one step, as `Timeline.from_table` does; return the offsets of the clocks, too."""
    check_name("unit", unit, _UNITS)
    check_name("way with gaps", gaps, ("keep", "stages", "charge"))
    check_text("name", name)
    rows = _one_step(_renamed(_frame(table), columns), step)
    rows, op = _with_operations(rows, ops)
    start, end = _times(rows, _UNITS[unit])
    replica = _in_order(rows, "replica")[0] if "replica" in rows else np.zeros(len(rows), np.int64)
    device, stage = _places(rows, replica)
    microbatch = _integers(rows, "microbatch", lowest=-1)
    needed = np.isin(op, sorted(set(Op) - OF_STAGES - TRANSFERS))
    check_rows(rows, (microbatch >= 0) | ~needed, "is of a micro-batch, and has none")
    microbatch = np.where(np.isin(op, sorted(OF_STAGES)), -1, microbatch)
    tasks = MeasuredTasks.make(op, device, stage, microbatch, start, end, replica=replica)
    if "nbytes" in rows:
        nbytes = _floats(rows, "nbytes")
        valid = np.isnan(nbytes) | ((nbytes >= 0) & (nbytes < np.inf))
        check_rows(rows, valid, "has no valid nbytes")
        tasks = replace(tasks, nbytes=nbytes)
    tasks = _with_overlapped(with_parts(_with_message_numbers(rows, tasks)))
    _check_tasks(rows, tasks)
    n_devices = int(device.max()) + 1
    return timeline_of(tasks, n_devices=n_devices, gaps=gaps, name=name)


# The rows


def _frame(table: object) -> pd.DataFrame:
    """Return a table as a DataFrame: another library's table, or a file's."""
    from pipesim.utils.packages import pandas as pd

    if isinstance(table, pd.DataFrame):
        frame = table
    elif hasattr(table, "__arrow_c_stream__"):
        pyarrow = import_extra("pyarrow", "parquet", "an Arrow table")
        try:
            frame = pyarrow.table(table).to_pandas()
        except (TypeError, pyarrow.ArrowException) as error:
            raise TimelineError(f"{type(table).__name__} is no table: {error}") from error
    elif not isinstance(table, str | os.PathLike):
        raise ArgumentError(
            f"table must be a DataFrame, a table that Arrow reads or a path, got "
            f"{type(table).__name__}; give pandas.DataFrame(...) of it"
        )
    else:
        path = check_path("table", table)
        data = read_bytes(path, _WHAT, TimelineError)
        if data.startswith(b"PAR1"):
            frame = read_frame(data, path, _WHAT)
        else:
            data = gunzip(data, path, _WHAT, TimelineError)
            old = {"float_precision": "round_trip"}  # the default of later versions
            exact: dict[str, Any] = {} if pd.__version__ >= "3.1" else old
            try:
                frame = pd.read_csv(io.BytesIO(data), index_col=False, **exact)
            except ValueError as error:  # among them UnicodeDecodeError, and those of pandas
                raise TimelineError(f"cannot read {_WHAT} {path}: {error}") from error
    if not len(frame):
        raise TimelineError("the table has no rows; give one row a measured task")
    if isinstance(frame.index, pd.MultiIndex) or not frame.index.is_unique:
        frame = frame.reset_index(drop=True)
    return frame.rename_axis("row")


def _renamed(frame: pd.DataFrame, columns: Mapping[str, str] | None) -> pd.DataFrame:
    chosen = {} if columns is None else columns
    names = check_mapping("columns", chosen, "such as {'microbatch': 'mb'}")
    source = {str(x): str(x) for x in frame.columns if str(x) in _COLUMNS}
    if "bytes" in frame and "nbytes" not in source:
        source["nbytes"] = "bytes"
    for own, other in names.items():
        check_name("column", own, _COLUMNS)
        if check_text(f"columns[{own!r}]", other) not in frame:
            near = suggestion(str(other), map(str, frame.columns))
            raise TimelineError(f"columns: the table has no column {other!r}{near}")
        source[own] = other
    for choices in (("op",), ("microbatch",), ("stage", "device"), ("start",), ("end", "duration")):
        if not source.keys() & choices:
            own, listed = choices[0], list(map(str, frame.columns))
            near = suggestion(own, listed) or "; give a CSV with commas" * (len(listed) == 1)
            raise TimelineError(
                f"the table has no column {own!r}, {_COLUMNS[own]}; its columns are "
                f"{', '.join(map(repr, listed))}{near}; say which it is with "
                f"columns={{{own!r}: ...}}"
            )
    for own, other in source.items():
        if (frame.columns == other).sum() > 1 or list(source.values()).count(other) > 1:
            raise TimelineError(f"the table has several columns {other!r}; give one for {own!r}")
    return frame[list(source.values())].set_axis(list(source), axis=1)


def _one_step(rows: pd.DataFrame, step: object) -> pd.DataFrame:
    """Return the rows of a step, by default of the last one, without their column ``step``."""
    if "step" not in rows:
        if step is not None:
            raise ArgumentError(f"got step={step!r}, and the table has no column 'step'")
        return rows
    number, steps = _in_order(rows, "step")
    if step is None:
        chosen = len(steps) - 1
    elif isinstance(step, str | int | float | np.generic) and step in steps:
        chosen = steps.index(step)
    else:
        shown = ", ".join(map(repr, steps[:_SHOWN])) + (", ..." if len(steps) > _SHOWN else "")
        raise ArgumentError(f"the table has no step {step!r}; it has {shown}")
    own: pd.DataFrame = rows[number == chosen].drop(columns="step")
    return own


def _in_order(rows: pd.DataFrame, column: str) -> tuple[Ints, list[Any]]:
    """Return the number of each row's value among those of a column in order, and the values.

    Numbers in texts count as numbers: ``cuda:2`` comes before ``cuda:10``.
    """
    values = rows[column]
    check_rows(rows, values.notna(), f"has no {column}")
    try:
        number, different = values.factorize()
        keys: list[Any] = [
            [(x.isdecimal(), int(x) if x.isdecimal() else x) for x in _DIGITS.split(value)]
            if isinstance(value, str)
            else value
            for value in different.tolist()
        ]
        order = sorted(range(len(keys)), key=lambda k: keys[k])
    except TypeError as error:  # texts and numbers, or lists
        raise TimelineError(f"column {column!r} has values of different types") from error
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[number], [different.tolist()[k] for k in order]


def _with_operations(
    rows: pd.DataFrame, ops: Mapping[str, str | None] | None
) -> tuple[pd.DataFrame, Ints]:
    """Return the rows of operations that are read, and the operation of each."""
    named: Ops = {**WORDS, **check_ops({} if ops is None else ops)}
    check_rows(rows, rows["op"].notna(), "has no op")
    try:
        number, words = rows["op"].factorize()
    except TypeError as error:  # lists
        raise TimelineError("column 'op' must have texts") from error
    codes = np.full(len(words), -1)
    texts = [x.name if isinstance(x, Op) else str(x) for x in words]
    for k, word in enumerate(texts):
        op = named.get(key := word_key(word, named), key)
        if not isinstance(op, str):
            codes[k] = len(Op) if op is None else op
    row_ops = codes[number]
    word = texts[number[(row_ops < 0).argmax()]]
    check_rows(
        rows,
        row_ops >= 0,
        f"has an op that is not read{suggestion(word, WORDS)}; say which it is, such as "
        f"ops={{{word!r:.60}: 'F'}}; ops={{{word!r:.60}: None}} leaves it out",
    )
    unread = np.isin(row_ops, _UNREAD)
    word = texts[number[unread.argmax()]]
    check_rows(
        rows,
        ~unread,
        f"has an op of which a table tells too little; ops={{{word!r:.60}: None}} leaves it out",
    )
    kept = row_ops < len(Op)
    if not kept.any():
        raise TimelineError("ops leaves out all rows of the table; name at least F")
    return rows[kept], row_ops[kept]


def _floats(rows: pd.DataFrame, column: str) -> Floats:
    from pipesim.utils.packages import pandas as pd

    values = rows[column]
    is_number = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    is_number |= pd.api.types.is_object_dtype(values) or pd.api.types.is_string_dtype(values)
    is_number &= not pd.api.types.is_complex_dtype(values)
    if not is_number:
        raise TimelineError(
            f"column {column!r} has values of type {values.dtype}; give numbers, for times such as "
            "(times - times.min()).dt.total_seconds()"
        )
    numbers = pd.to_numeric(values, errors="coerce")
    check_rows(rows, numbers.notna() | values.isna(), f"has no number as {column}")
    return numbers.to_numpy(np.float64, na_value=np.nan)


def _integers(rows: pd.DataFrame, column: str, *, lowest: int = 0) -> Ints:
    """Return a column of whole numbers; a missing micro-batch is -1."""
    numbers = _floats(rows, column)
    if lowest < 0:
        numbers = np.nan_to_num(numbers, nan=-1.0)
    # Each has rows of its own.
    valid = (numbers >= lowest) & (numbers < len(rows)) & (numbers == np.floor(numbers))
    check_rows(rows, valid, f"has no valid {column}, a whole number from 0, without gaps")
    return numbers.astype(np.int64)


def _times(rows: pd.DataFrame, unit: float) -> tuple[Floats, Floats]:
    """Return the start and end of each row (s)."""
    raw = {x: _floats(rows, x) for x in ("start", "end", "duration") if x in rows}
    for column, values in raw.items():
        check_rows(rows, np.isfinite(values), f"has no finite {column}")
    moments = raw.keys() - {"duration"}
    if all(rows[x].dtype.kind in "iu" for x in moments):  # of any origin, to the last digit
        origin = int(rows["start"].min())
        for x in moments:
            raw[x] = (rows[x].to_numpy(np.int64) - origin).astype(np.float64)
    start = raw["start"] * unit
    end = raw["end"] * unit if "end" in raw else start + raw["duration"] * unit
    check_rows(rows, end >= start, "ends before it starts")
    if "duration" in raw:
        seconds = raw["duration"] * unit
        check_rows(rows, seconds >= 0, "ends before it starts")
        other = np.abs(end - start - seconds) > _ROUNDED + 1e-9 * np.abs(end)
        check_rows(rows, ~other, "has an end that is not start + duration; leave one of them out")
    return start, end


def _places(rows: pd.DataFrame, replica: Ints) -> tuple[Ints, Ints]:
    n_replicas = int(replica.max()) + 1
    if "device" not in rows:
        if "chunk" in rows:
            raise TimelineError("the table has chunks of devices and no column 'device'")
        stage = _integers(rows, "stage")
        return replica * (int(stage.max()) + 1) + stage, stage
    device, _ = _in_order(rows, "device")
    if "stage" in rows:
        stage = _integers(rows, "stage")
    else:
        numbers = [np.unique(device[replica == r]) for r in range(n_replicas)]
        sizes = {len(x) for x in numbers}
        if len(sizes) > 1:
            raise TimelineError(
                f"the replicas have {' and '.join(map(str, sorted(sizes)))} devices; each is a "
                "whole pipeline, so that they have as many"
            )
        position = np.empty_like(device)
        for r, listed in enumerate(numbers):
            position[replica == r] = np.searchsorted(listed, device[replica == r])
        chunk = _integers(rows, "chunk") if "chunk" in rows else np.zeros_like(device)
        stage = chunk * sizes.pop() + position
    # The device of each stage of each replica: that of its first row.
    home = np.full((n_replicas, int(stage.max()) + 1), -1)
    home[replica[::-1], stage[::-1]] = device[::-1]
    check_rows(rows, home[replica, stage] == device, "has its stage on another device than before")
    if n_replicas > 1 and (home == home[0]).all():  # numbered within the replica
        device = replica * (int(device.max()) + 1) + device
    return device, stage


# The tasks


def _with_message_numbers(rows: pd.DataFrame, tasks: MeasuredTasks) -> MeasuredTasks:
    """Number messages without micro-batch: the k-th of a stage is that of its k-th F or B."""
    microbatch = tasks.microbatch.copy()
    for op in sorted(TRANSFERS):
        own = np.flatnonzero((tasks.op == op) & (microbatch < 0))
        if not len(own):
            continue
        place = tasks.place
        of_forward = op in (Op.SEND_F, Op.RECV_F)
        works = tasks.is_op((Op.F,) if of_forward else (Op.B, Op.I))
        works &= np.isin(place, place[own])
        partner = np.flatnonzero(works)
        own, partner = (x[np.lexsort((tasks.start[x], place[x]))] for x in (own, partner))
        if not np.array_equal(place[own], place[partner]):
            counts = [np.bincount(place[x], minlength=place.max() + 1) for x in (own, partner)]
            wrong = np.flatnonzero(counts[0] != counts[1])[0]
            check_rows(
                rows,
                ~np.isin(np.arange(len(tasks)), own[place[own] == wrong]),
                f"is one of {counts[0][wrong]} {op} of its stage without micro-batch, for "
                f"{counts[1][wrong]} {'F' if of_forward else 'B'}; number them, or leave {op} out",
            )
        microbatch[own] = microbatch[partner]
    return replace(tasks, microbatch=microbatch)


def _with_overlapped(tasks: MeasuredTasks) -> MeasuredTasks:
    """Split the time of an F and a B or I that one call ran together, so that the F is first.

    Each half gets a share as the median of those that ran alone; half of the time if none did.
    """
    rows = tasks.in_order((Op.F, *INPUT_GRADS))
    columns = (tasks.device, tasks.start, tasks.end)
    same = np.logical_and.reduce([column[rows[:-1]] == column[rows[1:]] for column in columns])
    same &= (tasks.op[rows[:-1]] == Op.F) != (tasks.op[rows[1:]] == Op.F)
    same[1:] &= ~same[:-1]
    pairs = np.stack([rows[:-1][same], rows[1:][same]])
    if not pairs.size:
        return tasks
    is_first = tasks.op[pairs[0]] == Op.F
    forward, backward = np.where(is_first, pairs, pairs[::-1])
    alone = ~np.isin(np.arange(len(tasks)), pairs)
    usual = np.zeros(len(Op))
    for op in (Op.F, *INPUT_GRADS):
        if (own := alone & (tasks.op == op)).any():
            usual[op] = np.median((tasks.end - tasks.start)[own])
    first, second = usual[Op.F], usual[tasks.op[backward]]
    both_alone = (first > 0) & (second > 0)
    share = np.divide(first, first + second, where=both_alone, out=np.full(len(backward), 0.5))
    start, end, other = tasks.start.copy(), tasks.end.copy(), tasks.other_half.copy()
    end[forward] = start[backward] = start[forward] + share * (end[forward] - start[forward])
    other[forward], other[backward] = backward, forward
    return replace(tasks, start=start, end=end, other_half=other)


def _check_tasks(rows: pd.DataFrame, tasks: MeasuredTasks) -> None:
    """Raise `TimelineError` for the first row that is in no pipeline, or a missing task."""
    keys = tasks.keys()
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    again = first[number] != np.arange(len(tasks))
    if again.any():
        row = int(again.argmax())
        earlier = rows.index[first[number[row]]]
        check_rows(rows, ~again, f"is the same task as row {earlier}, {_action(tasks, row)}")
    reduces = np.flatnonzero(tasks.op == Op.REDUCE_GRAD)
    columns = np.stack([x[reduces] for x in (tasks.place, tasks.start, tasks.end)])
    _, first = np.unique(columns, axis=1, return_index=True)
    again = np.isin(np.arange(len(tasks)), np.delete(reduces, first))
    check_rows(rows, ~again, "is the same REDUCE_GRAD as a row before it")
    halves = tasks.is_op((Op.I, Op.W)) & np.isin(tasks.keys(op=Op.B), keys)
    check_rows(rows, ~halves, "is a part of a backward whose B has a row, too")
    forward_only = not tasks.is_op((Op.B, Op.I, Op.W)).any()
    last = int(tasks.stage.max())
    onward = tasks.is_op((Op.SEND_F, Op.RECV_B)) & (tasks.stage == last)
    back = tasks.is_op((Op.RECV_F, Op.SEND_B)) & (tasks.stage == 0)
    back |= tasks.is_op((Op.SEND_B, Op.RECV_B)) & forward_only
    check_rows(rows, ~(onward | back), "is of a message to no stage")
    _check_overlaps(rows, tasks)
    if not (tasks.op == Op.F).any():
        raise TimelineError("the table has no F; each stage needs one for each micro-batch")
    counts = [int(column.max()) + 1 for column in (tasks.replica, tasks.stage, tasks.microbatch)]
    hint = "stages, chunks and micro-batches count from 0, without gaps, in each replica"
    if math.prod(counts) > 2 * len(tasks) + _FEW:  # more than can be listed
        raise TimelineError(
            f"the table has {len(tasks)} tasks, too few for {counts[0]} replicas, {counts[1]} "
            f"stages and {counts[2]} micro-batches; {hint}"
        )
    ids = tasks.op, tasks.device, tasks.stage, tasks.microbatch, np.zeros_like(tasks.op)
    try:
        check_all_tasks(Tasks(*ids, replica=tasks.replica), 1, forward_only)
    except TimelineError as error:
        raise TimelineError(f"{error}; {hint}") from None


def _check_overlaps(rows: pd.DataFrame, tasks: MeasuredTasks) -> None:
    """Raise `TimelineError` for a compute task that starts before one of its device ends."""
    works = tasks.in_order(COMPUTE - {Op.STEP})
    device, start, end = (x[works] for x in (tasks.device, tasks.start, tasks.end))
    latest = latest_ends(device, end)
    overlap = np.minimum(latest[:-1], end[1:]) - start[1:]
    seconds = end - start
    shorter = np.minimum(seconds[:-1], seconds[1:])
    allowed = np.maximum(np.minimum(_ROUNDED, shorter / 2), _EARLY * shorter)
    wrong = (device[:-1] == device[1:]) & (overlap > allowed)
    for k in np.flatnonzero(wrong)[:1].tolist():
        earlier = works[: k + 1][(device[: k + 1] == device[k]) & (end[: k + 1] == latest[k])][0]
        check_rows(
            rows,
            np.arange(len(rows)) != works[k + 1],
            f"starts {overlap[k]:.3g} s before row {rows.index[earlier]} ends, "
            f"{_action(tasks, earlier)} on the same device, which runs one after the other",
        )


def _action(tasks: MeasuredTasks, row: int) -> Action:
    microbatch = int(tasks.microbatch[row])
    return Action(int(tasks.stage[row]), Op(tasks.op[row]), None if microbatch < 0 else microbatch)


def timeline_from_table(
    table: object,
    *,
    columns: Mapping[str, str] | None = None,
    ops: Mapping[str, str | None] | None = None,
    unit: str = "s",
    step: object = None,
    gaps: str = "stages",
    name: str = "",
) -> Timeline:
    """Read one step of a run of another framework from a table of its measured tasks.

    The table has one row a task:

    - ``op``: a name of `pipesim.Op`, a word such as ``forward``, or a timer of Megatron-LM.
    - ``microbatch``: from 0; of the whole stage: -1 or missing. Messages without one are
      numbered in order of time: the k-th of a stage is that of its k-th F or backward.
    - ``stage`` or ``device``, or both. Stages count from 0. Without ``stage``, it is the number
      of the device within its replica, and with ``chunk``, ``chunk * n_devices`` more. Without
      ``device``, each stage of each replica is on its own.
    - ``start``, and ``end`` or ``duration``.
    - Optional: ``replica``, ``nbytes`` of messages (or ``bytes``), and ``step``.

    Other columns are ignored. Tasks may be missing: messages, which then leave when their data
    is ready, recomputes, which are then part of the backward, reductions and optimizer steps.
    Without backwards, the graph is forward-only. Several REDUCE_GRADs of a stage are its
    buckets. An UNSHARD gathers parameters for the next F or backward of its stage, or after its
    STEP. An F and a B of one device with the same times are an overlapped action, which one
    call ran.

    Time zero is the first start; waiting for a message counts from when it left. Clocks of
    devices are aligned by messages and collectives if these contradict them by more than
    100 us; see `pipesim.trace.clock_offsets.align_clocks`. The times of messages are those at
    which data moved; see `pipesim.trace.measured_tasks.timeline_of`. A REDUCE_TIED that ran
    before REDUCE_GRAD, as in Megatron-LM, comes after it in the graph (rule 3).

    ``pipesim.trace.measured_table.read_step`` returns the clock offsets and the residual error,
    too.

    Parameters
    ----------
    table
        A `pandas.DataFrame`, another library's table that Arrow reads, or a file: ``.parquet``,
        or CSV, also compressed by gzip.
    columns
        Name in the table of each of our columns that has another name there, such as
        ``{"microbatch": "mb"}``.
    ops
        Operation of each word of the table that is no name above, such as
        ``{"fwd_step": "F"}``. None leaves its rows out.
    unit
        Unit of all times: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
    step
        The step to read, a value of the column ``step``; by default the greatest.
    gaps
        Treatment of time between tasks in which a device waited for no message:

        - ``"stages"`` adds it to the operations on whole stages beside it, as a program copies
          gradients before a REDUCE_GRAD and loads data after an UNSHARD. All other tasks keep
          their times.
        - ``"charge"`` also adds it to any other task after it, so that costs include it.
        - ``"keep"`` leaves it idle.
    name
        Name of the timeline; by default that of the named schedule whose orders the tasks have,
        or else ``"measured"``.

    Returns
    -------
    Timeline
        One step.

    Raises
    ------
    TimelineError
        For a file that cannot be read, for columns that are missing, and for the first row that
        is in no pipeline: an unknown operation, a second row for one task, a task that overlaps
        another one of its device, a stage on a second device, an impossible value. For tasks of
        a micro-batch that are missing, and orders that cannot run.

    Warns
    -----
    AccuracyWarning
        If clocks cannot be aligned well: a message is still used before it was sent, by more
        than 1 % of the makespan.

    Examples
    --------
    Two devices that run F and B of two micro-batches:

    >>> import pandas as pd
    >>> import pipesim as ps
    >>> rows = [(0, "F", 0, 0), (0, "F", 1, 1), (1, "F", 0, 1), (1, "B", 0, 2), (0, "B", 0, 4),
    ...         (1, "F", 1, 4), (1, "B", 1, 5), (0, "B", 1, 7)]
    >>> table = pd.DataFrame(rows, columns=["stage", "op", "microbatch", "start"])
    >>> table["duration"] = table["op"].map({"F": 1, "B": 2})
    >>> ps.Timeline.from_table(table)
    <Timeline 1f1b: 16 tasks, makespan 9 s, bubble 33.3%>
    """
    return read_step(
        table, columns=columns, ops=ops, unit=unit, step=step, gaps=gaps, name=name
    ).timeline
