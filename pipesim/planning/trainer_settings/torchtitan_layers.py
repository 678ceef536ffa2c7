"""Layers of each stage as torchtitan shares them, and the stages of each device."""

from __future__ import annotations

import re

from pipesim.errors import ArgumentError, check_count
from pipesim.planning.configurations.torchtitan import TORCH_NAMES
from pipesim.planning.trainer_settings.settings import whole_number
from pipesim.planning.trainer_settings.tables import PREFIX, Tables

#: Schedules with one stage a device; others have two unless the layers make more.
SINGLE = frozenset({"gpipe", "1f1b"})
_V_SHAPED = frozenset({"zbv", "dualpipev"})
_LAYER = re.compile(r"layers\.([0-9]+)")


def listed_layers(tables: Tables, n_layers: int | None, p: int) -> tuple[int, ...]:
    """Return the layers of each stage that the settings list; none if they list none."""
    key = "module_fqns_per_model_part"
    parts = tables.get("parallelism", key, None)
    if parts is None or p == 1:
        return ()
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts
    ):
        raise ArgumentError(f"toml: {key} must be lists of names, got {parts!r:.60}")
    layers = [[m[1] for name in part if (m := _LAYER.fullmatch(name))] for part in parts]
    order = [int(number) for part in layers for number in part]
    if order != list(range(len(order))) or (n_layers is not None and len(order) != n_layers):
        expected = "all" if n_layers is None else f"n_layers={n_layers}"
        raise ArgumentError(
            f"toml: {key} must have {expected} layers in order, each once, got {order!r:.60}"
        )
    whole_number("toml", len(parts), p, f"the parts of {key} must be a multiple of {PREFIX}degree")
    return tuple(map(len, layers))


def shared_layers(tables: Tables, n_layers: int | None, p: int, n_chunks: int) -> tuple[int, ...]:
    """Return the layers of each stage as torchtitan shares them; none if they are unknown.

    The embedding, and norm and head, count as some layers. The first stages have one more of the
    layers that are left over.
    """
    first, last = (
        tables.count("parallelism", f"{PREFIX}{end}_stage_less_layers", 1, 0)
        for end in ("first", "last")
    )
    key = f"{PREFIX}layers_per_stage"
    per_stage = tables.get("parallelism", key, None)
    if per_stage is not None:
        check_count(f"toml: {key}", per_stage)
    if n_layers is None:
        if per_stage is not None and p > 1:
            raise ArgumentError(f"n_layers is missing, which {key} needs; give n_layers=")
        return ()
    if p == 1:
        return (n_layers,)
    effective = n_layers + first + last
    n_stages = n_chunks * p if per_stage is None else -(-effective // per_stage)
    why = f"{key} must make a multiple of {PREFIX}degree stages"
    whole_number("toml", n_stages, p, why)
    even, longer = divmod(effective, n_stages)
    if even < max(first, last, 1):
        raise ArgumentError(
            f"toml: {n_stages} stages have {even} layers each, of n_layers={n_layers}, which are "
            f"too few for {PREFIX}first_stage_less_layers {first} and last {last}"
        )
    sizes = [even + (stage < longer) for stage in range(n_stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def check_chunks(tables: Tables, schedule: str, n_chunks: int) -> None:
    """Raise `ArgumentError` for a number of stages a device that the schedule does not have."""
    name = TORCH_NAMES.get(schedule, "")
    needs = ""
    if schedule in SINGLE and n_chunks != 1:
        needs = "1"
    elif schedule in _V_SHAPED and n_chunks != 2:
        needs = "2"
    elif name and schedule not in SINGLE and n_chunks < 2:
        needs = "at least 2"
    if needs:
        raise ArgumentError(
            f"toml: {name} has {needs} stages a device, but the layers of the settings make "
            f"{n_chunks}; change {PREFIX}layers_per_stage"
        )
