"""Layers whose output depends on state that their forward changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm


class Counter(nn.Module):
    """Scales its output by the number of its forwards, counted in a buffer."""

    def __init__(self, count: Callable[[Counter], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("n", torch.zeros(()))
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        self.count(self)
        return torch.tanh(self.layer(x)) * (1 + self.n)


def _add(layer: Counter) -> None:
    layer.n += 1


def _replace(layer: Counter) -> None:
    layer.n = layer.n + 1


def add_in_place(layer: Counter) -> None:
    layer.n.add_(1)


def _add_data(layer: Counter) -> None:
    layer.n.data.add_(1)  # no version counter moves


def _register(layer: Counter) -> None:
    """Count in another buffer, which the first forward registers."""
    if not hasattr(layer, "own"):
        layer.register_buffer("own", torch.zeros(()))
    layer.own += 1
    layer.n = layer.own.clone()


def _every_other(layer: Counter) -> None:
    """Change one buffer in each forward, and another in each second one."""
    layer.n += 1
    if not hasattr(layer, "slow"):
        layer.register_buffer("slow", torch.ones(()))
    if int(layer.n) % 2 == 0:
        layer.slow.mul_(1.5)
    layer.n += layer.slow


class RunningNorm(nn.Module):
    """Normalizes by running statistics, which it updates before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        mean, variance = self.norm.running_mean, self.norm.running_var
        return self.layer(nn.functional.batch_norm(x, mean.clone(), variance.clone()))


class Codebook(nn.Module):
    """Snaps to codes that move towards the input, and quantizes by a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("largest", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            nearest = torch.cdist(y, self.codes).argmin(1)
            self.codes.index_add_(0, nearest, y - self.codes[nearest], alpha=0.1)
            peak = y.abs().max()
            self.largest = peak if self.largest is None else 0.9 * self.largest + 0.1 * peak
        return y / self.largest + self.codes[nearest]


#: Layers that take and return six features, by name.
BUFFER_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()),
    "parametrized": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()
    ),
    "n += 1": lambda: Counter(_add),
    "n = n + 1": lambda: Counter(_replace),
    "n.add_(1)": lambda: Counter(add_in_place),
    "n.data.add_(1)": lambda: Counter(_add_data),
    "registered": lambda: Counter(_register),
    "every other": lambda: Counter(_every_other),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
    "running norm": RunningNorm,
    "codebook": Codebook,
}


def stateful_stages(name: str, n: int = 2, *, twice: bool = True) -> list[nn.Module]:
    """Return stages of two such layers; the first of them is run ``twice``."""
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for _ in range(n):
        layer = BUFFER_LAYERS[name]()
        stages.append(
            nn.Sequential(
                layer, nn.Linear(6, 6), BUFFER_LAYERS[name](), *([layer] if twice else [])
            )
        )
    return [stage.double() for stage in stages]
