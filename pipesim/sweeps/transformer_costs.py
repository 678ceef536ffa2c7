"""Costs of a case from a transformer and a GPU: the table ``costs.transformer`` of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import signature
from math import prod
from typing import Any

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_count
from pipesim.models.gpu_files import fitted_preset, has_gpu_table
from pipesim.models.splits.placed_split import is_word
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.scheduling.placement import Placement

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
    """Return the GPUs of a device: ``tensor_parallel * context_parallel`` of settings."""
    names = ("tensor_parallel", "context_parallel")
    return prod(check_count(name, settings.get(name, 1)) for name in names)


def transformer_costs(costs: Mapping[str, Any], placement: Placement) -> Costs:
    """Return the costs in settings that have a table ``transformer``; other fields override them.

    Without ``layers_per_stage``, and with ``"balanced"``, layers are divided such that devices are
    balanced; with ``"even"`` (or ``partition = "even"``) evenly. A network that is a machine has
    devices of `device_size` GPUs, unless it has ``gpus_per_device``. Factors of the network in the
    file of a fitted GPU apply to a machine; an ``efficiency`` of its own takes the place of
    the file's.

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
        network.setdefault("gpus_per_device", device_size(settings))
    options = {name: settings[name] for name in COST_OPTIONS if name in settings}
    rates = {name: settings[name] for name in ("gpu", "flops_per_second") if name in settings}
    layers = settings.get("layers_per_stage")
    if layers is None or is_word(layers):
        layers, options = layers or placement.n_stages, {**options, "placement": placement}
    links = Network.from_dict(network)
    if "preset" in network and has_gpu_table(settings.get("gpu")):
        names = ("efficiency", "gpus_per_device")
        options_of_preset = {name: network[name] for name in names if name in network}
        fitted = fitted_preset(network["preset"], settings["gpu"], **options_of_preset)
        host = links.host if network.get("host") else fitted.host
        links = replace(links, nodes=fitted.nodes, host=host, nominal_share=fitted.nominal_share)
    built = make_model(settings).costs(layers, **rates, **options, network=links)
    return replace(built, **others) if others else built
