"""Turn the configurations of a sweep, a grid or a list, into rows of settings that can be run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipesim._version import __version__
from pipesim.costs.costs import Costs
from pipesim.costs.workload import Workload
from pipesim.errors import ArgumentError, PipeError, UnknownNameError, suggestion
from pipesim.errors import number as real_number
from pipesim.models.gpu import GPU
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.scheduling.registry import options_of_schedules
from pipesim.sweeps.schedule_sources import file_counts, file_digest, is_file, source_info
from pipesim.sweeps.settings import (
    COUNTS,
    FLAT,
    LOWERING,
    SETTINGS,
    Settings,
    check_counts,
    check_layer,
    drop_foreign_options,
    merge,
    nest,
    setting_path,
)
from pipesim.timeline.memory_limit import memory_limit_bytes
from pipesim.utils.host_memory import check_memory, count_text

Flat = dict[str, Any]

#: Bytes of a row of a sweep (measured).
_BYTES_PER_ROW = 4000
#: Version of a row's results. It is part of each row's digest.
_FORMAT = 1


@dataclass(frozen=True)
class SweepRow:
    """A configuration of a sweep.

    Attributes
    ----------
    shown
        Its columns of the table.
    case
        Its settings.
    digest
        Digest of everything that the row's results depend on.
    """

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
    cases = [_case(f"row {number}", row) for number, row in enumerate(layers)]
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
    """Return a row as text: keys and values."""
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
    _check_rows(n_cases * math.prod(map(_length, grid.values())))
    plain = [[_value("grid", key, value) for value in grid[key]] for key in grid]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]


def _check_rows(n_rows: int) -> None:
    """Raise if a sweep of ``n_rows`` would not fit.

    Raises
    ------
    CapacityError
        The message has the number of rows and their bytes.
    """
    nbytes = n_rows * _BYTES_PER_ROW
    check_memory(f"a sweep of {count_text(n_rows)} rows", nbytes, "give fewer values to its keys")


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
    """Return the plain value of a key."""
    plain = _plain(f"{where}: {key}", value)
    if key in ("costs", "network") and not isinstance(plain, (dict, type(None))):
        kind = key.capitalize()
        raise ArgumentError(f"{where}: {key} must be a pipesim.{kind} or a mapping, got {value!r}")
    return plain


def _plain(where: str, value: Any) -> Any:
    """Return a value as types of JSON and TOML."""
    if isinstance(value, (GPU, Transformer)):
        return {key: part for key, part in asdict(value).items() if part is not None}
    if isinstance(value, (Costs, Network, Workload)):
        return value.to_dict()
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(where, value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(where, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if (real := real_number(value)) is not None:  # such as a Fraction
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
    return {"label": str(case["name"]), **_limit_orders(case, row)}


def _limit_orders(case: Settings, flat: Mapping[str, Any]) -> Settings:
    """Give the memory limit of a row to its schedule too, if it has an option of that name."""
    options = options_of_schedules().get(str(case["name"]), ())
    if "memory_limit" not in flat or "memory_limit" not in options:
        return case
    return merge({"options": {"memory_limit": memory_limit_bytes(flat["memory_limit"])}}, case)


def _make_rows(shown: list[Flat], cases: list[Settings], own: list[list[str]]) -> list[SweepRow]:
    """Return rows, if their schedules and options exist; ``own`` as in `drop_foreign_options`."""
    if not cases:
        raise ArgumentError("there is nothing to sweep; give at least one configuration")
    for number, case in enumerate(cases):
        _check_name(number, source_info, case["name"])
    drop_foreign_options(cases, own)
    rows = []
    for number, (row, case) in enumerate(zip(shown, cases, strict=True)):
        _check_name(number, source_info(case["name"]).check_options, case["options"])
        dropped = {k for k in row if k not in FLAT and k not in case["options"]}
        visible = {k: None if k in dropped else v for k, v in row.items()}
        rows.append(SweepRow(visible, case, _digest(case)))
    return rows


def _check_name(number: int, check: Callable[[Any], object], value: object) -> None:
    """Call ``check``; put the number of the row in front of its error."""
    try:
        check(value)
    except UnknownNameError as error:
        raise UnknownNameError(f"row {number}: {error}") from error


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
