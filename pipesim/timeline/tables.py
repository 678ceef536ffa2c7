"""Timelines as tables of their tasks and settings, and as CSV files.

The graph is built from a table again. CSV and Parquet files and Arrow tables have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import PipeError, TimelineError, suggestion
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import FILE_OPTIONS, hosts_text, parse_option
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.graph.verify import verify
from pipesim.ops import OF_STAGES, Action, Op
from pipesim.scheduling.placement import is_first_on_device
from pipesim.timeline.timeline import COLUMNS, Timeline
from pipesim.utils.files import check_path, read_text, write_text
from pipesim.utils.texts import (
    CHECKSUM,
    checksum,
    checksum_mismatch,
    csv_rows,
    parse_float,
    parse_int,
)

if TYPE_CHECKING:
    import pandas as pd


#: Options of a graph that its tasks do not show.
SETTINGS = ("hosts", *FILE_OPTIONS)
#: Columns of integers that may be missing, and their values then.
OPTIONAL = {"replica": 0, "overlapped": 0, "peer_stage": -1, "part": -1}
#: Columns of integers, and of floats.
INTEGERS = ("device", "stage", "microbatch", *OPTIONAL)
SECONDS_AND_BYTES = ("start", "end", "nbytes", "issued")


def to_rows(timeline: Timeline) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the tasks of a timeline, and the settings of its graph as texts.

    The tasks are `Timeline.all_rows`, and ``issued`` if it is known. The texts are those of
    `SETTINGS` that are not the default.
    """
    rows, graph = timeline.all_rows(), timeline.graph
    settings = graph.options.texts()
    if (hosts := hosts_text(graph.host)) != "one":
        settings["hosts"] = hosts
    if timeline.issued is not None:
        rows["issued"] = timeline.issued
    elif timeline.issue_times.any():
        rows["issued"] = timeline.issue_times
    return rows, settings


def from_rows(
    rows: pd.DataFrame, settings: Mapping[str, str], *, costs: Costs | None, name: str
) -> Timeline:
    """Return the timeline of `to_rows`: check tasks and settings, and build the graph.

    Further columns are ignored. The index numbers the rows in error messages, after its name.
    """
    check_shape(rows)
    for column, value in OPTIONAL.items():
        if column not in rows:
            rows = rows.assign(**{column: value})
    _check_columns(rows)
    tasks = _tasks(rows)
    options = {name: parse_option(name, text) for name, text in settings.items()}
    check_all_tasks(tasks, options.get("n_batches", 1), options.get("forward_only", False))
    graph = TaskGraph.wire(
        tasks,
        name=name,
        **options,
        recompute="some" if (tasks.op == Op.R).any() else "never",
        overlap=bool((tasks.stream != StreamKind.COMPUTE).any()),
    )
    verify(graph)
    start, end, nbytes, *issued = (
        rows[column].to_numpy(np.float64, copy=True)  # read-only arrays are another type for numba
        for column in SECONDS_AND_BYTES
        if column in rows
    )
    return Timeline(graph, start, end, nbytes, costs, issued=issued[0] if issued else None)


def check_shape(rows: pd.DataFrame) -> None:
    """Raise `TimelineError` unless a table has all `COLUMNS`, and rows."""
    missing = [column for column in COLUMNS if column not in rows]
    if missing:
        near = suggestion(missing[0], map(str, rows.columns))
        raise TimelineError(f"column {missing[0]!r} is missing{near}")
    if rows.empty:
        raise TimelineError("it has no rows")


def _check_columns(rows: pd.DataFrame) -> None:
    check_rows(rows, rows["op"].isin(Op.__members__), "names an unknown op")
    check_rows(rows, rows["stream"].map(_is_stream), "names an unknown stream")
    for column in ("device", "stage", "microbatch", "replica"):
        whole_stage = (column == "microbatch") & rows["op"].isin([op.name for op in OF_STAGES])
        in_range = (rows[column] >= np.where(whole_stage, -1, 0)) & (rows[column] < len(rows))
        check_rows(rows, in_range, f"has no valid {column}")
    check_rows(rows, rows["overlapped"].isin([0, 1]), "has no valid overlapped")
    in_range = (rows["peer_stage"] >= -1) & (rows["peer_stage"] <= rows["stage"].max())
    check_rows(rows, in_range, "has no valid peer_stage")
    check_rows(rows, ~np.isinf(rows["start"]), "has an infinite start")
    ordered = (rows["end"] >= rows["start"]) | rows["end"].isna()
    check_rows(
        rows, ordered & ~np.isinf(rows["end"]), "ends before it starts, or has an infinite end"
    )
    check_rows(rows, np.isfinite(rows["nbytes"]) & (rows["nbytes"] >= 0), "has no valid nbytes")
    if "issued" in rows:
        in_range = rows["issued"].isna() | (np.isfinite(rows["issued"]) & (rows["issued"] >= 0))
        check_rows(rows, in_range, "has no valid issued")


def _tasks(rows: pd.DataFrame) -> Tasks:
    """Return the tasks of a table whose columns were checked; check and convert its streams."""
    streams = rows["stream"].map(StreamKind.code)  # integers of any size, until they are checked
    last = StreamKind.recv(rows["device"].max())
    check_rows(rows, streams <= last, "names a stream of no device")
    streams = streams.astype(np.int64)
    in_range = StreamKind.peer(streams.to_numpy()) <= rows["device"].max()
    check_rows(rows, in_range, "names a stream of no device")
    return Tasks(
        op=np.array([Op[name] for name in rows["op"]], dtype=np.int64),
        stream=streams.to_numpy(),
        **{name: rows[name].to_numpy(np.int64) for name in INTEGERS},
    )


def _is_stream(name: object) -> bool:
    try:
        return StreamKind.name(StreamKind.code(str(name))) == name
    except (KeyError, ValueError):
        return False


def check_all_tasks(tasks: Tasks, n_batches: int, forward_only: bool) -> None:
    """Raise `TimelineError` if a task is missing, such as in a file that was cut between lines."""
    replica = np.zeros_like(tasks.op) if tasks.replica is None else tasks.replica
    shape = replica.max() + 1, tasks.stage.max() + 1, tasks.microbatch.max() + 1
    expected = np.zeros((shape[0], 1, shape[2]), dtype=bool)  # the micro-batches of each replica
    rows = tasks.microbatch >= 0
    expected[replica[rows], 0, tasks.microbatch[rows]] = True
    expected[:, 0, ~expected.any(axis=(0, 1))] = True  # of no replica: missing in all of them
    for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W))[: 1 if forward_only else 3]:
        exists = np.zeros(shape, dtype=bool)
        rows = np.isin(tasks.op, ops)
        exists[replica[rows], tasks.stage[rows], tasks.microbatch[rows]] = True
        for _, stage, microbatch in np.argwhere(~exists & expected):
            raise TimelineError(f"{Action(int(stage), ops[0], int(microbatch))} is missing")
    if (np.unique(tasks.device) != np.arange(len(np.unique(tasks.device)))).any():
        raise TimelineError(f"it has no tasks of some device below {tasks.device.max()}")
    home = np.zeros(shape[:2], dtype=np.int64)
    home[replica, tasks.stage] = tasks.device
    n_copies = int(is_first_on_device(home).sum())  # replicas may share a stage on one device
    n_steps, stages = int((tasks.op == Op.STEP).sum()), n_copies * n_batches
    if n_steps not in (0, stages):
        raise TimelineError(f"it has the STEP of {n_steps} of {stages} stages")


def check_rows(rows: pd.DataFrame, good: pd.Series[bool] | NDArray[np.bool_], problem: str) -> None:
    """Raise `TimelineError` for the first row that is not good, with its number in the index."""
    bad = np.flatnonzero(~np.asarray(good, dtype=bool))
    if len(bad):
        values = ", ".join(map(str, rows.iloc[bad[0]].tolist()))
        raise TimelineError(f"{rows.index.name} {rows.index[bad[0]]} ({values}) {problem}")


# CSV files: tasks, settings of their graph as columns, and a checksum

#: Line of the first task in a file.
_FIRST_LINE = 2


def save_csv(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline; see `Timeline.save`."""
    path = check_path("path", path, "write")
    rows, settings = to_rows(timeline)
    issued = [rows.pop("issued")] if "issued" in rows else []
    rows = rows.assign(**settings)
    for column in issued:
        rows["issued"] = column
    write_text(path, _signed(rows.to_csv(index=False)))


def _signed(text: str) -> str:
    """Return a CSV with a column for its checksum, which the first row has; others are empty."""
    index = len(COLUMNS)
    lines = [line.split(",", index) for line in text.removesuffix("\n").split("\n")]
    column = [CHECKSUM, checksum(text), *[""] * (len(lines) - 2)]
    for line, value in zip(lines, column, strict=True):
        line.insert(index, value)
    return "".join(",".join(line) + "\n" for line in lines)


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a CSV; rows are as long as the header."""
    lines = [(line, cells) for line, cells in csv_rows(text) if cells]
    if not lines:
        raise TimelineError("it is empty")
    (_, header), *rows = lines
    for name in header:
        if header.count(name) > 1:
            raise TimelineError(f"column {name!r} occurs twice; give it once")
    for line, cells in rows:
        if len(cells) != len(header):
            raise TimelineError(
                f"line {line}: {len(cells)} values for {len(header)} columns; give one a column"
            )
    return header, [cells for _, cells in rows]


def _check_checksum(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise `TimelineError` if the file has a checksum that does not match its content."""
    if CHECKSUM not in header:
        return
    index = header.index(CHECKSUM)
    signature = "".join(row[index] for row in rows)
    text = "".join(",".join([*row[:index], *row[index + 1 :]]) + "\n" for row in (header, *rows))
    if signature and signature != checksum(text):
        raise TimelineError(checksum_mismatch("it", f"empty its column {CHECKSUM!r}"))


def is_header(line: str) -> bool:
    """Return whether the first line of a text is that of a saved timeline."""
    cells = [cell.strip() for cell in line.split(",")]
    return cells[0] == COLUMNS[0] or "stream" in cells


def load_csv(path: Path | str, *, costs: Costs | None, name: str) -> Timeline:
    """Read a timeline; see `Timeline.load`."""
    path = check_path("path", path)
    text = read_text(path, "a timeline from", TimelineError)
    if not text.endswith("\n"):
        raise TimelineError(f"{path} is no whole timeline: its last line was cut")
    try:
        header, rows = _table(text)
        frame = _frame(header, rows)
        # Each setting is a column with one value in all rows.
        settings = {name: frame[name].iloc[0] for name in SETTINGS if name in frame}
        for setting, value in settings.items():
            check_rows(frame, frame[setting] == value, f"has another {setting} than the first")
        timeline = from_rows(frame, settings, costs=costs, name=name or path.stem)
        _check_checksum(header, rows)  # last: an error that names a cell is more helpful
    except (PipeError, ValueError) as error:
        raise TimelineError(f"{path} is no whole timeline: {error}") from error
    return timeline


def _frame(header: list[str], cells: list[list[str]]) -> pd.DataFrame:
    """Return a table with its columns of numbers converted, and lines of the file as index."""
    from pipesim.utils.packages import pandas as pd

    rows = pd.DataFrame(cells, columns=header, dtype=str)
    rows.index = pd.RangeIndex(_FIRST_LINE, _FIRST_LINE + len(rows), name="line")
    check_shape(rows)
    for column in INTEGERS:
        if column in rows or column not in OPTIONAL:
            rows[column] = _numbers(rows, column, parse_int)
    for column in SECONDS_AND_BYTES:
        if column in rows:
            rows[column] = _numbers(rows, column, lambda text: parse_float(text or "nan"))
    return rows


def _numbers(rows: pd.DataFrame, column: str, parse: Callable[[str], float | None]) -> list[float]:
    """Convert a column of texts, exactly; raise `TimelineError` for the first that is no number."""
    values = []
    for line, text in zip(rows.index, rows[column], strict=True):
        value = parse(text)
        if value is None:
            raise TimelineError(f"line {line}: {column} is no number but {text!r}")
        values.append(value)
    return values
