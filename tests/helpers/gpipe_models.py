"""Models that `px.GPipe` cuts, and one step of them with and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.gpipe.skip import Namespace, pop, skippable, stash

MODES = ("always", "except_last", "never")
CPUS = ["cpu"] * 4


class Pair(nn.Module):
    """Makes a tuple of what it is given, with numbers that need no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, torch.arange(len(x)), x.sin()


class Swap(nn.Module):
    """Changes the order, and the numbers."""

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        a, k, b = x
        return b, k + 1, a


class Merge(nn.Module):
    """Makes one tensor of the three."""

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        a, k, b = x
        return a + b * k[:, None]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes the cosine of its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.cos())
        return x + 1


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Multiplies by what was stashed."""

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x if skip is None else x * skip


@skippable(stash=["skip"])
class StashNothing(nn.Module):
    """Stashes None."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", None)
        return x + 1


def dense(n: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(n)]


def nested() -> list[nn.Module]:
    """Two skips, one within the other, over all partitions."""
    inner, outer = Namespace(), Namespace()
    return [
        Stash().isolate(outer), nn.Linear(6, 6), Stash().isolate(inner), nn.Linear(6, 6),
        nn.Tanh(), Pop().isolate(inner), nn.Linear(6, 6), Pop().isolate(outer),
    ]  # fmt: skip


#: Models, each with the balances that it is cut by.
MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[list[int]]]] = {
    "dense": (dense, [[4], [1, 3], [1, 2, 1], [1, 1, 1, 1]]),
    "batch norm": (lambda: [*dense(2), nn.BatchNorm1d(6), *dense(1)], [[2, 2], [1, 1, 2]]),
    "in place": (lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6),
                          nn.ReLU(inplace=True)], [[1, 3], [1, 1, 1, 1]]),
    "tuples": (lambda: [nn.Linear(6, 6), Pair(), Swap(), Merge()], [[2, 2], [1, 1, 1, 1]]),
    "skips": (nested, [[2, 3, 3], [1, 4, 2, 1], [8]]),
    "a skip of nothing": (lambda: [StashNothing(), *dense(2), Pop()], [[1, 2, 1]]),
    "no parameters": (lambda: [nn.Tanh(), nn.Identity(), nn.ReLU()], [[1, 1, 1]]),
    "no parameters at first": (lambda: [nn.Flatten(), nn.Tanh(), nn.Linear(6, 6)], [[1, 1, 1]]),
}  # fmt: skip
CASES = [(name, balance) for name, (_, balances) in MODELS.items() for balance in balances]


def sequential(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[name][0]())


def batch(n: int = 8, *, requires_grad: bool = False) -> Tensor:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(requires_grad)


def plain_step(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """Run the module itself on the micro-batches."""
    output = torch.cat([module(part) for part in x.chunk(chunks)])
    if output.requires_grad:
        output.square().mean().backward()
    return output


def step(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    if output.requires_grad:
        output.square().mean().backward()
    return output


def check_same(model: nn.Module, plain: nn.Module) -> None:
    """Gradients, parameters and buffers."""
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)
