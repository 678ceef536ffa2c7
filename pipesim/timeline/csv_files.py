"""Timelines as CSV files, with all that makes their graphs again."""

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
from pipesim.graph.skips import skip_from_text, skip_text
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.graph.verify import verify
from pipesim.ops import OF_STAGES, Action, Op
from pipesim.scheduling.schedule import VERSIONS
from pipesim.timeline.timeline import COLUMNS, Timeline
from pipesim.utils.atomic_write import check_path, read_text, write_text
from pipesim.utils.texts import CHECKSUM, changed, checksum, csv_rows, real, whole

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load", "save"]

#: Columns that are the same in every row and left out where they have the first value.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "rendezvous": ("False", "True"),
    "hosts": HOSTS,
    "weight_versions": VERSIONS,
    "portals": ("True", "False"),
    "host_threads": ("False", "True"),
}
_FLAGS = ("rendezvous", "portals", "host_threads")
#: What columns that may be missing hold then.
_DEFAULTS = {"replica": "0", "overlapped": "0", "peer_stage": "-1", "part": "-1"}


def save(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline; `Timeline.save` says how."""
    path = check_path("path", path, "write")
    rows, graph = timeline.all_rows(), timeline.graph
    settings = {
        "rendezvous": str(graph.rendezvous),
        "hosts": hosts_text(graph.host),
        "weight_versions": graph.weight_versions,
        "portals": str(graph.portals),
        "host_threads": str(graph.host_threads),
    }
    for name, value in settings.items():
        if value != _SETTINGS[name][0]:
            rows[name] = value
    if graph.grad_sync != "last":
        rows["grad_sync"] = to_text(graph.grad_sync)
    if graph.n_batches > 1:
        rows["n_batches"] = graph.n_batches
    if graph.skips:
        rows["skips"] = " ".join(map(skip_text, graph.skips))
    if timeline.issued is not None:
        rows["issued"] = timeline.issued
    elif timeline.issue_times.any():
        rows["issued"] = timeline.issue_times
    write_text(path, _signed(rows.to_csv(index=False)))


def _signed(text: str) -> str:
    """Return a CSV with its checksum: a column whose first row has it, the others being empty."""
    found, place = checksum(text), len(COLUMNS)
    lines = [line.split(",", place) for line in text.removesuffix("\n").split("\n")]
    for line, value in zip(lines, [CHECKSUM, found, *[""] * (len(lines) - 2)], strict=True):
        line.insert(place, value)
    return "".join(",".join(line) + "\n" for line in lines)


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a CSV; rows are as long as the header."""
    lines = [(line, cells) for line, cells in csv_rows(text) if cells]
    if not lines:
        raise TimelineError("it is empty")
    (_, header), *rows = lines
    for name in header:
        if header.count(name) > 1:
            raise TimelineError(f"column {name!r} is there twice; give it once")
    for line, cells in rows:
        if len(cells) != len(header):
            raise TimelineError(
                f"line {line}: {len(cells)} values for {len(header)} columns; give one a column"
            )
    return header, [cells for _, cells in rows]


def _check_checksum(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise if the file has a checksum, which is that of other content."""
    if CHECKSUM not in header:
        return
    place = header.index(CHECKSUM)
    given = "".join(row[place] for row in rows)
    text = "".join(",".join([*row[:place], *row[place + 1 :]]) + "\n" for row in (header, *rows))
    if given and given != checksum(text):
        raise TimelineError(changed("it", f"empty its column {CHECKSUM!r}"))


def load(path: Path | str, *, costs: Costs | None, name: str) -> Timeline:
    """Read a timeline; `Timeline.load` says what of."""
    import pandas as pd

    path = check_path("path", path)
    text = read_text(path, "a timeline from", TimelineError)
    if not text.endswith("\n"):
        raise TimelineError(f"{path} is no whole timeline: its last line was cut")
    try:
        header, rows = _table(text)
        frame = pd.DataFrame(rows, columns=header, dtype=str)
        timeline = _from_rows(frame, costs=costs, name=name or path.stem)
        _check_checksum(header, rows)  # last: an error that names a cell says more
    except (PipeError, ValueError) as error:
        raise TimelineError(f"{path} is no whole timeline: {error}") from error
    return timeline


def _from_rows(rows: pd.DataFrame, costs: Costs | None, name: str) -> Timeline:
    """Check the columns of a saved timeline and wire its graph again."""
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
        rows[column] = _read(rows, column, whole)
    times = ("start", "end", "nbytes", *(["issued"] if "issued" in rows else []))
    for column in times:
        rows[column] = _read(rows, column, lambda text: real(text or "nan"))
    _check_rows(rows, rows["op"].isin(Op.__members__), "names an unknown op")
    _check_rows(rows, rows["stream"].map(_is_stream), "names an unknown stream")
    for column in ("device", "stage", "microbatch", "replica"):
        whole_stage = (column == "microbatch") & rows["op"].isin([op.name for op in OF_STAGES])
        in_range = (rows[column] >= np.where(whole_stage, -1, 0)) & (rows[column] < len(rows))
        _check_rows(rows, in_range, f"has no valid {column}")
    _check_rows(rows, rows["overlapped"].isin([0, 1]), "has no valid overlapped")
    in_range = (rows["peer_stage"] >= -1) & (rows["peer_stage"] <= rows["stage"].max())
    _check_rows(rows, in_range, "has no valid peer_stage")
    _check_rows(rows, ~np.isinf(rows["start"]), "starts never")
    ordered = (rows["end"] >= rows["start"]) | rows["end"].isna()
    _check_rows(rows, ordered & ~np.isinf(rows["end"]), "ends before it starts, or never")
    _check_rows(rows, np.isfinite(rows["nbytes"]) & (rows["nbytes"] >= 0), "has no valid nbytes")
    if "issued" in rows:
        in_range = rows["issued"].isna() | (np.isfinite(rows["issued"]) & (rows["issued"] >= 0))
        _check_rows(rows, in_range, "has no valid issued")
    streams = rows["stream"].map(StreamKind.code)  # of any size, until they are checked
    last = StreamKind.recv(rows["device"].max())
    _check_rows(rows, streams <= last, "names a stream of no device")
    streams = streams.astype(np.int64)
    of_devices = StreamKind.peer(streams.to_numpy()) <= rows["device"].max()
    _check_rows(rows, of_devices, "names a stream of no device")
    tasks = Tasks(
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
    settings = _settings(rows)
    _check_whole(tasks, settings["n_batches"])
    graph = TaskGraph.wire(
        tasks,
        name=name,
        **settings,
        recompute="some" if (tasks.op == Op.R).any() else "never",
        overlap=bool((tasks.stream != StreamKind.COMPUTE).any()),
    )
    verify(graph)
    start, end, nbytes, *issued = (
        rows[column].to_numpy(np.float64, copy=True)  # or else it is read-only, for numba a type
        for column in times
    )
    return Timeline(graph, start, end, nbytes, costs, issued=issued[0] if issued else None)


def _settings(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what a graph was lowered with, as far as its tasks do not show it."""
    found: dict[str, Any] = {}
    for name in (*_SETTINGS, "grad_sync", "n_batches", "skips"):
        if name in rows:
            found[name] = rows[name].iloc[0]
            _check_rows(rows, rows[name] == found[name], f"has another {name} than the first")
    for name, values in _SETTINGS.items():
        found.setdefault(name, values[0])
        if name != "hosts":  # which may be a list, and are checked with the graph
            check_name(name, found[name], values)
    found["n_batches"] = int(_read(rows[:1], "n_batches", whole)[0]) if "n_batches" in found else 1
    check_count("n_batches", found["n_batches"])
    found["grad_sync"] = from_text(found.get("grad_sync", "last"))  # checked with the graph
    found["skips"] = [skip_from_text(text) for text in found.get("skips", "").split()]
    return found | {name: found[name] == "True" for name in _FLAGS}


def _read(rows: pd.DataFrame, column: str, read: Callable[[str], float | None]) -> list[float]:
    """Convert a column of texts, exactly; name the line of one that is no such number."""
    values = []
    for line, text in enumerate(rows[column], start=2):
        value = read(text)
        if value is None:
            raise TimelineError(f"line {line}: {column} is no number but {text!r}")
        values.append(value)
    return values


def _is_stream(name: object) -> bool:
    try:
        return StreamKind.name(StreamKind.code(str(name))) == name
    except (KeyError, ValueError):
        return False


def _check_whole(tasks: Tasks, n_batches: int) -> None:
    """Raise if tasks that every step has are missing, as in a file that was cut between lines."""
    if (np.unique(tasks.device) != np.arange(len(np.unique(tasks.device)))).any():
        raise TimelineError(f"it has no tasks of some device below {tasks.device.max()}")
    replica = np.zeros_like(tasks.op) if tasks.replica is None else tasks.replica
    shape = replica.max() + 1, tasks.stage.max() + 1, tasks.microbatch.max() + 1
    taken = np.zeros((shape[0], 1, shape[2]), dtype=bool)  # the micro-batches of each replica
    of_any = tasks.microbatch >= 0
    taken[replica[of_any], 0, tasks.microbatch[of_any]] = True
    taken[:, 0, ~taken.any(axis=(0, 1))] = True  # what none has is missing everywhere
    for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W)):
        there = np.zeros(shape, dtype=bool)
        of_op = np.isin(tasks.op, ops)
        there[replica[of_op], tasks.stage[of_op], tasks.microbatch[of_op]] = True
        for _, stage, microbatch in np.argwhere(~there & taken):
            raise TimelineError(f"{Action(int(stage), ops[0], int(microbatch))} is missing")
    n_steps, stages = int((tasks.op == Op.STEP).sum()), shape[0] * shape[1] * n_batches
    if n_steps not in (0, stages):
        raise TimelineError(f"it has the STEP of {n_steps} of {stages} stages")


def _check_rows(
    rows: pd.DataFrame, good: pd.Series[bool] | NDArray[np.bool_], problem: str
) -> None:
    """Raise for the first row that is not good, by its line in the file."""
    bad = np.flatnonzero(~np.asarray(good, dtype=bool))
    if len(bad):
        values = ", ".join(map(str, rows.iloc[bad[0]].tolist()))
        raise TimelineError(f"line {bad[0] + 2} ({values}) {problem}")
