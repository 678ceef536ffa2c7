"""Find the trace files of a run, assign their events to ranks, and read one trace a rank.

torch.profiler writes one file a rank. Other programs, `pipesim.trace.save` among them, write one
file in which each process is a rank.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import COMPUTE
from pipesim.trace.chrome_json import complete_events, load, row_labels
from pipesim.trace.profiler_ranges import Range, Span, Trace, read_trace
from pipesim.trace.range_names import PATTERNS, RangeReader, RangeRules, range_readers
from pipesim.trace.working_times import replace_by_halves
from pipesim.utils.files import check_path, is_folder

# Ranks in a file

#: Seconds by which ranges may overlap, as times are rounded.
_ROUNDED = 1e-6


def read_traces(path: Path, content: Mapping[str, Any], reader: RangeReader) -> list[Trace]:
    """Return the traces of a file, at least one: one for each rank or process, by its number.

    The header's rank holds for a file of one process. Of several processes the ranks are unknown:
    None. Events of GPUs belong to the process that launched them. ``content`` is as
    `pipesim.trace.chrome_json.load` returns it.
    """
    whole = read_trace(path, content, reader)
    processes = sorted({item.thread[0] for item in whole.ranges}, key=_process_order)
    if len(processes) < 2:
        return [whole]
    traces = [read_trace(path, content, reader, process) for process in processes]
    launches = Counter(
        x for trace in traces for x in {x for _, _, x in trace.launches if x in trace.kernels}
    )
    for correlation, count in launches.items():
        if count > 1:
            raise TimelineError(
                f"{path}: processes {' and '.join(processes)} have launched kernels with the same "
                f"correlation, {correlation!r}, so that they cannot be told apart; give one file "
                "a rank"
            )
    for trace in traces:
        trace.rank = None
    return traces


def _process_order(process: str) -> tuple[bool, int, str]:
    """Return the sort key of a process: those with a number by it, then the others by name."""
    numbered = process.isdecimal() and len(process) < 20
    return not numbered, int(process) if numbered else 0, process


def check_threads(trace: Trace, times: Sequence[tuple[Range, Span]]) -> None:
    """Raise if compute actions ran at the same time on several threads of one rank.

    ``times`` has the ranges of ``trace`` in order of start, and when each worked.
    """
    compute = [pair for pair in times if pair[0].action.op in COMPUTE]
    compute.sort(key=lambda pair: pair[1].start)
    for (one, first), (other, second) in pairwise(compute):
        if one.thread == other.thread or (
            one.overlapped is not None and one.overlapped is other.overlapped
        ):
            continue
        if min(first.end, second.end) - second.start > _ROUNDED:
            raise TimelineError(
                f"{trace.path}: {one.action} and {other.action} ran at the same time on threads "
                f"{one.thread[1]} and {other.thread[1]} of one rank, which runs one action after "
                "the other; give each rank a process or a file of its own, or give the place of "
                "its number as 'rank' in fields, or choose one replica with only"
            )


# Files of a run

#: Names of ranges that a message shows.
_N_SHOWN = 5
#: Most files that a message names.
_SHOWN = 8
#: Keys of args that may have the number of a micro-batch, such as micro_batch, mb_id and seq_id.
_NUMBERS = re.compile(r"batch|(^|_)mb(_|$)|^seq_", re.IGNORECASE)


_ENDING = re.compile(
    r"((\.pt)?(\.trace)?\.json(\.gz)?|\.csv|\.txt|\.parquet|\.sqlite)$", re.IGNORECASE
)


def stem(path: Path) -> str:
    """Return the name of a file without its ending, or of a folder."""
    if is_folder(path):
        return path.resolve().name or "timeline"
    return _ENDING.sub("", path.name) or "timeline"


def list_files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    """Return the given files, or the traces in the given directory in order of name."""
    if isinstance(paths, str | os.PathLike):
        path = check_path("paths", paths)
        if not is_folder(path):
            return [path]
        try:
            names = [file.name for file in path.iterdir()]
        except OSError as error:
            raise TimelineError(f"cannot read the folder {path}: {error.strerror}") from error
        # Hidden files are those of editors and systems.
        traces = [x for x in names if x.endswith((".json", ".json.gz")) and not x.startswith(".")]
        if not traces:
            raise TimelineError(f"there is no trace in {path}: no file ends in .json or .json.gz")
        return sorted(path / name for name in traces)
    listed = list(paths) if isinstance(paths, Iterable) else [None]
    if not all(isinstance(path, str | os.PathLike) for path in listed):
        raise ArgumentError(
            f"traces are given by a path, or several, got {paths!r}; give one file a rank, or "
            "their directory"
        )
    files = [check_path(f"paths[{k}]", path) for k, path in enumerate(listed)]
    if not files:
        raise TimelineError("got no traces; give one file a rank, or their directory")
    return files


def read_ranks(
    files: Sequence[Path],
    rules: RangeRules,
    n_ranks: int | None,
    content: Mapping[str, Any] | None = None,
) -> list[Trace]:
    """Return the traces of all ranks of a run, in order of rank.

    ``content`` is that of a single file, if it was loaded before.
    """
    by_file = [
        _read_file(path, content or load(path), rules, rank) for rank, path in enumerate(files)
    ]
    for path, traces in zip(files, by_file, strict=True):
        if len(files) > 1 and len(traces) > 1:
            raise TimelineError(
                f"{path} has ranges of {len(traces)} processes, and is one of {len(files)} files; "
                "give one file a rank, or one file with a process a rank"
            )
    return _sorted_by_rank([trace for traces in by_file for trace in traces], n_ranks)


def _read_file(
    path: Path, content: Mapping[str, Any], rules: RangeRules, first_rank: int
) -> list[Trace]:
    """Read a file's traces in the first of several ways in which any of its events is a range.

    Traces without a rank of their own are numbered from ``first_rank``.
    """
    for reader in range_readers(path, content, rules):
        traces = read_traces(path, content, reader)
        for rank, trace in enumerate(traces, start=first_rank):
            ranges = replace_by_halves(trace)
            if trace.rank is None:
                trace.rank = rank
            if reader.rank_is_stage:
                ranges = [r._replace(action=r.action._replace(stage=trace.rank)) for r in ranges]
            trace.ranges = ranges
        if traces[0].ranges:
            return traces
    raise TimelineError(_no_range(path, content, traces[0], rules))


def _no_range(path: Path, content: Mapping[str, Any], trace: Trace, rules: RangeRules) -> str:
    """Return a message about a trace without ranges: its content, and the next thing to do."""
    labels = row_labels(content)
    events = [event for _, event in complete_events(path, content)]
    for what, place, value in [
        *(("only", place, value) for place, value in rules.only.items()),
        *((f"fields[{field!r}]", place, None) for field, place in rules.fields.items()),
    ]:
        texts = dict.fromkeys(place.text(event, labels) for event in events)
        if set(texts) <= {None} if value is None else value not in texts:
            wanted = "anything" if value is None else repr(value)
            shown = _listed([text for text in texts if text is not None])
            values = shown or f"args with {_listed(_keys(events))}"
            return (
                f"{path} has no event with {wanted} at {place}, which is the place in {what}; its "
                f"events have {values}"
            )
    if rules.fields:
        return (
            f"{path} has no event with all of {', '.join(rules.fields)} whose operation ops does "
            "not leave out; leave out the field that only other events have"
        )
    names = _listed(trace.names)
    n_operations = len(trace.operations) + len(trace.communication)
    n_kernels = sum(map(len, trace.kernels.values()))
    contents = f"its ranges are {names}"
    if not names:
        contents = f"it has no ranges, but {n_operations} operations and {n_kernels} kernels"
        if not n_operations + n_kernels:
            contents = "it has no ranges, operations or kernels"
    wanted = "Each forward and backward of a stage needs a range such as 'PP:0F0' and 'PP:0B0'"
    problem = "names the action of a stage"
    if rules.patterns != PATTERNS:
        problem = f"matches the pattern {rules.patterns[0]!r} with its whole name"
        wanted = "Each forward and backward of a stage needs a range that matches"
    # A name in a file may be of any type, also one that has no hash.
    range_names = list(trace.names)
    others = [event for event in events if event.get("name") in range_names]
    numbered = next((key for key in _keys(others) if _NUMBERS.search(key)), None)
    if numbered is not None:
        processes = [f"{event.get('pid')}" for event in others]
        return (
            f"{path} has no range that {problem}: {contents}. Its events have args.{numbered} "
            f"and pid {_listed(processes)}: say what these are, such as fields={{'op': 'name', "
            f"'microbatch': 'args.{numbered}', 'stage': 'pid'}}"
        )
    return (
        f"{path} has no range that {problem}: {contents}. {wanted}: annotate them with "
        "torch.profiler.record_function('PP:0F0') (stage 0, forward, micro-batch 0), in "
        "torch.distributed.pipelining with pipeexec.annotate_torch_pipelining(), or give pattern= "
        "for the names that your ranges have, or fields= for the places of their events"
    )


def _keys(events: Iterable[Mapping[str, Any]]) -> list[str]:
    args = [event["args"] for event in events if isinstance(event.get("args"), dict)]
    pairs = (pair for item in args for pair in item.items())
    return [*dict.fromkeys(str(key) for key, value in pairs if value is not None)]


def _listed(texts: Iterable[str]) -> str:
    quoted = [f"{text!r:.60}" for text in dict.fromkeys(texts)]
    more = f" and {len(quoted) - _N_SHOWN} more" if len(quoted) > _N_SHOWN else ""
    return ", ".join(quoted[:_N_SHOWN]) + more


def _sorted_by_rank(traces: list[Trace], n_ranks: int | None) -> list[Trace]:
    """Return traces in order of rank. Raise unless each rank of the run has exactly one."""
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    expected = max(sizes, default=len(traces)) if n_ranks is None else n_ranks
    if len(traces) != expected:
        files = [*dict.fromkeys(str(trace.path) for trace in traces)]
        shown = ", ".join([*files[:_SHOWN], *["..."][: len(files) - _SHOWN]])
        raise TimelineError(
            f"got the traces of {len(traces)} ranks ({shown}) of a run of {expected}; give one "
            f"file a rank, or n_ranks={len(traces)} if the others are no part of this pipeline"
        )
    ranks = Counter(trace.rank for trace in traces)
    for rank, count in ranks.items():
        if count > 1:
            twice = [str(trace.path) for trace in traces if trace.rank == rank]
            raise TimelineError(f"{' and '.join(twice)} are both of rank {rank}")
    return sorted(traces, key=lambda trace: trace.rank or 0)
