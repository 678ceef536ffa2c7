"""Cut a stage at its layers with experts: the modules before, between and after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipeexec.experts.layer import Experts
from pipesim.errors import ArgumentError


class StageParts(NamedTuple):
    """A stage with n layers of experts, cut at them.

    Attributes
    ----------
    layers
        Layers with experts, in the order in which they run.
    between
        Modules before the first, between two, and after the last of them; n + 1 lists.
    """

    layers: list[Experts]
    between: list[list[nn.Module]]


def expert_layers(module: nn.Module) -> list[Experts]:
    """Return the layers with experts anywhere in a module."""
    return [m for m in module.modules() if isinstance(m, Experts)]


def stage_parts(module: nn.Module, stage: int) -> StageParts:
    """Return the parts of a stage."""
    layers: list[Experts] = []
    between: list[list[nn.Module]] = [[]]
    for child in _children(module):
        if isinstance(child, Experts):
            layers.append(child)
            between.append([])
        else:
            between[-1].append(child)
    _check_reached(layers, module, between, stage)
    return StageParts(layers, between)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that nested ``nn.Sequential`` call, in order."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        yield module
        return
    for child in module:
        yield from _children(child)


def _check_reached(
    layers: Sequence[Experts], module: nn.Module, between: list[list[nn.Module]], stage: int
) -> None:
    """Raise `ArgumentError` for layers with experts that are not among the parts, or twice."""
    inside = [
        (inner, part) for row in between for part in row for inner in part.modules()
        if isinstance(inner, Experts)
    ]  # fmt: skip
    if inside:
        name = next(n for n, m in module.named_modules() if m is inside[0][0])
        raise ArgumentError(
            f"layer {name!r} of stage {stage} has experts, and is called by a "
            f"{type(inside[0][1]).__name__}, which cannot be cut there; let the stage be an "
            "nn.Sequential with pipeexec.Experts as a child, also nested, without hooks (norm, "
            "residual and shared are its arguments)"
        )
    if len({id(layer) for layer in layers}) < len(layers):
        raise ArgumentError(
            f"stage {stage} calls a layer with experts twice; give each call a layer of its own"
        )


def shape_module(module: nn.Module) -> nn.Module:
    """Return a module whose outputs have the shapes of a stage's, without exchanges of tokens."""
    return _ShapeModule(module) if expert_layers(module) else module


class _ShapeModule(nn.Module):
    """Runs a stage with one of its experts in place of all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> object:
        output: object = values if len(values) > 1 else values[0]
        for child in _children(self.module):
            if isinstance(child, Experts):
                assert isinstance(output, Tensor)
                output = child.like_output(output)
            else:
                output = child(*output) if output is values else child(output)
        return output
