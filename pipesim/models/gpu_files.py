"""Fields of a GPU, and factors of its network, as `Calibration.save` and a JSON file have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from pipesim.errors import ArgumentError, check_name, number
from pipesim.network.network import Network
from pipesim.network.presets import EFFICIENCY
from pipesim.utils.files import check_path, read_json

#: Factors of a network in a file.
_FACTORS = ("network_efficiency", "network_latency")
#: Keys of a saved calibration.
_SAVED = ("gpu", *_FACTORS, "constants", "errors", "checksum")


class GpuTable(NamedTuple):
    """Fields of a GPU, and the factors of a network's bandwidths and of its latencies."""

    fields: Mapping[str, Any]
    network_efficiency: float = 1.0
    network_latency: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `gpu_table` reads."""
        factors = (self.network_efficiency, self.network_latency)
        return {"gpu": dict(self.fields), **dict(zip(_FACTORS, factors, strict=True))}


def has_gpu_table(gpu: object) -> TypeGuard[Mapping[str, Any] | os.PathLike[str] | str]:
    """Tell whether a value is a mapping, or the path of a JSON file and not a preset's name."""
    return isinstance(gpu, Mapping | os.PathLike) or (
        isinstance(gpu, str) and gpu.endswith(".json")
    )


def gpu_table(gpu: Mapping[str, Any] | os.PathLike[str] | str) -> GpuTable:
    """Return the fields of a GPU and the factors of its network, from a file or a mapping.

    Parameters
    ----------
    gpu
        Path of a JSON file, such as ``pipesim calibrate --json`` and `Calibration.save` write; or
        its content; or fields of a GPU alone, whose network has factors of 1.
    """
    values, place = gpu, "gpu"
    if not isinstance(gpu, Mapping):
        values, place = read_json(check_path("gpu", gpu), "a GPU from", ArgumentError), str(gpu)
    table = values.get("gpu", values) if isinstance(values, Mapping) else values
    if not isinstance(values, Mapping) or not isinstance(table, Mapping):
        raise ArgumentError(
            f"{place} has no table of the fields of a GPU; write it with pipesim calibrate --json"
        )
    if table is values:
        return GpuTable(table)
    for key in values:
        check_name("key of a fitted GPU", key, _SAVED)
    factors = []
    for name in _FACTORS:
        factor = number(values.get(name, 1.0))
        if factor is None or not 0 < factor < float("inf"):
            raise ArgumentError(
                f"{place}: {name} must be a finite number above 0, got {values[name]!r}"
            )
        factors.append(factor)
    return GpuTable(table, *factors)


def fitted_preset(
    name: str, gpu: object, efficiency: float | None = None, gpus_per_device: int = 1
) -> Network:
    """Return the network of a machine, with the factors of a GPU's file.

    Parameters
    ----------
    name, gpus_per_device
        As for `Network.preset`.
    gpu
        A GPU in any form. Only the file of a fitted one, or its content, has factors.
    efficiency
        Share of the nominal bandwidths, in place of the file's; None for that of the file, or of
        `Network.preset` where there is none: a file has 1 if none was fitted.
    """
    table = gpu_table(gpu) if has_gpu_table(gpu) else GpuTable({})
    share = table.network_efficiency
    if efficiency is not None or share == 1:
        share = EFFICIENCY if efficiency is None else efficiency
        network = Network.preset(name, share, gpus_per_device)
    else:  # one that was fitted may exceed 1
        network = Network.preset(name, 1.0, gpus_per_device).scaled(bandwidth=share)
    latency = table.network_latency
    return network if latency == 1 else network.scaled(latency=latency)
