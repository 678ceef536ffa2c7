"""`sweep`: many configurations to one table, in parallel, resumable, on a machine or a cluster."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.analysis.compare import summary, warn_of_other_models
from pipesim.errors import ArgumentError, PipeError, check_count, check_flag, check_text, number
from pipesim.scheduling.registry import ScheduleInfo
from pipesim.sweeps.grid import Row, cell, rows, version
from pipesim.sweeps.journal import Journal
from pipesim.sweeps.schedule_sources import info_of
from pipesim.sweeps.settings import Settings, run
from pipesim.sweeps.worker_pool import Lost, spread

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RESULTS", "run_rows", "sweep"]

#: Results that a row without an error may lack: those that were not finite.
_MAY_LACK = frozenset({"bubble_fraction", "throughput", "peak_memory"})
#: Key of the number of stages of a row's graph in a file; rows of older versions lack it. The dot
#: keeps it apart from options of schedules, which are names of parameters.
_STAGES = "graph.n_stages"
#: Columns of results, after those of the configuration.
RESULTS = (
    "n_tasks", "makespan", "bubble_fraction", "throughput", "peak_memory", "seconds", "error",
)  # fmt: skip


def sweep(
    configurations: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    base: Mapping[str, Any] | None = None,
    path: Path | str | None = None,
    n_jobs: int = -1,
    backend: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Simulate each of many configurations; return one row for each.

    Parameters
    ----------
    configurations
        A grid, which is a mapping of keys to lists of values, for every combination of them (the
        last key varies fastest); or a sequence of mappings of keys to values. Keys are
        ``schedule`` (or a file that `Schedule.load` reads, whose counts are then those of the
        row), ``n_devices``, ``n_microbatches`` and the schedules' own options; what
        `lower` takes; ``engine``; the fields of `Costs` (``recompute_time`` for the seconds of R)
        or whole ``costs``; ``network``, ``latency`` and ``bandwidth``. Parts override the whole.
        ``per`` says whether costs are those of a ``"stage"`` (the default) or of all stages of a
        ``"device"``, which they share evenly: take that to compare schedules with one and with
        several stages a device for one model. A grid's option goes to the schedules that take it;
        rows that are then alike are one.
    base
        Values of keys that all configurations share, unless they say otherwise.
    path
        A file of JSON lines, to which each row is appended as it comes. Rows that it holds
        already are not run again, unless their worker was killed or they failed unforeseen. A line
        has a checksum, so that one that was changed is refused. It may
        hold rows of several sweeps, one of which writes at a time. A row counts as the same if
        configuration and version of pipesim are; remove the file after changing a schedule of
        your own.
    n_jobs
        Number of processes; -1 for one a core and two at least, 1 for none but this one, which a
        row may then kill. Dask uses all its workers.
    backend
        Of joblib: ``"loky"`` (processes), ``"dask"``, ``"ray"`` (after ``register_ray()`` of
        ``ray.util.joblib``), ``"threading"``. By default that of the enclosing
        ``joblib.parallel_config``, or else processes.
    progress
        Whether to show a progress bar.

    Returns
    -------
    pandas.DataFrame
        In the order of ``configurations``: their keys (`Costs`, networks and values of each stage
        as JSON), then ``n_tasks``, ``makespan`` (s), ``bubble_fraction`` (0..1), ``throughput``
        (micro-batches a second), ``peak_memory`` (bytes of the fullest device), ``seconds`` (that
        the row took to compute), and ``error``: what was wrong with the row, whose results are
        missing then, or missing itself. A row that kills its worker says so; the others go on.

    Raises
    ------
    UnknownNameError
        For unknown keys, schedules and options, before anything is run.
    ArgumentError
        For configurations of another form, arguments of another type, a backend that joblib cannot
        use, or a file that cannot be written, is no sweep's, is being written by another sweep, or
        has a line whose values are wrong or were changed.
    CapacityError
        If the combinations of a grid would not fit in memory.

    Warns
    -----
    CostsWarning
        If schedules with different numbers of stages on as many devices share costs a stage, and
        ``per`` is not given. Rows that ``path`` holds already count too.

    Examples
    --------
    >>> import pipesim as ps
    >>> table = ps.sweep(
    ...     {"schedule": ["gpipe", "1f1b"], "n_microbatches": [4, 8]},
    ...     base={"n_devices": 4, "forward": 1e-3, "backward": 2e-3, "activation_bytes": 1e6},
    ...     n_jobs=1,
    ...     progress=False,
    ... )
    >>> print(table[["schedule", "n_microbatches", "makespan", "peak_memory"]].to_string())
      schedule  n_microbatches  makespan  peak_memory
    0    gpipe               4     0.021    4000000.0
    1    gpipe               8     0.033    8000000.0
    2     1f1b               4     0.021    4000000.0
    3     1f1b               8     0.033    4000000.0
    """
    check_flag("progress", progress)
    if backend is not None:
        check_text("backend", backend)
    asked = rows(configurations, {} if base is None else base)
    return run_rows(asked, path=path, n_jobs=n_jobs, backend=backend, progress=progress)


def run_rows(
    asked: Sequence[Row],
    *,
    path: Path | str | None,
    n_jobs: int,
    backend: str | None,
    progress: bool,
) -> pd.DataFrame:
    """Run what is missing of the rows, and return all as `sweep` does."""
    from tqdm.auto import tqdm

    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ArgumentError(f"n_jobs must be a whole number but 0 (-1: all cores), got {n_jobs!r}")
    wanted = {row.digest: row for row in asked}
    infos = {row.case["name"]: info_of(row.case["name"]) for row in asked}
    with nullcontext() if path is None else Journal(path, _problem) as journal:
        held = {} if journal is None else journal.rows
        results = {d: held[d] for d in wanted if d in held and not held[d].get("again")}
        calls = {
            digest: (row.case, infos[row.case["name"]])
            for digest, row in wanted.items()
            if digest not in results
        }
        bar = tqdm(total=len(wanted), initial=len(results), disable=not progress, unit="row")
        n_jobs = min(n_jobs, max(2, len(calls)))
        spreading = closing(spread(_measured, calls, n_jobs=n_jobs, backend=backend))
        with bar, spreading as finished:
            for digest, result in finished:
                if isinstance(result, Lost):
                    result = _failed(result.reason, again=True)
                results[digest] = result
                if journal is not None:
                    journal.append(digest, _record(wanted[digest], result))
                bar.update()
    warn_of_other_models(
        (
            (
                row.case["name"],
                row.case["devices"],
                stages,
                json.dumps(row.case.get("costs"), sort_keys=True),
            )
            for row in asked
            if (stages := results[row.digest].get(_STAGES)) is not None and "per" not in row.case
        ),
        stacklevel=4,
    )
    return _frame(asked, results)


def _measured(case: Settings, info: ScheduleInfo) -> dict[str, Any]:
    """Return the results of one row, in a worker; whatever goes wrong is one."""
    began = time.perf_counter()
    try:
        timeline = run(case, info)
        values = {"n_tasks": len(timeline.graph), **summary(timeline)}
        result = {k: v if math.isfinite(v) else None for k, v in values.items()}
        result |= {"error": None, _STAGES: timeline.graph.n_stages}
    except PipeError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PipeError):
            result = _failed(str(error))
        else:  # of a function of the user's own, who may mend it
            result = _failed(f"{type(cause).__name__}: {cause}", again=True)
    except Exception as error:  # of a schedule of the user's own, or for want of memory
        result = _failed(f"{type(error).__name__}: {error}", again=True)
    return {**result, "seconds": time.perf_counter() - began}


def _problem(row: Mapping[str, Any]) -> str:
    """Return what is wrong with the results of a row of a file, if anything is."""
    error = row.get("error")
    if not isinstance(error, str | None):
        return f"error must be a text or null, got {error!r:.60}"
    if not isinstance(row.get("again", False), bool):
        return f"again must be true or false, got {row['again']!r:.60}"
    if row.get(_STAGES) is not None:
        try:
            check_count(_STAGES, row[_STAGES])
        except ArgumentError as problem:
            return str(problem)
    for name in RESULTS[:-1]:
        value = row.get(name)
        if value is None and (error is not None or name in _MAY_LACK):
            continue
        got = number(value)
        least = -math.inf if name == "bubble_fraction" else 0.0  # which is rounded
        if got is None or not least <= got or math.isinf(got):
            return f"{name} must be a finite number, and no less than 0, got {value!r:.60}"
        if name == "n_tasks" and not isinstance(value, int):
            return f"n_tasks must be a whole number, got {value!r}"
    return ""


def _failed(message: str, *, again: bool = False) -> dict[str, Any]:
    """Return the results of a row that has none; ``again``: a later sweep is to try it."""
    error = textwrap.shorten(message, 300, placeholder=" ...")
    return {**dict.fromkeys(RESULTS), "error": error, **({"again": True} if again else {})}


def _frame(asked: Sequence[Row], results: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    keys = list(dict.fromkeys(key for row in asked for key in row.shown))
    shown = {key: [cell(row.shown.get(key)) for row in asked] for key in keys}
    got = {key: [results[row.digest].get(key) for row in asked] for key in RESULTS}
    types = {"n_tasks": "Int64", "error": "string"}
    columns = {key: pd.array(got[key], dtype=types.get(key, "float64")) for key in RESULTS}  # type: ignore[call-overload]  # names of types by variable
    return pd.DataFrame({**shown, **columns})


def _record(row: Row, result: dict[str, Any]) -> dict[str, Any]:
    """Return what a file says of a row; the settings are there for the reader."""
    record = {**row.shown, **result, "settings": row.case, "version": version()}
    return {key: _finite(value) for key, value in record.items()}


def _finite(value: Any) -> Any:
    """Return a value with text for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
