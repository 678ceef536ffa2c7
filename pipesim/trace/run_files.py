"""`load`: timelines in a file or folder of any known kind, which its content tells."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pipesim.errors import PipeError, TimelineError
from pipesim.timeline.tables import is_header
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_export import has_timelines, load_saved
from pipesim.trace.foreign_files import PP_RANK, SQLITE, TIMERS, nsys_to_chrome, read_primus
from pipesim.utils.files import GZIP, check_path, is_folder, read_bytes, read_text

_KINDS = (
    "files of pipesim.trace.save and Timeline.save, traces of torch.profiler (.json, .json.gz), "
    "SQLite exports of Nsight Systems, and pp_rank_*.json of Primus"
)
FileKind = Literal["saved", "table", "primus", "chrome", "nsys"]
_NAMES = {"chrome": "Chrome traces", "nsys": "reports of Nsight Systems"}
#: Bytes of a file by which its kind is recognised.
HEAD = 1 << 16


class LoadedTimelines(dict[str, Timeline]):
    """Timelines of a run by name; ``source`` has the kind and size of the files, in words."""

    def __init__(self, timelines: Mapping[str, Timeline], source: str) -> None:
        super().__init__(timelines)
        self.source = source


def load(path: Path | str) -> LoadedTimelines:
    """Return the timelines of a file or folder; its content tells its kind.

    ===================================================  ==================================
    content                                              timelines
    ===================================================  ==================================
    trace that `save` wrote                              all, with all bits of their times
    CSV or Parquet of `Timeline.save`                    one
    traces of `torch.profiler`, or other Chrome traces   the last step
    SQLite exports of Nsight Systems                     the last step
    ``pp_rank_0.json``, ... of Primus                    all steps
    ===================================================  ==================================

    Logs with timers of Megatron-LM or DeepSpeed have no timelines; see `read_timers`.

    Parameters
    ----------
    path
        File; or folder with a file a rank.

    Returns
    -------
    dict
        Timelines by name, in their order in the file. Steps have names such as ``"step 3"``, the
        number for ``step=`` of `Timeline.from_chrome`, or the number in the files of Primus.

        The dict has an attribute ``source``, a text: ``"Chrome traces of 2 ranks, the last of 3
        whole steps"``.

        Timelines have no costs; set them with ``dataclasses.replace(timeline, costs=costs)``.

    Raises
    ------
    TimelineError
        For a file that cannot be read, was cut or changed, or has no timelines.
    CapacityError
        For a file that is too large for memory, once decompressed.

    Examples
    --------
    >>> import tempfile
    >>> import pipesim as ps
    >>> timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     timeline.to_chrome(f"{folder}/run.json.gz")
    ...     run = ps.trace.load(f"{folder}/run.json.gz")
    >>> run
    {'1f1b': <Timeline 1f1b: 34 tasks, makespan 15 s, bubble 20.0%>}
    >>> run.source
    'trace of pipesim.trace.save'
    """
    from pipesim.trace import chrome_import  # which takes a while to import

    path = check_path("path", path)
    match file_kind(path):
        case "saved":
            return LoadedTimelines(load_saved(path), "trace of pipesim.trace.save")
        case "table":
            timeline = Timeline.load(path)
            return LoadedTimelines({timeline.name: timeline}, "table of Timeline.save")
        case "primus":
            table = read_primus(path)
            n_ranks = table["device"].nunique()
            ranks = table.groupby("step")["device"].nunique()
            whole = ranks.index[ranks == n_ranks].tolist()
            if not whole:
                raise TimelineError(f"{path}: no step has times of all {n_ranks} ranks")
            steps = {
                f"step {step}": Timeline.from_table(table, step=step, name=f"step {step}")
                for step in whole
            }
            cut = f", {len(ranks) - len(whole)} without all ranks" * (len(whole) < len(ranks))
            return LoadedTimelines(
                steps, f"times of Primus of {n_ranks} ranks, {len(steps)} steps{cut}"
            )
        case kind:
            with as_chrome(path, kind) as traces:
                imported = chrome_import.load(traces)
    n_steps = imported.n_steps
    name = f"step {n_steps - 1}"
    timeline = imported.timeline.with_name(name)
    which = f"the last of {n_steps} whole steps" if n_steps > 1 else "one whole step"
    source = f"{_NAMES[kind]} of {timeline.n_devices} ranks, {which}"
    return LoadedTimelines({name: timeline}, source)


@contextlib.contextmanager
def as_chrome(path: Path, kind: FileKind) -> Iterator[Path | list[Path]]:
    """Yield Chrome traces: those of ``path``, or of its exports of Nsight Systems."""
    if kind != "nsys":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield nsys_to_chrome(path, folder)
        except PipeError as error:
            raise type(error)(str(error).replace(folder, str(path))) from error


def head_kind(path: Path, head: bytes) -> Literal["nsys", "table", "json"] | None:
    """Return the kind of a file by its name and its first bytes; None for another text."""
    if head.startswith(SQLITE) or path.suffix.lower() in (".nsys-rep", ".qdrep"):
        return "nsys"
    if path.suffix.lower() == ".parquet":
        return "table"
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if head.startswith(GZIP) or text[:1] in ("{", "["):
        return "json"
    return "table" if is_header(text.partition("\n")[0]) else None


def file_kind(path: Path) -> FileKind:
    """Return the kind of a file or folder."""
    if is_folder(path):
        try:
            names = [file.name for file in path.iterdir() if not file.name.startswith(".")]
        except OSError as error:
            raise TimelineError(f"cannot read the folder {path}: {error.strerror}") from error
        if any(PP_RANK.fullmatch(name) for name in names):
            return "primus"
        if any(name.endswith(".sqlite") for name in names):
            return "nsys"
        if any(name.endswith((".json", ".json.gz")) for name in names):
            return "chrome"
        raise TimelineError(
            f"the folder {path} has no timelines; pipesim.trace.load reads {_KINDS}"
        )
    head = read_bytes(path, "timelines from", TimelineError, first=HEAD)
    kind = head_kind(path, head)
    if kind == "json" and b'"fwd_start"' in head:
        return "primus"
    if kind == "json":
        return "saved" if has_timelines(path) else "chrome"
    if kind is not None:
        return kind
    text = "" if b"\0" in head else read_text(path, "timelines from", TimelineError)
    if TIMERS.search(text):
        raise TimelineError(
            f"{path} is a log with timers, sums over the tasks of a step: it does not tell when a "
            "task ran, so there is no timeline; read seconds of each operation with "
            "pipesim.trace.read_timers, and make Costs of them"
        )
    raise TimelineError(
        f"{path} has no timelines: it begins with {head[:40]!r}; pipesim.trace.load reads "
        f"{_KINDS}, Timeline.from_table a table of tasks"
    )
