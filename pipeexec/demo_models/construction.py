"""Build layers from a seed; refuse sizes that are not whole numbers or do not fit in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pipeexec.devices.host_memory import check_tensors
from pipesim.errors import check_count

#: Bytes that Python and torch need for the modules of one block, at least.
_BYTES_PER_BLOCK = 10_000


def costed_layer(relative_cost: float, *modules: nn.Module) -> nn.Sequential:
    """Return modules as one layer, with its cost in units of a block for `split`."""
    layer = nn.Sequential(*modules)
    layer.relative_cost = relative_cost  # type: ignore[assignment]
    return layer


def check_sizes(**sizes: object) -> None:
    """Raise `ArgumentError` for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        check_count(name, size)


def generator(seed: int) -> torch.Generator:
    """Return a random generator for a seed of any length."""
    # Torch takes 64 bits. A longer seed, such as a hash, wraps.
    return torch.Generator().manual_seed(check_count("seed", seed, minimum=0) % (1 << 63))


def check_parameters(n_parameters: int, **sizes: int) -> None:
    """Raise `CapacityError` if the parameters and modules of a model do not fit in memory."""
    modules = _BYTES_PER_BLOCK * next(iter(sizes.values()))  # the first size is the depth
    item = torch.get_default_dtype().itemsize
    listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
    check_tensors(f"a model of {listed}", item * n_parameters + modules, "build a smaller one")


def seeded_model(layers: Callable[[], list[nn.Module]], seed: int) -> nn.Sequential:
    """Build the layers from ``seed`` and leave the random generator of the process unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator(seed).get_state())
        return nn.Sequential(*layers())
