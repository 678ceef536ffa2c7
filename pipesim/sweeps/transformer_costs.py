"""Costs of a case from a transformer and a GPU: the table ``costs.transformer`` of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.scheduling.placement import Placement
from pipesim.utils.files import check_path, read_json

__all__ = ["COST_OPTIONS", "MODEL", "TRANSFORMER", "gpu_fields", "make_model", "transformer_costs"]

#: Sizes of a transformer.
_SIZES = tuple(field.name for field in fields(Transformer))
#: Sizes that must be given if there is no model to take them from.
_NEEDED = _SIZES[:5]
#: Keys that say which transformer it is.
MODEL = ("model", *_SIZES)
#: Arguments of `Transformer.costs` that are of a GPU, of `Costs` or of a schedule.
_OTHERS = (
    "gpu", "flops_per_second", "network", "launch", "optimizer_step", "placement", "memory_limit",
)  # fmt: skip
#: Its other arguments.
COST_OPTIONS = tuple(
    name
    for name, parameter in signature(Transformer.costs).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in _OTHERS
)
#: Keys of the table.
TRANSFORMER = (*MODEL, "layers_per_stage", "gpu", "flops_per_second", *COST_OPTIONS)


def make_model(settings: Mapping[str, Any]) -> Transformer:
    """Return the transformer of settings: the preset ``model`` with other sizes, or sizes alone.

    Raises
    ------
    ArgumentError
        For sizes that are missing or wrong. `UnknownNameError` for an unknown preset.
    """
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


def gpu_fields(path: Path | str) -> Mapping[str, Any]:
    """Return the fields of a GPU in a JSON file, such as ``pipesim calibrate --json`` writes.

    Raises
    ------
    ArgumentError
        For a file that cannot be read, or has no such table.
    """
    values = read_json(check_path("gpu", path), "a GPU from", ArgumentError)
    table = values.get("gpu", values) if isinstance(values, Mapping) else values
    if not isinstance(table, Mapping):
        raise ArgumentError(
            f"{path} has no table of the fields of a GPU; write it with pipesim calibrate --json"
        )
    return table


def transformer_costs(costs: Mapping[str, Any], placement: Placement) -> Costs:
    """Return the costs in settings that have a table ``transformer``; other fields override them.

    Without ``layers_per_stage``, layers are divided such that devices are balanced, or evenly with
    ``partition = "even"``. A network that is a machine has devices of ``tensor_parallel`` GPUs,
    unless it has ``gpus_per_device``.

    Raises
    ------
    PipeError
        As `Transformer.costs` and `Costs`.
    """
    others = dict(costs)
    settings, network = others.pop("transformer"), dict(others.pop("network", {}))
    if "microbatch_size" not in settings:
        raise ArgumentError("microbatch_size is missing; give the sequences of a micro-batch")
    if "preset" in network:
        network.setdefault("gpus_per_device", settings.get("tensor_parallel", 1))
    options = {name: settings[name] for name in COST_OPTIONS if name in settings}
    rates = {name: settings[name] for name in ("gpu", "flops_per_second") if name in settings}
    if (layers := settings.get("layers_per_stage")) is None:
        layers, options = placement.n_stages, {**options, "placement": placement}
    built = make_model(settings).costs(
        layers, **rates, **options, network=Network.from_dict(network)
    )
    return replace(built, **others) if others else built
