"""Files of other programs: Nsight Systems as traces; Primus, Megatron-LM, DeepSpeed as tables.

**Nsight Systems.** ``nsys export --type sqlite report.nsys-rep`` writes the report as a database.
Its tables are in the "SQLite Export Schema Reference" of https://docs.nvidia.com/nsight-systems.
Names of ranges from `torch.autograd.profiler.emit_nvtx` are in ``getNvtxStr`` of pytorch/pytorch,
torch/csrc/profiler/util.cpp.

**Primus.** With ``dump_pp_data``, Primus writes ``config.json`` and a file ``pp_rank_0.json`` a
pipeline rank: AMD-AGI/Primus, primus/backends/megatron/core/pipeline_parallel/pp_visualizer.py.
Examples are in tools/visualization/pp_vis/pp_data_example. The order of chunks where a file does
not name them is that of Megatron-LM, ``get_schedule_table`` in
megatron/core/pipeline_parallel/schedules.py.

**Timers in logs.** A timer is a sum over the calls of a step, so that logs tell what operations
cost, and not when tasks ran. Formats:

- NVIDIA/Megatron-LM, megatron/core/timers.py and ``training_log`` in megatron/training/training.py,
  which divides by the steps of ``--log-interval``; before 2023 one line ``time (ms) | ...``, as in
  bigscience-workshop/bigscience, experiments/gpt2-meg;
- deepspeedai/DeepSpeed, deepspeed/utils/timer.py and deepspeed/runtime/pipe/engine.py, which logs
  every ``steps_per_print`` steps what has added up since.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.errors import TimelineError, check_type, number
from pipesim.scheduling.placement import Placement
from pipesim.trace.chrome_export import Event, write
from pipesim.trace.range_names import WORDS, word_key
from pipesim.utils.files import (
    check_path,
    is_folder,
    read_bytes,
    read_json,
    read_text,
    write_errors,
)

if TYPE_CHECKING:
    import sqlite3

    import pandas as pd


def files_of(paths: Path | str | Iterable[Path | str], pattern: str) -> list[Path]:
    """Return the files of a folder that match ``pattern``, by name; or files in their order."""
    from pipesim.trace.trace_files import list_files  # which takes a while to import

    if isinstance(paths, str | os.PathLike) and is_folder(folder := check_path("paths", paths)):
        files = sorted(folder.glob(pattern))
        if not files:
            raise TimelineError(f"the folder {folder} has no {pattern}")
        return files
    return list_files(paths)


# Nsight Systems

#: First bytes of an SQLite database.
SQLITE = b"SQLite format 3\0"
#: Ranges, with the event types of push and pop, and of start and end.
_RANGES = """
    SELECT COALESCE(n.text, s.value, ''), n.start, n.end, n.globalTid
    FROM NVTX_EVENTS AS n LEFT JOIN StringIds AS s ON s.id = n.textId
    WHERE n.eventType IN (59, 60) AND n.end IS NOT NULL
"""
_LAUNCHES = "SELECT 'launch', start, end, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS = """
    SELECT COALESCE(s.value, ''), k.start, k.end, k.globalPid, k.correlationId
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS k LEFT JOIN StringIds AS s ON s.id = k.demangledName
"""
#: Table, query and category of each kind of event in a trace.
_EVENTS = (
    ("NVTX_EVENTS", _RANGES, "user_annotation"),
    ("CUPTI_ACTIVITY_KIND_RUNTIME", _LAUNCHES, "cuda_runtime"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", _KERNELS, "kernel"),
    *(
        (
            f"CUPTI_ACTIVITY_KIND_{kind}",
            f"SELECT '{kind}', start, end, globalPid, correlationId "
            f"FROM CUPTI_ACTIVITY_KIND_{kind}",
            f"gpu_{kind.lower()}",
        )
        for kind in ("MEMCPY", "MEMSET")
    ),
)
#: Suffixes of torch's names: number in autograd, number of the operation, sizes of its inputs.
_SUFFIX = re.compile(r", (seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)


def nsys_to_chrome(paths: Path | str | Iterable[Path | str], folder: Path | str) -> list[Path]:
    """Convert reports of Nsight Systems to Chrome traces, one a process.

    A trace has the NVTX ranges of its process, and the kernels and copies that it launched.
    `pipesim.Timeline.from_chrome` reads the traces, ui.perfetto.dev shows them.

    Record ranges with ``nsys profile --trace=cuda,nvtx``. Torch's ranges, such as ``PP:1F0``, are
    NVTX ranges in the context `torch.autograd.profiler.emit_nvtx`.

    Parameters
    ----------
    paths
        SQLite databases that ``nsys export --type sqlite`` wrote, in order of the ranks; or one
        for all ranks of a host; or a folder of ``*.sqlite``, in order of name.
    folder
        Folder for the traces; made if it is not there.

    Returns
    -------
    list of Path
        Traces of all processes with ranges. Those of one report are in order of process numbers.

    Raises
    ------
    TimelineError
        For a file that is no such database, and for one without ranges.
    """
    files = files_of(paths, "*.sqlite")
    target = check_path("folder", folder, "write")
    with write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    traces: list[Path] = []
    for path in files:
        for events in _events_by_process(path):
            rank = len(traces)
            traces.append(target / f"{path.stem}.rank{rank}.json")
            write(traces[-1], {"distributedInfo": {"rank": rank}, "traceEvents": events})
    return traces


def _events_by_process(path: Path) -> list[list[Event]]:
    """Return the events of each process with ranges, in order of its number."""
    import sqlite3

    if read_bytes(path, "a report from", TimelineError, first=len(SQLITE)) != SQLITE:
        raise TimelineError(
            f"cannot read a report from {path}: it is no SQLite database; convert it with: "
            "nsys export --type sqlite report.nsys-rep"
        )
    events: dict[int, list[Event]] = defaultdict(list)
    ranged: set[int] = set()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as report:
            for event in _events(report):
                events[event["pid"]].append(event)
                if event["cat"] == "user_annotation":
                    ranged.add(event["pid"])
    except (sqlite3.Error, ValueError) as error:
        raise TimelineError(
            f"cannot read a report from {path}: {error}; export it again with: "
            "nsys export --type sqlite report.nsys-rep"
        ) from error
    if not ranged:
        raise TimelineError(
            f"{path} has no NVTX ranges; record them with: nsys profile --trace=cuda,nvtx"
        )
    return [events[process] for process in sorted(ranged)]


def _events(report: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Yield ranges, launches, kernels and copies as events of a trace (us)."""
    tables = {name for (name,) in report.execute("SELECT name FROM sqlite_master")}
    for table, query, category in _EVENTS:
        for name, start, end, place, *correlation in (
            report.execute(query) if table in tables else ()
        ):
            numbers = (start, end, place, *correlation)
            if not (isinstance(name, str) and all(isinstance(x, int) for x in numbers)):
                raise ValueError(f"{table} has a row without name, times and process")
            # The lowest 24 bits are the thread (0 in a globalPid), the next 24 the process.
            process, thread = place >> 24 & 0xFFFFFF, place & 0xFFFFFF
            yield {
                "ph": "X", "cat": category, "name": _SUFFIX.sub("", name), "pid": process,
                "tid": thread, "ts": start / 1e3, "dur": (end - start) / 1e3,
                "args": {"correlation": correlation[0]} if correlation else {},
            }  # fmt: skip


# Primus

#: Name of the file of a rank.
PP_RANK = re.compile(r"pp_rank_([0-9]+)\.json")
#: Most files that a message names.
_SHOWN = 8
_PRIMUS_COLUMNS = ("step", "op", "microbatch", "stage", "device", "chunk", "start", "end")


def read_primus(
    paths: Path | str | Iterable[Path | str], *, placement: Placement | None = None
) -> pd.DataFrame:
    """Read the times of all forwards and backwards of a run of Primus with ``dump_pp_data``.

    Parameters
    ----------
    paths
        Folder of ``pp_rank_0.json``, ``pp_rank_1.json``, ..., or these files. ``config.json`` is
        read where it stands beside them.
    placement
        Device of each stage; the files have only the chunk. By default `Placement.looped`, as in
        Megatron-LM; give `Placement.v_shaped` for ZB-V.

    Returns
    -------
    pandas.DataFrame
        One row a task, with the columns of `pipesim.Timeline.from_table`: ``step`` (as in the
        file), ``op``, ``microbatch``, ``stage``, ``device``, ``chunk``, ``start`` and ``end`` (s).

        - Times of a device count from its own begin of the step.
        - A B with a W of its own is an I.
        - Files of Megatron's own schedules number neither micro-batches nor chunks. Then the order
          is that of Megatron's 1F1B, interleaved with groups of as many micro-batches as devices.
        - A call that ran a forward and a backward together has two rows with the same times.

    Raises
    ------
    TimelineError
        For files that Primus does not write, and for ranks that are missing.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> import pipesim as ps
    >>> times = {"fwd_start": [0], "fwd_end": [10], "bwd_start": [10], "bwd_end": [30]}  # ms
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "pp_rank_0.json").write_text(json.dumps({"1": times}))
    ...     table = ps.trace.read_primus(folder)
    >>> ps.Timeline.from_table(table)
    <Timeline naive: 2 tasks, makespan 0.03 s, bubble 0.0%>
    """
    from pipesim.utils.packages import pandas as pd

    files = _rank_files(paths)
    n_chunks = _n_chunks(files[0].with_name("config.json"))
    if placement is None:
        placement = Placement.looped(len(files), n_chunks)
    check_type("placement", placement, Placement)
    rows: list[tuple[object, ...]] = []
    for device, path in enumerate(files):
        steps = read_json(path, "times of Primus from", TimelineError)
        try:
            stages = dict(enumerate(placement.stages_of(device)))
            for step, times in steps.items():
                for op, microbatch, chunk, start, end in _tasks(times, len(files), n_chunks):
                    span = start * 1e-3, end * 1e-3
                    rows.append((int(step), op, microbatch, stages[chunk], device, chunk, *span))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                f"{path} is no file of Primus with dump_pp_data, or not of {len(files)} ranks with "
                f"{n_chunks} chunks each: {type(error).__name__}: {error}"
            ) from error
    if not rows:
        raise TimelineError(f"{files[0]} and those of other ranks have no tasks")
    return pd.DataFrame(rows, columns=list(_PRIMUS_COLUMNS))


def _rank_files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    files = files_of(paths, "pp_rank_*.json")
    ranks = {int(name[1]): path for path in files if (name := PP_RANK.fullmatch(path.name))}
    if not ranks or sorted(ranks) != list(range(len(files))):
        raise TimelineError(
            "the files of Primus are pp_rank_0.json, pp_rank_1.json, ..., one a pipeline rank; got "
            f"{', '.join(str(path) for path in files[:_SHOWN])}"
        )
    return [ranks[rank] for rank in range(len(ranks))]


def _n_chunks(path: Path) -> int:
    """Return the number of chunks a rank, 1 if the file of the run's sizes is not there."""
    config = read_json(path, "sizes from", TimelineError) if path.exists() else {}
    sizes = (
        [config.get(key, 1) for key in ("vp_size", "vpp_size")] if isinstance(config, dict) else []
    )
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TimelineError(f"{path}: vp_size must be the number of chunks a rank")
    return int(config.get("vp_size", sizes[1]))


def _tasks(
    times: Mapping[str, list[Any]], n_devices: int, n_chunks: int
) -> Iterable[tuple[str, int, int, float, float]]:
    """Yield operation, micro-batch, chunk, start and end (ms) of each task of a rank."""
    splits = bool(times.get("wgrad_start"))
    for prefix, op in (("fwd", "F"), ("bwd", "I" if splits else "B"), ("wgrad", "W")):
        starts, ends = (times.get(f"{prefix}_{key}", []) for key in ("start", "end"))
        # Without numbers, weight gradients of one chunk are in the order of the backwards.
        numbered = "bwd" if prefix == "wgrad" and not times.get("wgrad_minibatch") else prefix
        microbatches: Sequence[int] = times.get(f"{numbered}_minibatch") or ()
        chunks: Sequence[int] = times.get(f"{numbered}_chunk") or ()
        if numbered != prefix and n_chunks > 1 and starts:
            raise ValueError("weight gradients of several chunks without their numbers")
        if not microbatches:
            n_microbatches = len(starts) // n_chunks
            order = [
                (microbatch, chunk)
                for first in range(0, n_microbatches, n_devices)
                for chunk in range(n_chunks)[:: 1 if prefix == "fwd" else -1]
                for microbatch in range(first, min(first + n_devices, n_microbatches))
            ]
            microbatches, chunks = zip(*order, strict=True) if order else ((), ())
        chunks = chunks or [0] * len(starts)
        for row in zip(microbatches, chunks, starts, ends, strict=True):
            if any(number(value) is None for value in row):
                raise ValueError(f"{row!r:.80} are no numbers")
            yield op, *row


# Logs of Megatron-LM and DeepSpeed

#: Beginning of timers in a log.
TIMERS = re.compile(r"times? across ranks \(ms\):|\btime \(ms\) \| ")
_MEGATRON_STEP = re.compile(r"\biteration\s*=?\s*([0-9]+)\s*/")
_DEEPSPEED_STEP = re.compile(r"\bsteps: ([0-9]+) loss: ")
_TIME = r"([0-9]+(?:\.[0-9]+)?)"
#: Times of Megatron-LM's --timing-log-option minmax, max and all, which names the timer first.
_MIN_MAX = re.compile(rf"([\w/-]+) \.+: \({_TIME}, {_TIME}\)")
_MAX = re.compile(rf"([\w/-]+) \.+: {_TIME}\s*$")
_NAME = re.compile(r"([\w/-]+):\s*$")
_RANK = re.compile(rf"\brank +([0-9]+): {_TIME}\s*$")
#: One line with all timers of a rank.
_LINE = re.compile(r"(?:\[Rank ([0-9]+)\] |rank=([0-9]+) )?time \(ms\) \|(.*)")
_PART = re.compile(rf"([\w/-]+): {_TIME}")
#: Operations of timers that have other names than `WORDS`; DeepSpeed's sums of others have none.
_OPS = {
    **dict.fromkeys(("fwd", "bwd", "step"), ""),
    "all-grads-sync": "REDUCE_GRAD",
    "fwd_microstep": "F",
    "bwd_inner_microstep": "B",
    "pipe_send_output": "SEND_F",
    "pipe_recv_input": "RECV_F",
    "pipe_send_grad": "SEND_B",
    "pipe_recv_grad": "RECV_B",
    "step_microstep": "STEP",
}
_TIMER_COLUMNS = ("step", "n_steps", "timer", "op", "rank", "min", "max")


def read_timers(path: Path | str) -> pd.DataFrame:
    """Read the timers in a log of Megatron-LM or DeepSpeed.

    Megatron-LM logs forwards and backwards with ``--timing-log-level 2``, DeepSpeed with
    ``wall_clock_breakdown``. There is no timeline in such a log: a timer is a sum over the
    micro-batches, and chunks, of a step.

    Parameters
    ----------
    path
        Text file.

    Returns
    -------
    pandas.DataFrame
        One row a timer and step, or a timer, step and rank:

        - ``step``: number of the step that was logged;
        - ``n_steps``: number of steps that the times are a sum of. 1 for Megatron-LM, which logs
          means. For DeepSpeed the steps since the previous log, or since step 0;
        - ``timer``: its name in the log;
        - ``op``: name of the `pipesim.Op` that it times, or empty;
        - ``rank``: rank of the times, or -1 where the log does not name it;
        - ``min``, ``max``: seconds of the fastest and the slowest rank; the same for one rank, and
          ``min`` is NaN with ``--timing-log-option max``.

        Timers of receives include waiting.

    Raises
    ------
    TimelineError
        For a file that cannot be read or has no timers of steps.

    Examples
    --------
    Divide by the number of micro-batches for the costs of one:

    >>> import pathlib, tempfile
    >>> import pipesim as ps
    >>> log = '''iteration 10/ 100 | elapsed time per iteration (ms): 95.0 |
    ... (min, max) time across ranks (ms):
    ...     forward-compute ................................: (16.00, 20.00)
    ...     backward-compute ...............................: (32.00, 40.00)
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "run.log"
    ...     _ = path.write_text(log)
    ...     timers = ps.trace.read_timers(path)
    >>> seconds = timers.groupby("op")["max"].mean() / 8  # micro-batches
    >>> ps.Costs(forward=seconds["F"], backward=seconds["B"])
    <Costs of any number of stages: F 2.50 ms, B 5.00 ms>
    """
    from pipesim.utils.packages import pandas as pd

    path = check_path("path", path)
    rows = _rows(read_text(path, "timers from", TimelineError))
    if not rows:
        raise TimelineError(
            f"{path} has no timers of steps; log them with --timing-log-level 2 (Megatron-LM) or "
            "wall_clock_breakdown (DeepSpeed)"
        )
    table = pd.DataFrame(rows, columns=list(_TIMER_COLUMNS))
    table[["min", "max"]] *= 1e-3
    return table


def _rows(text: str) -> list[tuple[object, ...]]:
    """Return the rows of the table, times in ms."""
    rows: list[tuple[object, ...]] = []
    early: list[tuple[object, ...]] = []  # DeepSpeed's timers before the number of their step
    step, steps, timer = -1, 0, ""
    for line in text.splitlines():
        if number := _DEEPSPEED_STEP.search(line):
            step, steps = int(number[1]), int(number[1]) - max(step, 0)
            rows += [(step, steps, *times) for times in early]
            early.clear()
        elif number := _MEGATRON_STEP.search(line):
            step, steps = int(number[1]), 1
        times, timer = _times(line, timer)
        for name, *values in times:
            op = WORDS.get(word_key(name, WORDS))
            row = name, _OPS.get(name, "" if op is None else op.name), *values
            if name.startswith(("batch_input", "fwd", "bwd", "step")):
                early.append(row)
            elif step >= 0:
                rows.append((step, steps, *row))
    return rows


def _times(line: str, timer: str) -> tuple[list[tuple[str, int, float, float]], str]:
    """Return timers of a line, with rank, minimum and maximum (ms); and that of ranks below it."""
    if match := _LINE.search(line):
        rank = int(match[1] or match[2] or -1)
        parts = _PART.findall(match[3])
        return [(name, rank, float(time), float(time)) for name, time in parts], ""
    if match := _MIN_MAX.search(line):
        return [(match[1], -1, float(match[2]), float(match[3]))], ""
    if match := _MAX.search(line):
        return [(match[1], -1, math.nan, float(match[2]))], ""
    if timer and (match := _RANK.search(line)):
        return [(timer, int(match[1]), float(match[2]), float(match[2]))], timer
    return [], match[1] if (match := _NAME.search(line)) else ""
