"""`sweep`: simulate many configurations, in parallel, resumable, on a machine or a cluster."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim._version import __version__
from pipesim.analysis.compare import (
    KNOWN_RESULTS,
    known_columns,
    known_results,
    summary,
    warn_of_other_models,
)
from pipesim.errors import ArgumentError, PipeError, check_count, check_flag, check_text, number
from pipesim.scheduling.registry import ScheduleInfo
from pipesim.sweeps.grid import SweepRow, cell_text, sweep_rows
from pipesim.sweeps.journal import Journal
from pipesim.sweeps.row_warnings import RowWarning, row_warnings, show_row_warnings
from pipesim.sweeps.schedule_sources import source_info
from pipesim.sweeps.settings import Settings, run
from pipesim.sweeps.worker_pool import LostCall, run_calls

if TYPE_CHECKING:
    import pandas as pd


#: Results that a row without an error may lack, since they were not finite.
_MAY_LACK = frozenset({"bubble_fraction", "throughput", "peak_memory"})
#: Key in a file of the number of stages of a row's graph; rows of older versions lack it. No option
#: of a schedule has a dot: options are names of parameters.
_STAGES = "graph.n_stages"
#: Key of the warnings of a row, which a file does not hold.
_WARNINGS = "row.warnings"
#: Key in a file of each result that a row may have; a setting may have the name of its column.
_KNOWN = {name: f"timeline.{name}" for name in KNOWN_RESULTS}
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
        A grid: a mapping of keys to lists of values, for every combination of them. The last key
        varies fastest. Or a sequence of mappings of keys to values, one a row. Keys are:

        - ``schedule``: a name, or a file that `Schedule.load` reads, whose counts the row has;
        - ``n_devices``, ``n_microbatches``, and the schedules' own options. An option of a grid
          applies to the schedules that take it; rows that are then equal become one;
        - the arguments of `lower`, and ``engine``;
        - ``memory_limit``, all bytes of a device, also as ``"80GiB"``. ``zb_1p`` and ``zb_2p``
          order their tasks within it;
        - ``per``, the parts that costs are of: ``"stage"``, ``"device"`` or ``"layers"``, as in
          `Costs.in_chunks`;
        - the fields of `Costs`, or whole ``costs``. ``recompute_time`` is the seconds of R,
          ``grad_norm_time`` those of GRAD_NORM, ``offload_time`` those of OFFLOAD;
        - in place of costs a transformer: ``model`` or its sizes, ``gpu`` and other arguments of
          `Transformer.costs`, or a mapping of all these, ``transformer``. ``layers_per_stage`` may
          be ``"balanced"`` (the default: for the devices of the row's schedule) or ``"even"``.
          ``recompute`` is that of the transformer if it has one of its values;
        - ``network``, ``latency``, ``bandwidth``, ``host_latency`` and ``host_bandwidth``;
        - ``per``: whether costs are those of a ``"stage"`` (the default) or of all stages of a
          ``"device"``, which share them evenly. Use the latter to compare schedules with one and
          with several stages a device for one model.

        Single fields override whole costs and networks.
    base
        Values of keys that all configurations share, unless a configuration overrides them.
    path
        A file of JSON lines, to which each row is appended when it is done. Rows that it already
        holds are not run again, unless their worker was killed or an unexpected error occurred. A
        line has a checksum; a changed line is refused. The file may hold rows of several sweeps;
        one sweep writes at a time. Two rows are the same if their configuration and version of
        pipesim are. Remove the file after changing a schedule of your own.
    n_jobs
        Number of processes; -1 for one a core, at least two; 1 for this process alone, which a row
        may then kill. Dask uses all its workers.
    backend
        Of joblib: ``"loky"`` (processes), ``"dask"``, ``"ray"`` (after ``register_ray()`` of
        ``ray.util.joblib``), ``"threading"``. The default is that of the enclosing
        ``joblib.parallel_config``, or else processes.
    progress
        Whether to show a progress bar.

    Returns
    -------
    pandas.DataFrame
        Rows in the order of ``configurations``. Columns:

        - their keys; `Costs`, networks and values of each stage are JSON;
        - ``n_tasks``, ``makespan`` (s), ``bubble_fraction`` (0..1), ``throughput`` (micro-batches
          a second), ``peak_memory`` (bytes of the fullest device);
        - ``memory_limit``, ``fits``, ``tokens_per_second`` and ``mfu`` as in `compare`, each if a
          row has it;
        - ``seconds`` to compute the row;
        - ``error``: the problem of a row, whose results are then missing; else missing. If a row
          kills its worker, its ``error`` says so, and the other rows still run.

    Raises
    ------
    CapacityError
        If the combinations of a grid would not fit in memory.

    Warns
    -----
    CostsWarning
        If schedules with different numbers of stages on as many devices share costs a stage, and
        ``per`` is not given. Rows that ``path`` holds already count too.
    PipeWarning
        Those of `Transformer.costs` for the rows that run, each text once.

    See Also
    --------
    pipesim.compare : Compare timelines that you have already.
    pipesim.plan : Search for the fastest configuration of a model on a cluster.
    pipesim.simulate : Simulate one configuration, with all its times.

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
    rows = sweep_rows(configurations, {} if base is None else base)
    return run_rows(rows, path=path, n_jobs=n_jobs, backend=backend, progress=progress)


def run_rows(
    rows: Sequence[SweepRow],
    *,
    path: Path | str | None,
    n_jobs: int,
    backend: str | None,
    progress: bool,
) -> pd.DataFrame:
    """Run the rows whose results are missing, and return all as `sweep` does."""
    from pipesim.utils.packages import tqdm

    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ArgumentError(f"n_jobs must be a whole number but 0 (-1: all cores), got {n_jobs!r}")
    wanted = {row.digest: row for row in rows}
    infos = {row.case["name"]: source_info(row.case["name"]) for row in rows}
    with nullcontext() if path is None else Journal(path, _problem) as journal:
        stored = {} if journal is None else journal.rows
        results = {d: stored[d] for d in wanted if d in stored and not stored[d].get("again")}
        calls = {
            digest: (row.case, infos[row.case["name"]])
            for digest, row in wanted.items()
            if digest not in results
        }
        collected: list[RowWarning] = []
        bar = tqdm(total=len(wanted), initial=len(results), disable=not progress, unit="row")
        n_jobs = min(n_jobs, max(2, len(calls)))
        running = closing(run_calls(_simulate_row, calls, n_jobs=n_jobs, backend=backend))
        with bar, running as finished:
            for digest, result in finished:
                if isinstance(result, LostCall):
                    result = _failed(result.reason, again=True)
                collected += result.pop(_WARNINGS, ())
                results[digest] = result
                if journal is not None:
                    journal.append(digest, _record(wanted[digest], result))
                bar.update()
    show_row_warnings(collected, stacklevel=3)
    warn_of_other_models(_costs_per_stage(rows, results), stacklevel=4)
    return _frame(rows, results)


def _costs_per_stage(
    rows: Sequence[SweepRow], results: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, int, int, str]]:
    """Yield schedule, devices, stages and costs of each row whose costs are those of a stage."""
    for row in rows:
        n_stages = results[row.digest].get(_STAGES)
        model = "transformer" in row.case.get("costs", {})  # the same for any number of stages
        if n_stages is not None and not model and "per" not in row.case:
            costs = json.dumps(row.case.get("costs"), sort_keys=True)
            yield row.case["name"], row.case["devices"], n_stages, costs


def _simulate_row(case: Settings, info: ScheduleInfo) -> dict[str, Any]:
    """Return the results of one row, in a worker; an error is one of them."""
    began = time.perf_counter()
    collected: list[RowWarning] = []
    try:
        with row_warnings(collected):
            timeline = run(case, info)
        further = {_KNOWN[name]: value for name, value in known_results(timeline).items()}
        values = {"n_tasks": len(timeline.graph), **summary(timeline), **further}
        result = {k: v if math.isfinite(v) else None for k, v in values.items()}
        result |= {"error": None, _STAGES: timeline.graph.n_stages}
    except PipeError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, PipeError):
            result = _failed(str(error))
        else:  # in a function of the user's, who may correct it
            result = _failed(f"{type(cause).__name__}: {cause}", again=True)
    except Exception as error:  # in a schedule of the user's, or out of memory
        result = _failed(f"{type(error).__name__}: {error}", again=True)
    seconds = time.perf_counter() - began
    return {**result, "seconds": seconds, _WARNINGS: collected}


def _problem(row: Mapping[str, Any]) -> str:
    """Return the problem of the results in a row of a file, or an empty text."""
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
        real = number(value)
        least = -math.inf if name == "bubble_fraction" else 0.0  # rounding may make it negative
        if real is None or not least <= real or math.isinf(real):
            return f"{name} must be a finite number, and no less than 0, got {value!r:.60}"
        if name == "n_tasks" and not isinstance(value, int):
            return f"n_tasks must be a whole number, got {value!r}"
    return _problem_of_known(row)


def _problem_of_known(row: Mapping[str, Any]) -> str:
    """Return the problem of results that a row may have, or an empty text."""
    for name, key in _KNOWN.items():
        value = row.get(key)
        if name == "fits":
            if not isinstance(value, bool | None):
                return f"fits must be true, false or null, got {value!r:.60}"
            continue
        real = number(value)
        if value is not None and (real is None or not 0 <= real < math.inf):
            return f"{name} must be a finite number, and no less than 0, got {value!r:.60}"
    return ""


def _failed(message: str, *, again: bool = False) -> dict[str, Any]:
    """Return the results of a row that failed; with ``again`` a later sweep runs it again."""
    error = textwrap.shorten(message, 300, placeholder=" ...")
    return {**dict.fromkeys(RESULTS), "error": error, **({"again": True} if again else {})}


def _frame(rows: Sequence[SweepRow], results: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """Return the table of rows and their results."""
    from pipesim.utils.packages import pandas as pd

    keys = list(dict.fromkeys(key for row in rows for key in row.shown))
    shown = {key: [cell_text(row.shown.get(key)) for row in rows] for key in keys}
    values = {key: [results[row.digest].get(key) for row in rows] for key in RESULTS}
    types = {"n_tasks": "Int64", "error": "string"}
    columns = {key: pd.array(values[key], dtype=types.get(key, "float64")) for key in RESULTS}  # type: ignore[call-overload]  # names of types by variable
    values_of_rows = [
        {name: results[row.digest].get(key) for name, key in _KNOWN.items()} for row in rows
    ]
    further = {name: x for name, x in known_columns(values_of_rows).items() if name not in shown}
    last = {key: columns.pop(key) for key in ("seconds", "error")}
    return pd.DataFrame({**shown, **columns, **further, **last})


def _record(row: SweepRow, result: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a row in a file; its settings are for readers only."""
    record = {**row.shown, **result, "settings": row.case, "version": __version__}
    return {key: _finite(value) for key, value in record.items()}


def _finite(value: Any) -> Any:
    """Return a value with texts for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
