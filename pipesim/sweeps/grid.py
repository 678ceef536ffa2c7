"""Configurations of a sweep: a grid or a list of them, to rows of settings that can be run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, PipeError, UnknownNameError, suggestion
from pipesim.errors import number as real_number
from pipesim.network.network import Network
from pipesim.scheduling.registry import options_of_schedules
from pipesim.sweeps.schedule_sources import counts_of_file, digest_of_file, info_of, is_file
from pipesim.sweeps.settings import (
    COUNTS,
    FLAT,
    LOWERING,
    SETTINGS,
    Settings,
    check_counts,
    checked,
    drop_foreign_options,
    merged,
    nested,
    path_of,
)
from pipesim.utils.host_memory import check_rows

__all__ = ["Row", "cell", "grid_rows", "rows", "version"]

Flat = dict[str, Any]

#: Part of each row's digest, as what a row's results mean may change with it.
_FORMAT = 1


@dataclass(frozen=True)
class Row:
    """A configuration: its columns of the table, and its settings.

    Attributes
    ----------
    digest
        Of all that the row's results depend on.
    """

    shown: Flat
    case: Settings
    digest: str


def rows(configurations: object, base: object) -> list[Row]:
    """Return the rows of `pipesim.sweep`'s arguments; it names the errors."""
    known = _known()
    if isinstance(configurations, Mapping):
        given, is_grid = _product(configurations, known), True
    elif isinstance(configurations, Sequence) and not isinstance(configurations, str):
        given = [_flat(f"row {k}", row, known) for k, row in enumerate(configurations)]
        is_grid = False
    else:
        raise ArgumentError(
            "sweep takes a mapping of keys to lists of values, or a sequence of mappings, got "
            f"{configurations!r}"
        )
    shared = _flat("base", base, known)
    layers = [_over(shared, row) for row in given]
    cases = [_case(f"row {number}", row) for number, row in enumerate(layers)]
    found = _rows(given, cases, [[] if is_grid else list(row) for row in given])
    return _unlike(found) if is_grid else found


def grid_rows(cases: Sequence[Settings], grid: Mapping[str, Any]) -> list[Row]:
    """Return a row for each case and combination of values of a grid."""
    grid = {{**LOWERING, **COUNTS}.get(key, key): values for key, values in grid.items()}
    shown, found, own = [], [], []
    for case, point in itertools.product(cases, _product(grid, _known(), len(cases))):
        shown.append({"schedule": case["label"], **point})
        layer = checked(f"grid, {_text(point)}", nested(point), SETTINGS, Path())
        found.append(merged(case, layer))
        check_counts(found[-1])
        own.append(list(case["options"]))
    return _unlike(_rows(shown, found, own))


def cell(value: Any) -> Any:
    """Return a value as a table shows it: what has parts as JSON."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _text(row: Flat) -> str:
    return ", ".join(f"{key} {cell(value)}" for key, value in row.items())


def _known() -> tuple[str, ...]:
    """Return the keys that a row may have: settings, and the options of all schedules."""
    options = {option for taken in options_of_schedules().values() for option in taken}
    return (*FLAT, *sorted(options - set(FLAT)))


def _product(grid: Mapping[str, Any], known: Sequence[str], n_cases: int = 1) -> list[Flat]:
    """Return every combination of a grid's values, if there is memory for them in all cases."""
    _flat("grid", dict.fromkeys(grid), known)
    for key, values in grid.items():
        if not isinstance(values, (list, tuple, range, np.ndarray)) or _length(values) == 0:
            raise ArgumentError(
                f"grid: {key} must be a list of at least one value, got {values!r}; what is the "
                "same in every row goes into base"
            )
    check_rows(n_cases * math.prod(map(_length, grid.values())))
    plain = [[_value("grid", key, value) for value in grid[key]] for key in grid]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]


def _length(values: Any) -> int:
    """Return how many values there are; of a range, more than ``len`` can say."""
    if isinstance(values, range):
        return max(0, -((values.start - values.stop) // values.step))
    return len(values)


def _flat(where: str, row: Any, known: Sequence[str]) -> Flat:
    """Return the values of a row that are given, as plain ones, if its keys are ``known``."""
    if not isinstance(row, Mapping):
        raise ArgumentError(f"{where} must be a mapping of keys to values, got {row!r}")
    for key in row:
        if key not in known:
            near = suggestion(key, known)
            raise UnknownNameError(
                f"{where}: unknown key {key!r}{near} (known: {', '.join(known)})"
            )
    return {key: _value(where, key, value) for key, value in row.items() if value is not None}


def _value(where: str, key: str, value: object) -> Any:
    """Return the plain value of a key."""
    plain = _plain(f"{where}: {key}", value)
    if key in ("costs", "network") and not isinstance(plain, (dict, type(None))):
        kind = key.capitalize()
        raise ArgumentError(f"{where}: {key} must be a pipesim.{kind} or a mapping, got {value!r}")
    return plain


def _plain(where: str, value: Any) -> Any:
    """Return a value as JSON and TOML have it."""
    if isinstance(value, (Costs, Network)):
        return value.to_dict()
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(where, value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(where, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, part) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if (got := real_number(value)) is not None:  # such as a Fraction
        return got
    raise ArgumentError(
        f"{where} must be numbers, text, a Costs or a Network, got {value!r}; give a schedule of "
        "your own a name with pipesim.register"
    )


def _over(base: Flat, row: Flat) -> Flat:
    """Return a row over what all share; whole costs replace the parts of others."""
    row = {key: value for key, value in row.items() if value is not None}
    paths = [path_of(key) for key in row]
    kept = {
        key: value
        for key, value in base.items()
        if not any(path_of(key)[: len(path)] == path for path in paths)
    }
    return kept | row


def _case(where: str, row: Flat) -> Settings:
    """Return a row's settings, if it has those without which nothing can be run."""
    row = {**counts_of_file(row.get("schedule")), **row}
    for key in ("schedule", *COUNTS.values()):
        if key not in row:
            raise ArgumentError(f"{where} has no {key}; give it there or in base")
    case = checked(where, nested(row), ("name", *SETTINGS), Path())
    return {"label": str(case["name"]), **case}


def _rows(shown: list[Flat], cases: list[Settings], own: list[list[str]]) -> list[Row]:
    """Return rows, if their schedules and options are known; ``own`` as for foreign options."""
    if not cases:
        raise ArgumentError("there is nothing to sweep; give at least one configuration")
    for number, case in enumerate(cases):
        _named(number, info_of, case["name"])
    drop_foreign_options(cases, own)
    rows = []
    for number, (row, case) in enumerate(zip(shown, cases, strict=True)):
        _named(number, info_of(case["name"]).check_options, case["options"])
        dropped = {k for k in row if k not in FLAT and k not in case["options"]}
        visible = {k: None if k in dropped else v for k, v in row.items()}
        rows.append(Row(visible, case, _digest(case)))
    return rows


def _named(number: int, check: Callable[[Any], object], value: object) -> None:
    try:
        check(value)
    except UnknownNameError as error:
        raise UnknownNameError(f"row {number}: {error}") from error


def _unlike(rows: list[Row]) -> list[Row]:
    """Return the rows without those that are alike but for options which they do not take."""
    return list({(row.digest, _text(row.shown)): row for row in rows}.values())


def _digest(case: Settings) -> str:
    """Return a digest of the settings, which is the same however their costs were given."""
    settings = {key: value for key, value in case.items() if key != "label"}
    if is_file(case["name"]):
        settings["orders"] = digest_of_file(case["name"])
    with suppress(PipeError):  # the row will say what is wrong
        settings["costs"] = Costs.from_dict(settings.get("costs", {})).to_dict()
    text = json.dumps([_FORMAT, version(), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def version() -> str:
    """Return the version of pipesim, on which results depend; a checkout need not be installed."""
    try:
        return importlib.metadata.version("pipesim")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
