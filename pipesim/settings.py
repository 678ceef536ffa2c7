"""Settings of simulations in layers of nested tables, from arguments and from TOML files.

A later layer overrides an earlier one key by key: a file's shared settings, then a
``[[schedule]]`` table's own, then the arguments. ``pipesim simulate --help`` shows the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipesim.costs import VALUE_FIELDS, Costs
from pipesim.errors import ArgumentError, UnknownNameError, suggestion
from pipesim.links import Nodes
from pipesim.lower import lower
from pipesim.network import KEYS
from pipesim.schedule import schedule, schedules
from pipesim.simulate import simulate
from pipesim.timeline import Timeline

__all__ = ["COUNTS", "SETTINGS", "Settings", "cases", "checked", "merged", "run"]

Settings = dict[str, Any]

COUNTS = {"devices": "n_devices", "microbatches": "n_microbatches"}
_LOWERING = ("recompute", "overlap", "streams", "rendezvous", "hosts", "step")
_NODES = tuple(field.name for field in fields(Nodes))
SETTINGS = (*COUNTS, *_LOWERING, "engine", "options", "costs")


def merged(*layers: Settings) -> Settings:
    """Return settings in which a later layer overrides an earlier one, key by key."""
    result: Settings = {}
    for layer in layers:
        for key, new in layer.items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(new, dict)
            result[key] = merged(result[key], new) if both else new
    return result


def checked(where: str, layer: object, known: tuple[str, ...], folder: Path) -> Settings:
    """Return a layer whose keys are all known, with its file of costs read in."""
    table = _table(where, layer, known)
    if "options" in table:
        _table(f"{where}: options", table["options"], None)  # the schedule knows its own
    if "costs" not in table:
        return table
    costs = _table(f"{where}: costs", table["costs"], ("file", "network", *VALUE_FIELDS))
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


def _read(path: Path) -> tuple[Settings, list[Settings]]:
    """Return the shared settings of a TOML file, and its schedules' own."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read settings from {path}: {error}") from error
    listed = content.get("schedule", [])
    tables = []
    for number, table in enumerate(listed if isinstance(listed, list) else [listed], 1):
        where = f"{path}: schedule {number}"
        table = {"name": table} if isinstance(table, str) else table
        tables.append(checked(where, table, ("name", "label", *SETTINGS), path.parent))
        if not isinstance(tables[-1].get("name"), str):
            raise ArgumentError(f"{where} has no name; pipesim schedules lists them")
    shared = checked(str(path), content, ("schedule", *SETTINGS), path.parent)
    shared.pop("schedule", None)
    return shared, tables


def cases(names: Sequence[str], config: Path | None, given: Settings) -> list[Settings]:
    """Return the settings of each schedule that is to be simulated.

    Parameters
    ----------
    names
        Labels or names of the file's tables, or else of further schedules; empty for all tables.
    config
        The TOML file, if there is one.
    given
        The arguments' layer.

    Raises
    ------
    ArgumentError
        For a file that cannot be read, unknown keys, or no schedule at all.
    """
    shared, tables = ({}, []) if config is None else _read(config)
    if names:
        found = ([t for t in tables if name in (t.get("label"), t["name"])] or [{"name": name}]
                 for name in names)  # fmt: skip
        tables = [table for some in found for table in some]
    if not tables:
        raise ArgumentError("no schedule is named; pipesim schedules lists them")
    found_cases = [merged({"label": t["name"]}, shared, t, given) for t in tables]
    takes = {name: set(text.split(", ")) for name, text in schedules()["options"].items()}
    for case, table in zip(found_cases, tables, strict=True):
        # A shared option is for the schedules that take it, if there is one.
        others = set().union(*(takes.get(c["name"], ()) for c in found_cases))
        foreign = others - takes.get(case["name"], others) - set(table.get("options", ()))
        case["options"] = {k: v for k, v in case.get("options", {}).items() if k not in foreign}
    return found_cases


def run(case: Settings) -> Timeline:
    """Simulate the schedule of one case, and give the timeline its label."""
    for key in COUNTS:
        if key not in case:
            raise ArgumentError(f"{key} is missing; give --{key}, or {key} in the TOML file")
    for key in case["options"]:
        if key in ("name", *COUNTS.values()):
            raise ArgumentError(f"{key} is no option of a schedule; see pipesim simulate --help")
    order = schedule(case["name"], case["devices"], case["microbatches"], **case["options"])
    graph = lower(order, **{key: case[key] for key in _LOWERING if key in case})
    engine = {"engine": case["engine"]} if "engine" in case else {}
    timeline = simulate(graph, Costs.from_dict(case.get("costs", {})), **engine)
    return timeline.with_name(str(case["label"]))
