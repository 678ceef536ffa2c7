"""Settings of simulations in layers of nested tables, from arguments and from TOML files.

A later layer overrides an earlier one key by key: a file's shared settings, then a
``[[schedule]]`` table's own, then the arguments. ``pipesim simulate --help`` shows the file.
A sweep names settings flat, without tables: `FLAT` says where each belongs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipesim.costs.costs import OTHER_FIELDS, VALUE_FIELDS, Costs
from pipesim.errors import ArgumentError, UnknownNameError, check_name, suggestion
from pipesim.lowering.lower import lower
from pipesim.network.links import Nodes
from pipesim.network.sources import KEYS
from pipesim.scheduling.registry import ScheduleInfo, options_of_schedules
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.sweeps.schedule_sources import counts_of_file, info_of, is_file
from pipesim.timeline.timeline import Timeline
from pipesim.utils.atomic_write import read_text

__all__ = [
    "COUNTS",
    "FLAT",
    "LOWERING",
    "SETTINGS",
    "Settings",
    "cases",
    "check_counts",
    "checked",
    "drop_foreign_options",
    "merged",
    "nested",
    "path_of",
    "place",
    "read_grid",
    "run",
]

Settings = dict[str, Any]

COUNTS = {"devices": "n_devices", "microbatches": "n_microbatches"}
#: The argument of `lower` that each setting is.
LOWERING = {
    "replicas": "n_replicas",
    **{k: k for k in ("recompute", "recompute_first", "overlap", "streams", "rendezvous")},
    **{k: k for k in ("recompute_waits", "hosts", "host_threads", "issue_order")},
    **{k: k for k in ("step", "skips", "portals")},
    **{k: k for k in ("grad_sync", "n_buckets", "shard_optimizer", "sharded", "layout")},
    **{k: k for k in ("exchange_work", "prefetch_keys", "sparse_grad_sync")},
}
_NODES = tuple(field.name for field in fields(Nodes))
SETTINGS = (*COUNTS, *LOWERING, "engine", "options", "per", "costs")

#: Where a setting that is named flat belongs; names that are not here are options of a schedule.
FLAT: dict[str, tuple[str, ...]] = {
    "schedule": ("name",),
    **{flat: (key,) for key, flat in COUNTS.items()},
    **{flat: (key,) for key, flat in LOWERING.items()},
    **{key: (key,) for key in ("engine", "per", "costs")},
    # `recompute` is how the graph is lowered, not how long R takes.
    **{"recompute_time" if k == "recompute" else k: ("costs", k) for k in VALUE_FIELDS},
    **{key: ("costs", key) for key in OTHER_FIELDS},
    "network": ("costs", "network"),
    "latency": ("costs", "network", "latency"),
    "bandwidth": ("costs", "network", "bandwidth"),
}


def merged(*layers: Settings) -> Settings:
    """Return settings in which a later layer overrides an earlier one, key by key."""
    result: Settings = {}
    for layer in layers:
        for key, new in layer.items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(new, dict)
            result[key] = merged(result[key], new) if both else new
    return result


def place(layer: Settings, path: Sequence[str], value: Any) -> Settings:
    """Return settings with ``value`` at the end of a path of keys."""
    for part in reversed(path):
        value = {part: value}
    return merged(layer, value)


def path_of(key: str) -> tuple[str, ...]:
    """Return where a setting that is named flat belongs."""
    return FLAT.get(key, ("options", key))


def nested(flat: Mapping[str, Any]) -> Settings:
    """Return flat settings as tables; whole costs and networks first, parts override them."""
    layer: Settings = {}
    for key in sorted(flat, key=lambda key: len(FLAT.get(key, ()))):
        layer = place(layer, path_of(key), flat[key])
    return layer


def checked(where: str, layer: object, known: tuple[str, ...], folder: Path) -> Settings:
    """Return a layer whose keys are all known, with its file of costs read in."""
    table = _table(where, layer, known)
    if "options" in table:
        _table(f"{where}: options", table["options"], None)  # the schedule knows its own
    if "costs" not in table:
        return table
    known = ("file", "network", *OTHER_FIELDS, *VALUE_FIELDS)
    costs = _table(f"{where}: costs", table["costs"], known)
    if "network" in costs:
        network = _table(f"{where}: costs.network", costs["network"], KEYS)
        if "nodes" in network:
            _table(f"{where}: costs.network.nodes", network["nodes"], _NODES)
    if "file" in costs:
        costs = merged(Costs.load(folder / str(costs.pop("file"))).to_dict(), costs)
    return {**table, "costs": costs}


def _table(where: str, value: object, known: tuple[str, ...] | None) -> Settings:
    """Return a copy of a table, whose keys must be among ``known``."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} must be a table of settings, got {value!r}")
    for key in value:
        if known is not None and key not in known:
            raise UnknownNameError(
                f"{where}: unknown key {key!r}{suggestion(key, known)} (known: {', '.join(known)})"
            )
    return dict(value)


def _content(path: Path) -> Settings:
    text = read_text(path, "settings from", ArgumentError)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ArgumentError(
            f"cannot read settings from {path}: it is nested too deeply to be read"
        ) from error
    except ValueError as error:
        raise ArgumentError(f"cannot read settings from {path}: {error}") from error


def read_grid(path: Path) -> Settings:
    """Return the table ``[grid]`` of a TOML file, which is empty where there is none."""
    return _table(f"{path}: grid", _content(path).get("grid", {}), None)


def _read(path: Path, more: tuple[str, ...]) -> tuple[Settings, list[Settings]]:
    """Return the shared settings of a TOML file, and its schedules' own."""
    content = _content(path)
    listed = content.get("schedule", [])
    tables = []
    for number, table in enumerate(listed if isinstance(listed, list) else [listed], 1):
        where = f"{path}: schedule {number}"
        table = {"name": table} if isinstance(table, str) else table
        tables.append(checked(where, table, ("name", "label", *SETTINGS), path.parent))
        if not isinstance(tables[-1].get("name"), str):
            raise ArgumentError(f"{where} has no name; pipesim schedules lists them")
        if is_file(tables[-1]["name"]):  # beside this file, as files of costs are
            table = {"label": tables[-1]["name"], **tables[-1]}
            tables[-1] = {**table, "name": str(path.parent / table["name"])}
    shared = checked(str(path), content, ("schedule", *more, *SETTINGS), path.parent)
    return {key: value for key, value in shared.items() if key in SETTINGS}, tables


def cases(
    names: Sequence[str], config: Path | None, given: Settings, *, more: tuple[str, ...] = ()
) -> list[Settings]:
    """Return the settings of each schedule that is to be simulated.

    Parameters
    ----------
    names
        Labels or names of the file's tables, or else of further schedules, or files that hold one;
        empty for all tables.
    config
        The TOML file, if there is one.
    given
        The arguments' layer.
    more
        Tables of the file that are read elsewhere.

    Raises
    ------
    ArgumentError
        For a file that cannot be read, unknown keys, or no schedule at all.
    """
    shared, tables = ({}, []) if config is None else _read(config, more)
    if names:
        found = ([t for t in tables if name in (t.get("label"), t["name"])] or [{"name": name}]
                 for name in names)  # fmt: skip
        tables = [table for some in found for table in some]
    if not tables:
        raise ArgumentError("no schedule is named; pipesim schedules lists them")
    found_cases = [merged({"label": t["name"]}, shared, t, given) for t in tables]
    for case in found_cases:
        counts = counts_of_file(case["name"])
        case.update(
            {key: counts[flat] for key, flat in COUNTS.items() if counts and key not in case}
        )
    drop_foreign_options(found_cases, [t.get("options", ()) for t in tables])
    return found_cases


def drop_foreign_options(cases: Sequence[Settings], own: Sequence[Iterable[str]]) -> None:
    """Leave a shared option to the schedules that take it, if there is one.

    Options in ``own`` were given to that very case: they stay, and are refused where wrong.
    """
    takes = {name: set(options) for name, options in options_of_schedules().items()}
    takes |= {case["name"]: set() for case in cases if is_file(case["name"])}
    others = set().union(*(takes.get(case["name"], ()) for case in cases))
    for case, mine in zip(cases, own, strict=True):
        foreign = others - takes.get(case["name"], others) - set(mine)
        case["options"] = {k: v for k, v in case.get("options", {}).items() if k not in foreign}


def check_counts(case: Settings) -> None:
    """Raise unless a case says how many devices and micro-batches there are."""
    for key in COUNTS:
        if key not in case:
            raise ArgumentError(f"{key} is missing; give --{key}, or {key} in the TOML file")


def _order(info: ScheduleInfo, case: Settings, costs: Costs | None = None) -> Schedule:
    """Return the schedule of a case, made for costs where it takes any."""
    options = {"costs": costs} if costs and "costs" in info.options else {}
    return info.make(case["devices"], case["microbatches"], **{**options, **case["options"]})


def run(case: Settings, info: ScheduleInfo | None = None) -> Timeline:
    """Simulate the schedule of one case, and give the timeline its label.

    ``info`` is that of the case's schedule, where this process may not have it registered.
    """
    check_counts(case)
    for key in case["options"]:
        if key in ("name", *COUNTS.values()):
            raise ArgumentError(f"{key} is no option of a schedule; see pipesim simulate --help")
    info = info or info_of(case["name"])
    costs = Costs.from_dict(case.get("costs", {}))
    if check_name("per", case.get("per", "stage"), ("stage", "device")) == "device":
        costs = costs.in_chunks(_order(info, case).placement)
    order = _order(info, case, costs)
    graph = lower(order, **{name: case[key] for key, name in LOWERING.items() if key in case})
    engine = {"engine": case["engine"]} if "engine" in case else {}
    timeline = simulate(graph, costs, **engine)
    return timeline.with_name(str(case["label"]))
