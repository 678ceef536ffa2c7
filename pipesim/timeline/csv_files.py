"""CSV files of timelines, which include the columns and settings to rebuild their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import PipeError, TimelineError, check_count, check_name, suggestion
from pipesim.graph.grad_sync import from_text, to_text
from pipesim.graph.graph import TaskGraph
from pipesim.graph.hosts import HOSTS, hosts_text
from pipesim.graph.offload_values import shares_text
from pipesim.graph.skips import skip_from_text, skip_text
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.graph.tied_stages import tied_text
from pipesim.graph.verify import verify
from pipesim.ops import OF_STAGES, Action, Op
from pipesim.scheduling.schedule import VERSIONS
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

__all__ = ["load", "save"]

#: Columns with one value in all rows. A column is left out if it has the first of these values.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "rendezvous": ("False", "True"),
    "hosts": HOSTS,
    "weight_versions": VERSIONS,
    "portals": ("True", "False"),
    "host_threads": ("False", "True"),
    "forward_only": ("False", "True"),
}
_FLAGS = ("rendezvous", "portals", "host_threads", "forward_only")
#: Columns with one count in all rows, which are left out if it is this one.
_COUNTS = {"n_batches": 1, "n_slices": 1, "prefetch": 1, "expert_replicas": 0}
#: Columns that may be missing, and their values then.
_DEFAULTS = {"replica": "0", "overlapped": "0", "peer_stage": "-1", "part": "-1"}


def save(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline; see `Timeline.save`."""
    path = check_path("path", path, "write")
    rows, graph = timeline.all_rows(), timeline.graph
    settings = {
        "rendezvous": str(graph.rendezvous),
        "hosts": hosts_text(graph.host),
        "weight_versions": graph.weight_versions,
        "portals": str(graph.portals),
        "host_threads": str(graph.host_threads),
        "forward_only": str(graph.forward_only),
    }
    for name, value in settings.items():
        if value != _SETTINGS[name][0]:
            rows[name] = value
    if graph.grad_sync != "last":
        rows["grad_sync"] = to_text(graph.grad_sync)
    for name, usual in _COUNTS.items():
        if getattr(graph, name) != usual:
            rows[name] = getattr(graph, name)
    if graph.skips:
        rows["skips"] = " ".join(map(skip_text, graph.skips))
    if graph.tied:
        rows["tied"] = tied_text(graph.tied).replace(",", " ")
    if graph.options.offload_shares:
        rows["offload_shares"] = shares_text(graph.options.offload_shares)
    if timeline.issued is not None:
        rows["issued"] = timeline.issued
    elif timeline.issue_times.any():
        rows["issued"] = timeline.issue_times
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


def load(path: Path | str, *, costs: Costs | None, name: str) -> Timeline:
    """Read a timeline; see `Timeline.load`."""
    import pandas as pd

    path = check_path("path", path)
    text = read_text(path, "a timeline from", TimelineError)
    if not text.endswith("\n"):
        raise TimelineError(f"{path} is no whole timeline: its last line was cut")
    try:
        header, rows = _table(text)
        frame = pd.DataFrame(rows, columns=header, dtype=str)
        timeline = _from_rows(frame, costs=costs, name=name or path.stem)
        _check_checksum(header, rows)  # last: an error that names a cell is more helpful
    except (PipeError, ValueError) as error:
        raise TimelineError(f"{path} is no whole timeline: {error}") from error
    return timeline


def _from_rows(rows: pd.DataFrame, costs: Costs | None, name: str) -> Timeline:
    """Return the timeline of a table of texts: read and check its columns, build its graph."""
    _read_columns(rows)
    _check_columns(rows)
    tasks = _tasks(rows)
    settings = _settings(rows)
    _check_all_tasks(tasks, settings["n_batches"], settings["forward_only"])
    graph = TaskGraph.wire(
        tasks,
        name=name,
        **settings,
        recompute="some" if (tasks.op == Op.R).any() else "never",
        overlap=bool((tasks.stream != StreamKind.COMPUTE).any()),
    )
    verify(graph)
    start, end, nbytes, *issued = (
        rows[column].to_numpy(np.float64, copy=True)  # read-only arrays are another type for numba
        for column in ("start", "end", "nbytes", "issued")
        if column in rows
    )
    return Timeline(graph, start, end, nbytes, costs, issued=issued[0] if issued else None)


def _read_columns(rows: pd.DataFrame) -> None:
    """Convert the texts of columns to numbers; fill in missing columns that have a default."""
    missing = [column for column in COLUMNS if column not in rows]
    if missing:
        near = suggestion(missing[0], map(str, rows.columns))
        raise TimelineError(f"column {missing[0]!r} is missing{near}")
    if rows.empty:
        raise TimelineError("it has no rows")
    for column, value in _DEFAULTS.items():
        if column not in rows:
            rows[column] = value
    for column in ("device", "stage", "microbatch", *_DEFAULTS):
        rows[column] = _numbers(rows, column, parse_int)
    for column in ("start", "end", "nbytes", "issued"):
        if column in rows:
            rows[column] = _numbers(rows, column, lambda text: parse_float(text or "nan"))


def _check_columns(rows: pd.DataFrame) -> None:
    """Raise `TimelineError` for the first row with an impossible value, column by column."""
    _check_rows(rows, rows["op"].isin(Op.__members__), "names an unknown op")
    _check_rows(rows, rows["stream"].map(_is_stream), "names an unknown stream")
    for column in ("device", "stage", "microbatch", "replica"):
        whole_stage = (column == "microbatch") & rows["op"].isin([op.name for op in OF_STAGES])
        in_range = (rows[column] >= np.where(whole_stage, -1, 0)) & (rows[column] < len(rows))
        _check_rows(rows, in_range, f"has no valid {column}")
    _check_rows(rows, rows["overlapped"].isin([0, 1]), "has no valid overlapped")
    in_range = (rows["peer_stage"] >= -1) & (rows["peer_stage"] <= rows["stage"].max())
    _check_rows(rows, in_range, "has no valid peer_stage")
    _check_rows(rows, ~np.isinf(rows["start"]), "has an infinite start")
    ordered = (rows["end"] >= rows["start"]) | rows["end"].isna()
    _check_rows(
        rows, ordered & ~np.isinf(rows["end"]), "ends before it starts, or has an infinite end"
    )
    _check_rows(rows, np.isfinite(rows["nbytes"]) & (rows["nbytes"] >= 0), "has no valid nbytes")
    if "issued" in rows:
        in_range = rows["issued"].isna() | (np.isfinite(rows["issued"]) & (rows["issued"] >= 0))
        _check_rows(rows, in_range, "has no valid issued")


def _tasks(rows: pd.DataFrame) -> Tasks:
    """Return the tasks of a table whose columns were checked; check and convert its streams."""
    streams = rows["stream"].map(StreamKind.code)  # integers of any size, until they are checked
    last = StreamKind.recv(rows["device"].max())
    _check_rows(rows, streams <= last, "names a stream of no device")
    streams = streams.astype(np.int64)
    in_range = StreamKind.peer(streams.to_numpy()) <= rows["device"].max()
    _check_rows(rows, in_range, "names a stream of no device")
    return Tasks(
        op=np.array([Op[name] for name in rows["op"]], dtype=np.int64),
        device=rows["device"].to_numpy(np.int64),
        stage=rows["stage"].to_numpy(np.int64),
        microbatch=rows["microbatch"].to_numpy(np.int64),
        stream=streams.to_numpy(),
        replica=rows["replica"].to_numpy(np.int64),
        overlapped=rows["overlapped"].to_numpy(np.int64),
        peer_stage=rows["peer_stage"].to_numpy(np.int64),
        part=rows["part"].to_numpy(np.int64),
    )


def _settings(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the options that a graph was lowered with and that its tasks do not show."""
    settings: dict[str, Any] = {}
    for name in (*_SETTINGS, *_COUNTS, "grad_sync", "skips", "tied", "offload_shares"):
        if name in rows:
            settings[name] = rows[name].iloc[0]
            _check_rows(rows, rows[name] == settings[name], f"has another {name} than the first")
    for name, values in _SETTINGS.items():
        settings.setdefault(name, values[0])
        if name != "hosts":  # hosts may be a list, and are checked with the graph
            check_name(name, settings[name], values)
    for name, usual in _COUNTS.items():
        number = _numbers(rows[:1], name, parse_int)[0] if name in settings else usual
        settings[name] = check_count(name, int(number), int(name in ("n_batches", "n_slices")))
    settings["grad_sync"] = from_text(settings.get("grad_sync", "last"))  # checked with the graph
    settings["skips"] = [skip_from_text(text) for text in settings.get("skips", "").split()]
    settings["tied"] = settings.get("tied", "").split()  # checked with the graph
    return settings | {name: settings[name] == "True" for name in _FLAGS}


def _numbers(rows: pd.DataFrame, column: str, parse: Callable[[str], float | None]) -> list[float]:
    """Convert a column of texts, exactly; raise `TimelineError` for the first that is no number."""
    values = []
    for line, text in enumerate(rows[column], start=2):
        value = parse(text)
        if value is None:
            raise TimelineError(f"line {line}: {column} is no number but {text!r}")
        values.append(value)
    return values


def _is_stream(name: object) -> bool:
    """Return whether a text is the name of a stream."""
    try:
        return StreamKind.name(StreamKind.code(str(name))) == name
    except (KeyError, ValueError):
        return False


def _check_all_tasks(tasks: Tasks, n_batches: int, forward_only: bool) -> None:
    """Raise `TimelineError` if a task is missing, such as in a file that was cut between lines."""
    if (np.unique(tasks.device) != np.arange(len(np.unique(tasks.device)))).any():
        raise TimelineError(f"it has no tasks of some device below {tasks.device.max()}")
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
    n_steps, stages = int((tasks.op == Op.STEP).sum()), shape[0] * shape[1] * n_batches
    if n_steps not in (0, stages):
        raise TimelineError(f"it has the STEP of {n_steps} of {stages} stages")


def _check_rows(
    rows: pd.DataFrame, good: pd.Series[bool] | NDArray[np.bool_], problem: str
) -> None:
    """Raise `TimelineError` for the first row that is not good, naming its line in the file."""
    bad = np.flatnonzero(~np.asarray(good, dtype=bool))
    if len(bad):
        values = ", ".join(map(str, rows.iloc[bad[0]].tolist()))
        raise TimelineError(f"line {bad[0] + 2} ({values}) {problem}")
