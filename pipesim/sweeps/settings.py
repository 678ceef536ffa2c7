"""Settings of simulations in layers of nested tables, from arguments and from TOML files.

A later layer overrides an earlier one key by key: the shared settings of a file, then those of a
``[[schedule]]`` table, then the arguments. ``pipesim simulate --help file`` shows such a file. A
sweep has flat settings, without tables: `FLAT` maps each to its path in the tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipesim.costs.costs import PER, Costs
from pipesim.costs.rows import ROWS
from pipesim.errors import ArgumentError, UnknownNameError, check_count, check_name, suggestion
from pipesim.graph.graph import TaskGraph
from pipesim.list_scheduling.limits import activation_limits
from pipesim.lowering.lower import lower
from pipesim.models.gpu import fitted_preset, gpu_table, has_gpu_table
from pipesim.models.model_costs import context_sizes
from pipesim.models.parallel import RECOMPUTE
from pipesim.models.placed_split import is_word
from pipesim.models.transformer import Transformer
from pipesim.named_schedules.vocabulary_parallel import vocabulary_placement
from pipesim.network.links import HostLink, Nodes
from pipesim.network.network import Network
from pipesim.network.sources import KEYS, PRESET_OPTIONS
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import Counts, ScheduleInfo, options_of_schedules, schedule_info
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import read_toml
from pipesim.utils.texts import in_bytes

# Schedules in settings: a name in the registry, or a file that holds the orders


def is_file(name: object) -> bool:
    """Return whether a name is that of a file: it ends in .csv or .txt, or has a slash."""
    return (
        isinstance(name, str)
        and name not in options_of_schedules()
        and (name.endswith((".csv", ".txt")) or "/" in name)
    )


def known_name(name: str) -> str:
    """Return the registered schedule that a name spells; of any other name, the name itself."""
    try:
        return schedule_info(name).name
    except UnknownNameError:  # a file, or a mistake that is reported with its place
        return name


def source_info(name: str) -> ScheduleInfo:
    """Return the information on a registered schedule, or on the schedule in a file."""
    if not is_file(name):
        return schedule_info(name)
    schedule = _load(name)
    n_devices, n_microbatches = schedule.n_devices, schedule.n_microbatches
    return ScheduleInfo(
        name=name,
        summary="from a file",
        source=name,
        build=lambda p, m: schedule,
        options=(),
        counts=Counts(
            f"just the {n_devices} devices and {n_microbatches} micro-batches of its file",
            lambda p, m: (p, m) == (n_devices, n_microbatches),
        ),
    )


def file_counts(name: object) -> dict[str, int]:
    """Return ``n_devices`` and ``n_microbatches`` of the schedule in a file; {} for other names."""
    if not isinstance(name, str) or not is_file(name):
        return {}
    schedule = _load(name)
    return {"n_devices": schedule.n_devices, "n_microbatches": schedule.n_microbatches}


def file_digest(name: str) -> str:
    """Return a digest of the orders in a file."""
    return hashlib.sha256(_load(name).grid().encode()).hexdigest()[:32]


def _load(name: str) -> Schedule:
    try:
        state = Path(name).stat()
    except (OSError, ValueError):  # ValueError: no path can have a null character
        return Schedule.load(name)  # raises the right error
    return _cached_load(name, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _cached_load(name: str, *state: int) -> Schedule:
    """Load a file, once for all rows of a sweep; ``state`` is its time of change (ns) and size."""
    return Schedule.load(name)


# Costs of a transformer on a GPU: the table ``costs.transformer``

#: Sizes of a transformer.
_SIZES = tuple(field.name for field in fields(Transformer))
#: Sizes that must be given if there is no model to take them from.
_NEEDED = _SIZES[:5]
#: Keys that say which transformer it is.
MODEL = ("model", *_SIZES)
#: Arguments of `Transformer.costs` that are of a GPU, of `Costs` or of a schedule.
_OTHERS = (
    "gpu", "flops_per_second", "network", "launch", "optimizer_step", "placement", "memory_limit",
    "parallel", "vocabulary_parallel",
)  # fmt: skip
#: Its other arguments.
COST_OPTIONS = tuple(
    name
    for name, parameter in signature(Transformer.costs).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in _OTHERS
)
#: Keys of the table. The framework, which `lower` takes too, stands above it.
TRANSFORMER = tuple(
    name
    for name in (*MODEL, "layers_per_stage", "gpu", "flops_per_second", *COST_OPTIONS)
    if name != "framework"
)


def make_model(settings: Mapping[str, Any]) -> Transformer:
    """Return the transformer of settings: the preset ``model`` with other sizes, or sizes alone."""
    sizes = {name: settings[name] for name in _SIZES if name in settings}
    if "model" in settings:
        return Transformer.preset(settings["model"], **sizes)
    missing = [name for name in _NEEDED if name not in sizes]
    if missing:
        raise ArgumentError(
            f"{missing[0]} is missing; give the sizes of a transformer ({', '.join(_NEEDED)}) "
            "or a model, such as llama3_8b"
        )
    return Transformer(**sizes)


def device_size(settings: Mapping[str, Any]) -> int:
    """Return the GPUs of a device: ``tensor_parallel * context_parallel`` of settings.

    Of several ``context_parallel``, one a micro-batch, it is the largest.
    """
    sizes = {name: settings.get(name, 1) for name in ("tensor_parallel", "context_parallel")}
    sizes["context_parallel"], _ = context_sizes(sizes["context_parallel"])
    return prod(map(check_count, sizes, sizes.values()))


def transformer_costs(costs: Mapping[str, Any], placement: Placement) -> Costs:
    """Return the costs in settings that have a table ``transformer``; other fields override them.

    Without ``layers_per_stage``, and with ``"balanced"``, layers are divided such that devices are
    balanced; with ``"even"`` (or ``partition = "even"``) evenly. A network that is a machine has
    devices of `device_size` GPUs, unless it has ``gpus_per_device``. Factors of the network in the
    file of a fitted GPU apply to a machine; an ``efficiency`` or ``nic_efficiency`` of its own
    takes the place of the file's.
    """
    others = dict(costs)
    settings, network = others.pop("transformer"), dict(others.pop("network", {}))
    if "preset" in network:
        network.setdefault("gpus_per_device", device_size(settings))
    options = {name: settings[name] for name in COST_OPTIONS if name in settings}
    rates = {name: settings[name] for name in ("gpu", "flops_per_second") if name in settings}
    layers = settings.get("layers_per_stage")
    if placement.edges == vocabulary_placement(placement.n_devices).edges != ():
        layers, options = layers or placement.n_devices, {**options, "vocabulary_parallel": True}
    elif layers is None or is_word(layers):
        layers, options = layers or placement.n_stages, {**options, "placement": placement}
    links = Network.from_dict(network)
    if "preset" in network and has_gpu_table(settings.get("gpu")):
        options_of_preset = {name: network[name] for name in PRESET_OPTIONS if name in network}
        fitted = fitted_preset(network["preset"], settings["gpu"], **options_of_preset)
        host = links.host if network.get("host") else fitted.host
        links = replace(fitted, host=host, links=links.links)
    built = make_model(settings).costs(layers, **rates, **options, network=links)
    return replace(built, **others) if others else built


# Layers of settings, and their simulation

Settings = dict[str, Any]

#: Number of devices and of micro-batches: setting, and name in the library.
COUNTS = {"devices": "n_devices", "microbatches": "n_microbatches"}
#: Argument of `lower` for each setting.
LOWERING = {
    {"n_replicas": "replicas"}.get(name, name): name
    for name in signature(lower).parameters
    if name != "schedule"
}
_NODES, _HOST = (tuple(field.name for field in fields(x)) for x in (Nodes, HostLink))
#: Keys of a layer, besides the name and label of a schedule.
SETTINGS = (*COUNTS, *LOWERING, "engine", "memory_limit", "options", "per", "costs")

#: Flat names of seconds whose names are options of the lowering.
SECONDS = {
    name: f"{name}_time" for name, row in ROWS.items() if name in LOWERING and row.unit == "seconds"
}
#: Path in the tables of each flat setting. Other names are options of a schedule.
FLAT: dict[str, tuple[str, ...]] = {
    "schedule": ("name",),
    **{flat: (key,) for key, flat in COUNTS.items()},
    **{flat: (key,) for key, flat in LOWERING.items()},
    **{key: (key,) for key in ("engine", "memory_limit", "per", "costs")},
    # `recompute` is how the graph is lowered, not how long R takes; likewise others.
    **{SECONDS.get(k, k): ("costs", k) for k in ROWS if SECONDS.get(k, k) not in LOWERING},
    "latency": ("costs", "network", "latency"),
    "bandwidth": ("costs", "network", "bandwidth"),
    **{f"host_{k}": ("costs", "network", "host", k) for k in ("latency", "bandwidth")},
    "transformer": ("costs", "transformer"),
    # `recompute` stands above; `nest` tells that of a transformer by its value.
    **{key: ("costs", "transformer", key) for key in TRANSFORMER if key != "recompute"},
}


def merge(*layers: Settings) -> Settings:
    """Return settings in which later layers override earlier ones, key by key."""
    result: Settings = {}
    for layer in layers:
        for key, new in layer.items():
            old = result.get(key)
            are_tables = isinstance(old, dict) and isinstance(new, dict)
            result[key] = merge(result[key], new) if are_tables else new
    return result


def set_value(layer: Settings, path: Sequence[str], value: Any) -> Settings:
    """Return settings with ``value`` at a path of keys."""
    for key in reversed(path):
        value = {key: value}
    return merge(layer, value)


def setting_path(key: str) -> tuple[str, ...]:
    """Return the path in the tables of a flat setting."""
    return FLAT.get(key, ("options", key))


def nest(flat: Mapping[str, Any]) -> Settings:
    """Return flat settings as tables. Single fields override whole costs and networks."""
    layer: Settings = {}
    for key in sorted(flat, key=lambda key: len(FLAT.get(key, ()))):
        path = setting_path(key)
        if key == "recompute" and flat[key] in RECOMPUTE:  # of a transformer, not of tasks
            path = ("costs", "transformer", key)
        layer = set_value(layer, path, flat[key])
    return layer


def check_layer(where: str, layer: object, keys: tuple[str, ...], folder: Path) -> Settings:
    """Return a layer, if all its keys are valid, with the costs of its file (in ``folder``)."""
    table = _check_table(where, layer, keys)
    if "options" in table:
        _check_table(f"{where}: options", table["options"], None)  # the schedule checks the keys
    if "costs" not in table:
        return table
    cost_keys = ("file", "transformer", *ROWS)
    costs = _check_table(f"{where}: costs", table["costs"], cost_keys)
    if "transformer" in costs:
        model = _check_table(f"{where}: costs.transformer", costs["transformer"], TRANSFORMER)
        if str(model.get("gpu")).endswith(".json"):
            model["gpu"] = gpu_table(folder / str(model["gpu"])).to_dict()
        costs["transformer"] = model
    if "network" in costs:
        network = _check_table(f"{where}: costs.network", costs["network"], KEYS)
        if "nodes" in network:
            _check_table(f"{where}: costs.network.nodes", network["nodes"], _NODES)
        if "host" in network:
            _check_table(f"{where}: costs.network.host", network["host"], _HOST)
    if "file" in costs:
        costs = merge(Costs.load(folder / str(costs.pop("file"))).to_dict(), costs)
    return {**table, "costs": costs}


def _check_table(where: str, value: object, keys: tuple[str, ...] | None) -> Settings:
    """Return a copy of a table, if its keys are among ``keys``; any key if that is None."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} must be a table of settings, got {value!r}")
    for key in value:
        if keys is not None and key not in keys:
            path = FLAT.get(key, ())[:-1]
            hint = (
                f"; it belongs in [{'.'.join(path)}]" if path
                else "; it belongs above all tables" if key == "framework"
                else f"{suggestion(key, keys)} (known: {', '.join(keys)})"
            )  # fmt: skip
            raise UnknownNameError(f"{where}: unknown key {key!r}{hint}")
    return dict(value)


def read_grid(path: Path) -> Settings:
    """Return the table ``[grid]`` of a TOML file; {} if it has none."""
    return _check_table(f"{path}: grid", read_toml(path, "settings from").get("grid", {}), None)


def _read_layers(path: Path, other_tables: tuple[str, ...]) -> tuple[Settings, list[Settings]]:
    """Return the shared settings of a TOML file, and the table of each of its schedules."""
    content = read_toml(path, "settings from")
    listed = content.get("schedule", [])
    tables = []
    for number, table in enumerate(listed if isinstance(listed, list) else [listed], 1):
        where = f"{path}: schedule {number}"
        table = {"name": table} if isinstance(table, str) else table
        tables.append(check_layer(where, table, ("name", "label", *SETTINGS), path.parent))
        if not isinstance(tables[-1].get("name"), str):
            raise ArgumentError(f"{where} has no name; pipesim schedules lists them")
        if is_file(tables[-1]["name"]):  # relative to this file, as are files of costs
            table = {"label": tables[-1]["name"], **tables[-1]}
            tables[-1] = {**table, "name": str(path.parent / table["name"])}
    keys = ("schedule", *other_tables, *SETTINGS)
    shared = check_layer(str(path), content, keys, path.parent)
    return {key: value for key, value in shared.items() if key in SETTINGS}, tables


def cases(
    names: Sequence[str],
    config: Path | None,
    arguments: Settings,
    *,
    other_tables: tuple[str, ...] = (),
) -> list[Settings]:
    """Return the settings of each schedule to simulate.

    ``names`` are labels or names of the tables of the TOML file ``config``, names of further
    schedules, or files that hold a schedule; empty for all tables. ``arguments`` is the last layer.
    Other functions read ``other_tables`` of the file.
    """
    shared, tables = ({}, []) if config is None else _read_layers(config, other_tables)
    if names:
        tables = [
            table
            for name in names
            for table in [t for t in tables if name in (t.get("label"), t["name"])]
            or [{"name": name}]
        ]
    if not tables:
        raise ArgumentError("no schedule is named; pipesim schedules lists them")
    named_cases = [merge({"label": t["name"]}, shared, t, arguments) for t in tables]
    for case in named_cases:
        case["name"] = known_name(case["name"])
        counts = file_counts(case["name"])
        case.update(
            {key: counts[flat] for key, flat in COUNTS.items() if counts and key not in case}
        )
    drop_foreign_options(named_cases, [t.get("options", ()) for t in tables])
    return named_cases


def drop_foreign_options(cases: Sequence[Settings], own: Sequence[Iterable[str]]) -> None:
    """Drop a shared option from the schedules that do not take it, if another schedule does.

    ``own`` lists the options that were set for that one case. They stay: wrong ones are refused.
    """
    takes = {name: set(options) for name, options in options_of_schedules().items()}
    takes |= {case["name"]: set() for case in cases if is_file(case["name"])}
    others = set().union(*(takes.get(case["name"], ()) for case in cases))
    for case, own_options in zip(cases, own, strict=True):
        foreign = others - takes.get(case["name"], others) - set(own_options)
        case["options"] = {k: v for k, v in case.get("options", {}).items() if k not in foreign}


def check_counts(case: Settings) -> None:
    """Raise unless a case has its numbers of devices and micro-batches."""
    for key in COUNTS:
        if key not in case:
            raise ArgumentError(f"{key} is missing; give --{key}, or {key} in the TOML file")


def _make_schedule(
    info: ScheduleInfo, case: Settings, costs: Costs | None = None, limits: Any = None
) -> Schedule:
    """Return the schedule of a case, with ``costs`` if it takes them.

    A limit of all bytes is left out: ``limits`` are the bytes of activations that it leaves.
    """
    options: dict[str, Any] = {"costs": costs} if costs and "costs" in info.options else {}
    options |= case["options"]
    if costs and options.get("vocabulary_parallel") is True:
        options["vocabulary_parallel"] = costs
    if _takes_limits(info) and (costs is None or np.any(costs.activation_bytes)):
        options.pop("memory_limit", None)
        if limits is not None:
            options["activation_limit"] = limits
    return info.make(case["devices"], case["microbatches"], **options)


def _takes_limits(info: ScheduleInfo) -> bool:
    """Return whether a schedule is built for a limit of memory, of which it knows its own part."""
    return {"memory_limit", "activation_limit"} <= {*info.options}


def _limited_graph(info: ScheduleInfo, case: Settings, costs: Costs, graph: TaskGraph) -> TaskGraph:
    """Return the graph of the order within a limit of all bytes that replicas may share.

    ``graph`` is that of an order without the limit. Its devices hold the same parameters.
    """
    limit = case["options"].get("memory_limit")
    if limit is None or not _takes_limits(info) or not np.any(costs.activation_bytes):
        return graph
    n = costs.n_microbatches
    room = activation_limits(graph, [costs.microbatch(k) for k in range(n or 1)], limit)
    limits = np.full(case["devices"], np.inf)
    placement = _make_schedule(info, case, costs).placement
    for homes in graph.homes:
        np.minimum.at(limits, list(placement.device_of), room[homes])
    own = case["options"].get("activation_limit")
    if own is not None:
        limits = np.minimum(limits, checked_memory_limit(own, len(limits), "activation_limit"))
    if (limits < 0).any():  # it fits with no order: the simulation says by how much
        return graph
    return _lowered(_make_schedule(info, case, costs, limits.tolist()), case)


def _lowered(order: Schedule, case: Settings) -> TaskGraph:
    return lower(order, **{name: case[key] for key, name in LOWERING.items() if key in case})


def _make_costs(info: ScheduleInfo, case: Settings) -> Costs:
    per = check_name("per", case.get("per", "stage"), ("stage", *PER))
    values = case.get("costs", {})
    if "transformer" in values:
        if "per" in case:
            raise ArgumentError(
                f"per={per!r} and a transformer, which is divided among the stages of any "
                "schedule; leave out per"
            )
        own = {name: case[name] for name in ("framework",) if name in case}
        placement = _make_schedule(info, case).placement
        return transformer_costs(merge({"transformer": own}, values), placement)
    costs = Costs.from_dict(values)
    if per == "stage":
        return costs
    placement = _make_schedule(info, case).placement
    if per == "layers":
        return costs.in_chunks(placement, "layers")
    return costs.in_chunks(placement)  # warns if devices differ


def run(case: Settings, info: ScheduleInfo | None = None) -> Timeline:
    """Simulate the schedule of one case; return the timeline, with the case's label.

    ``info`` is that of the case's schedule, since this process may not have registered it.
    """
    check_counts(case)
    for key in case["options"]:
        if key in ("name", *COUNTS.values()):
            raise ArgumentError(f"{key} is no option of a schedule; see pipesim simulate --help")
    info = info or source_info(case["name"])
    costs = _make_costs(info, case)
    schedule = _make_schedule(info, case, costs)
    if schedule.placement.edges:
        case = {"tied": costs.tied_stages, **case}
    graph = _lowered(schedule, case)
    graph = _limited_graph(info, case, costs, graph)
    options = {"engine": case["engine"]} if "engine" in case else {}
    if "memory_limit" in case:
        options["memory_limit"] = in_bytes("memory_limit", case["memory_limit"])
    timeline = predict_timeline(graph, costs, **options)
    return timeline.with_name(str(case["label"]))
