"""`sweep`: simulate many configurations, in parallel, resumable, on a machine or a cluster.

A grid or a list of configurations becomes rows of settings, and each row one of results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim._version import __version__
from pipesim.analysis.compare import (
    KNOWN_RESULTS,
    known_columns,
    known_results,
    summary,
    warn_of_other_models,
)
from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs
from pipesim.errors import (
    ArgumentError,
    PipeError,
    PipeWarning,
    UnknownNameError,
    check_count,
    check_flag,
    check_text,
    number,
    suggestion,
)
from pipesim.framework.framework import Framework
from pipesim.models.gpu import GPU
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.scheduling.registry import ScheduleInfo, options_of_schedules
from pipesim.sweeps.journal import Journal
from pipesim.sweeps.settings import (
    COUNTS,
    FLAT,
    LOWERING,
    SETTINGS,
    Settings,
    check_counts,
    check_layer,
    drop_foreign_options,
    file_counts,
    file_digest,
    is_file,
    known_name,
    merge,
    nest,
    run,
    setting_path,
    source_info,
)
from pipesim.sweeps.worker_pool import LostCall, run_calls
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.host_memory import check_memory, count_text
from pipesim.utils.texts import in_bytes

if TYPE_CHECKING:
    import pandas as pd


# Rows of settings from a grid or a list

Flat = dict[str, Any]

#: Bytes of a row of a sweep (measured).
_BYTES_PER_ROW = 4000
#: Version of a row's results. It is part of each row's digest.
_FORMAT = 1


@dataclass(frozen=True)
class SweepRow:
    """A row: its columns of the table, its settings, and a digest of what results depend on."""

    shown: Flat
    case: Settings
    digest: str


def sweep_rows(configurations: object, base: object) -> list[SweepRow]:
    """Return the rows of `pipesim.sweep`'s arguments; see there for the errors."""
    keys = _row_keys()
    if isinstance(configurations, Mapping):
        shown, is_grid = _product(configurations, keys), True
    elif isinstance(configurations, Sequence) and not isinstance(configurations, str):
        shown = [_flat(f"row {k}", row, keys) for k, row in enumerate(configurations)]
        is_grid = False
    else:
        raise ArgumentError(
            "sweep takes a mapping of keys to lists of values, or a sequence of mappings, got "
            f"{configurations!r}"
        )
    shared = _flat("base", base, keys)
    layers = [_override(shared, row) for row in shown]
    cases = [_case(f"row {k}", row) for k, row in enumerate(layers)]
    rows = _make_rows(shown, cases, [[] if is_grid else list(row) for row in shown])
    return _distinct(rows) if is_grid else rows


def grid_rows(cases: Sequence[Settings], grid: Mapping[str, Any]) -> list[SweepRow]:
    """Return a row for each pair of a case and a combination of the grid's values."""
    grid = {{**LOWERING, **COUNTS}.get(key, key): values for key, values in grid.items()}
    shown, row_cases, own = [], [], []
    for case, point in itertools.product(cases, _product(grid, _row_keys(), len(cases))):
        shown.append({"schedule": case["label"], **point})
        layer = check_layer(f"grid, {_row_text(point)}", nest(point), SETTINGS, Path())
        row_cases.append(_limit_orders(merge(case, layer), point))
        check_counts(row_cases[-1])
        own.append(list(case["options"]))
    return _distinct(_make_rows(shown, row_cases, own))


def cell_text(value: Any) -> Any:
    """Return a value as a table shows it: mappings and lists as JSON."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _row_text(row: Flat) -> str:
    return ", ".join(f"{key} {cell_text(value)}" for key, value in row.items())


def _row_keys() -> tuple[str, ...]:
    """Return the keys that a row may have: settings, and the options of all schedules."""
    options = {option for options in options_of_schedules().values() for option in options}
    return (*FLAT, *sorted(options - set(FLAT)))


def _product(grid: Mapping[str, Any], keys: Sequence[str], n_cases: int = 1) -> list[Flat]:
    """Return every combination of a grid's values, if memory holds them for all cases."""
    _flat("grid", dict.fromkeys(grid), keys)
    for key, values in grid.items():
        if not isinstance(values, (list, tuple, range, np.ndarray)) or _length(values) == 0:
            raise ArgumentError(
                f"grid: {key} must be a list of at least one value, got {values!r}; what is the "
                "same in every row goes into base"
            )
    n_rows = n_cases * math.prod(map(_length, grid.values()))
    what = f"a sweep of {count_text(n_rows)} rows"
    check_memory(what, n_rows * _BYTES_PER_ROW, "give fewer values to its keys")
    plain = [[_value("grid", key, value) for value in grid[key]] for key in grid]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]


def _length(values: Any) -> int:
    """Return the number of values; ``len`` raises for a very long range."""
    if isinstance(values, range):
        return max(0, -((values.start - values.stop) // values.step))
    return len(values)


def _flat(where: str, row: Any, keys: Sequence[str]) -> Flat:
    """Return the values of a row except None, as plain values, if its keys are in ``keys``."""
    if not isinstance(row, Mapping):
        raise ArgumentError(f"{where} must be a mapping of keys to values, got {row!r}")
    for key in row:
        if key not in keys:
            near = suggestion(key, keys)
            raise UnknownNameError(f"{where}: unknown key {key!r}{near} (known: {', '.join(keys)})")
    return {key: _value(where, key, value) for key, value in row.items() if value is not None}


def _value(where: str, key: str, value: object) -> Any:
    plain = _plain(f"{where}: {key}", value)
    if key in ("costs", "network") and not isinstance(plain, (dict, type(None))):
        kind = key.capitalize()
        raise ArgumentError(f"{where}: {key} must be a pipesim.{kind} or a mapping, got {value!r}")
    return plain


def _plain(where: str, value: Any) -> Any:
    """Return a value as types of JSON and TOML."""
    if isinstance(value, (GPU, Transformer)):
        return {key: part for key, part in asdict(value).items() if part is not None}
    if isinstance(value, (Costs, Framework, Network, Workload)):
        return value.to_dict()
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(where, value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(where, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if (real := number(value)) is not None:  # such as a Fraction
        return real
    raise ArgumentError(
        f"{where} must be numbers, text, a Costs, a Network or a GPU, got {value!r}; give a "
        "schedule of your own a name with pipesim.register"
    )


def _override(base: Flat, row: Flat) -> Flat:
    """Return ``base`` overridden by a row; whole costs replace all fields of the base's."""
    row = {key: value for key, value in row.items() if value is not None}
    paths = [setting_path(key) for key in row]
    kept = {
        key: value
        for key, value in base.items()
        if not any(setting_path(key)[: len(path)] == path for path in paths)
    }
    return kept | row


def _case(where: str, row: Flat) -> Settings:
    """Return a row's settings, if it has a schedule and its counts."""
    row = {**file_counts(row.get("schedule")), **row}
    for key in ("schedule", *COUNTS.values()):
        if key not in row:
            raise ArgumentError(f"{where} has no {key}; give it there or in base")
    case = check_layer(where, nest(row), ("name", *SETTINGS), Path())
    case["name"] = known_name(case["name"])
    return {"label": str(case["name"]), **_limit_orders(case, row)}


def _limit_orders(case: Settings, flat: Mapping[str, Any]) -> Settings:
    """Give the memory limit of a row to its schedule too, if it has an option of that name."""
    options = options_of_schedules().get(str(case["name"]), ())
    if "memory_limit" not in flat or "memory_limit" not in options:
        return case
    limit = in_bytes("memory_limit", flat["memory_limit"])
    return merge({"options": {"memory_limit": limit}}, case)


def _make_rows(shown: list[Flat], cases: list[Settings], own: list[list[str]]) -> list[SweepRow]:
    """Return rows, if their schedules and options exist; ``own`` as in `drop_foreign_options`."""
    if not cases:
        raise ArgumentError("there is nothing to sweep; give at least one configuration")
    for index, case in enumerate(cases):
        _check_name(index, source_info, case["name"])
    drop_foreign_options(cases, own)
    rows = []
    for index, (row, case) in enumerate(zip(shown, cases, strict=True)):
        _check_name(index, source_info(case["name"]).check_options, case["options"])
        dropped = {k for k in row if k not in FLAT and k not in case["options"]}
        visible = {k: None if k in dropped else v for k, v in row.items()}
        rows.append(SweepRow(visible, case, _digest(case)))
    return rows


def _check_name(index: int, check: Callable[[Any], object], value: object) -> None:
    """Call ``check``; put the number of the row in front of its error."""
    try:
        check(value)
    except UnknownNameError as error:
        raise UnknownNameError(f"row {index}: {error}") from error


def _distinct(rows: list[SweepRow]) -> list[SweepRow]:
    """Return rows without repetitions: rows that differ only in options that they do not take."""
    return list({(row.digest, _row_text(row.shown)): row for row in rows}.values())


def _digest(case: Settings) -> str:
    """Return a digest of the settings. It does not depend on the form of their costs."""
    settings = {key: value for key, value in case.items() if key != "label"}
    if is_file(case["name"]):
        settings["orders"] = file_digest(case["name"])
    with suppress(PipeError):  # the row reports the error
        settings["costs"] = Costs.from_dict(settings.get("costs", {})).to_dict()
    text = json.dumps([_FORMAT, __version__, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Warnings of rows: collected where a row runs, and shown once each where it was called
#
# Workers are other processes, whose warnings would be printed again by each of them.

#: Category and text of a warning.
RowWarning = tuple[type[Warning], str]


@contextmanager
def row_warnings(collected: list[RowWarning]) -> Iterator[None]:
    """Append our warnings of the block to a list when it ends; those of others are shown.

    Beside other threads, with which Python's list of filters is shared, all are shown.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PipeWarning)
        yield
    for one in caught:
        if issubclass(one.category, PipeWarning):
            collected.append((one.category, str(one.message)))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# Results of rows

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


@checked_names
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
        - the arguments of `lower`, and ``engine``; a ``framework`` also gives the costs of a
          transformer;
        - ``memory_limit``, all bytes of a device, also as ``"80GiB"``. ``zb_1p`` and ``zb_2p``
          order their tasks within it;
        - ``per``, the parts that costs are of: ``"stage"`` (the default), ``"device"`` or
          ``"layers"``, as in `Costs.in_chunks`. Use ``"device"`` to compare schedules with one and
          with several stages a device for one model;
        - the fields of `Costs`, or whole ``costs``. ``recompute_time`` is the seconds of R,
          ``grad_norm_time`` those of GRAD_NORM, ``offload_time`` those of OFFLOAD;
        - in place of costs a transformer: ``model`` or its sizes, ``gpu`` and other arguments of
          `Transformer.costs`, or a mapping of all these, ``transformer``. ``layers_per_stage`` may
          be ``"balanced"`` (the default: for the devices of the row's schedule) or ``"even"``.
          ``recompute`` is that of the transformer if it has one of its values;
        - ``network``, ``latency``, ``bandwidth``, ``host_latency`` and ``host_bandwidth``.

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
          a second), ``peak_memory`` (bytes of the fullest device; missing without bytes in the
          costs);
        - ``low``, ``high``, ``memory_limit``, ``fits``, ``tokens_per_second`` and ``mfu`` as in
          `compare`, each if a row has it;
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
                    row = wanted[digest]  # its settings are for readers only
                    record = {**row.shown, **result, "settings": row.case, "version": __version__}
                    journal.append(digest, {key: _finite(x) for key, x in record.items()})
                bar.update()
    for category, text in dict.fromkeys(collected):
        warn_caller(text, category)
    warn_of_other_models(_costs_per_stage(rows, results))
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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
