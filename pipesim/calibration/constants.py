"""Constants that can be fitted: those of a GPU, and factors of a network's rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipesim.calibration.least_squares import Floats
from pipesim.errors import ArgumentError, check_list, check_name, check_type
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.gpu_files import fitted_preset, gpu_table, has_gpu_table
from pipesim.network.network import Network
from pipesim.network.presets import MACHINES

#: Constants of the network: the share of its bandwidths that messages reach, and the factor of its
#: latencies.
EFFICIENCY, LATENCY = "network_efficiency", "network_latency"
_NETWORK = (EFFICIENCY, LATENCY)
#: Constants that can be fitted. Those of a GPU are its fields that are always numbers.
CONSTANTS = (*(field.name for field in fields(GPU) if field.type == "float"), *_NETWORK)
#: Start value where the GPU has 0; 1e-5 (s) for other constants.
_TYPICAL = {"half_depth": 64.0, "synchronization": 3e-4}
#: Largest factor between a constant and its start.
_LARGEST_FACTOR = 100.0


@dataclass(frozen=True)
class Constants:
    """The constants to fit, and the GPU and network that have the others.

    Attributes
    ----------
    names
        Constants to fit, of `CONSTANTS`.
    gpu
        GPU with the start values.
    network
        Name of a machine, a network, or None for messages that take no time. A network of single
        GPUs is grouped for rows with tensor parallelism.
    factors
        Start of the factors of the network's bandwidths and of its latencies. For the name of a
        machine, the first is its share of nominal bandwidths, and both may be from a GPU's file.
    """

    names: tuple[str, ...]
    gpu: GPU
    network: Network | str | None
    factors: tuple[float, float] = (1.0, 1.0)

    def start_network(self, gpus_per_device: int) -> Network | None:
        """Return `fitted_network` with the start of both factors."""
        return self.fitted_network(*self.factors, gpus_per_device)

    @property
    def starts(self) -> Floats:
        """Start value of each constant; a typical one where the GPU has 0."""
        return np.array([self._own(n) or _TYPICAL.get(n, 1e-5) for n in self.names])

    def _own(self, name: str) -> float:
        """Return the value of a constant before the fit."""
        if name in _NETWORK:
            return self.factors[_NETWORK.index(name)]
        return float(getattr(self.gpu, name))

    @property
    def undetermined(self) -> Floats:
        """log(constant / start) of constants that are given up: 0, or -inf where the GPU has 0."""
        own = np.array([self._own(name) for name in self.names])
        return np.where(own > 0, 0.0, -np.inf)

    def bounds(self) -> tuple[Floats, Floats]:
        """Return the least and the largest log(constant / start) of each constant."""
        least = np.full(len(self.names), -math.log(_LARGEST_FACTOR))
        most = -least
        if "flops" in self.names:
            peak = math.inf if self.gpu.peak_flops is None else self.gpu.peak_flops
            k = self.names.index("flops")
            most[k] = min(most[k], math.log(peak / self.gpu.flops))
        if EFFICIENCY in self.names and isinstance(self.network, str):
            most[self.names.index(EFFICIENCY)] = max(0.0, -math.log(self.factors[0]))
        return least, most

    def fitted_gpu(self, x: Floats, name: str | None = None) -> GPU:
        """Return the GPU with constants of log(constant / start) = x."""
        values = dict(zip(self.names, (self.starts * np.exp(x)).tolist(), strict=True))
        for factor in _NETWORK:
            values.pop(factor, None)
        peak = self.gpu.peak_flops
        if peak is not None and "flops" in values:
            values["flops"] = min(values["flops"], peak)  # the exponential may round upwards
        return replace(self.gpu, **values, name=self.gpu.name if name is None else name)

    def network_factors(self, x: Floats) -> tuple[float, float]:
        """Return the factors of the network's bandwidths and of its latencies."""
        efficiency, latency = (
            start * math.exp(x[self.names.index(name)]) if name in self.names else start
            for name, start in zip(_NETWORK, self.factors, strict=True)
        )
        if isinstance(self.network, str):
            efficiency = min(efficiency, 1.0)  # the exponential may round upwards
        return efficiency, latency

    def fitted_network(
        self, efficiency: float, latency: float, gpus_per_device: int
    ) -> Network | None:
        """Return the network of devices of so many GPUs, with its rates times both factors.

        Raises
        ------
        PipeError
            If so many GPUs do not suit the machine.
        """
        if self.network is None:
            return None
        network = self.network
        if isinstance(network, str):
            network = Network.preset(network, 1.0)
        if efficiency != 1 or latency != 1:
            network = network.scaled(latency=latency, bandwidth=efficiency)
        if network.nodes is None or network.nodes.gpus_per_device > 1:
            return network
        return network.grouped(gpus_per_device)


def chosen_constants(
    names: Iterable[str] | None,
    gpu: GPU | Mapping[str, Any] | Path | str,
    network: Network | str | None,
    *,
    blocking: bool,
) -> Constants:
    """Return the constants to fit, checked.

    Parameters
    ----------
    names, gpu, network
        As in `pipesim.GPU.fit`.
    blocking
        Whether messages block their stage in any row, so that ``synchronization`` has an effect.
    """
    start = as_gpu(gpu)
    if isinstance(network, str):
        check_name("network", network, MACHINES)
    elif network is not None:
        check_type("network", network, Network, "or give the name of a machine")
    if names is None:
        names = ["flops", "bandwidth", "launch"]
        names += ["synchronization"] if blocking else []
        names += [EFFICIENCY] if network is not None else []
    free = check_list("constants", names, f"names of {', '.join(CONSTANTS)}")
    if not free:
        raise ArgumentError(f"constants is empty; give at least one of {', '.join(CONSTANTS)}")
    for name in free:
        check_name("constant", name, CONSTANTS)
        if free.count(name) > 1:
            raise ArgumentError(f"constants has {name!r} twice; give it once")
        if name in _NETWORK and network is None:
            raise ArgumentError(f"constants has {name}, but there is no network; give one")
    factors = (1.0, 1.0)
    if isinstance(network, str):
        latency = gpu_table(gpu).network_latency if has_gpu_table(gpu) else 1.0
        factors = (fitted_preset(network, gpu).nominal_share or 1.0, latency)
    return Constants(tuple(free), start, network, factors)
