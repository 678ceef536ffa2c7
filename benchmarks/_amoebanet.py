"""AmoebaNet-D as a sequential module, for the speeds that torchgpipe published.

Real et al., "Regularized Evolution for Image Classifier Architecture Search" (arXiv 1802.01548),
with the genotype as torchgpipe's benchmark ran it. That differs from the paper in two places: a
normal cell puts out states 0, 3, 4 and 6, as in TensorFlow's reference code, and where the paper
takes the maximum of 3 x 3 it takes the mean, which costs as much.

A cell reads the outputs of the two cells before it, so layers hand on pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


def _convolutions(*shapes: tuple[int, int, tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Return convolutions of (inputs, outputs, kernel, stride), each after ReLU, before a norm."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in shapes:
        padding = (kernel[0] // 2, kernel[1] // 2)
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        layers += [nn.ReLU(), convolution, nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers)


def _projected(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return _convolutions((inputs, outputs, (1, 1), (stride, stride)))


def _bottleneck(*kernels: tuple[int, int]) -> Callable[[int, int], nn.Module]:
    """Return what makes convolutions between two projections, on a quarter of the channels.

    Of several, each strides along the side that its kernel does not cover, or along both.
    """

    def build(channels: int, stride: int) -> nn.Module:
        inner = channels // 4
        strides = [(stride, stride)] if len(kernels) == 1 else [(1, stride), (stride, 1)]
        return _convolutions(
            (channels, inner, (1, 1), (1, 1)),
            *((inner, inner, *shape) for shape in zip(kernels, strides, strict=True)),
            (inner, channels, (1, 1), (1, 1)),
        )

    return build


def _same(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else _Halved(channels, channels)


def _mean(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _maximum(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _convolution_1x1(channels: int, stride: int) -> nn.Module:
    return _projected(channels, channels, stride)


_LONG, _SQUARE = _bottleneck((1, 7), (7, 1)), _bottleneck((3, 3))


class _Halved(nn.Module):
    """Half the size, from two projections of which one sees the image moved by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.direct = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.moved = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        moved = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.direct(x), self.moved(moved)], dim=1))


class Genotype(NamedTuple):
    """Pairs of operations and the state that each reads; the states that a cell puts out."""

    operations: tuple[tuple[int, Callable[[int, int], nn.Module]], ...]
    put_out: tuple[int, ...]


_NORMAL = Genotype(
    (
        (1, _convolution_1x1), (1, _mean),
        (1, _same), (0, _LONG),
        (0, _convolution_1x1), (0, _LONG),
        (2, _mean), (2, _same),
        (1, _mean), (5, _convolution_1x1),
    ),
    (0, 3, 4, 6),
)  # fmt: skip
_REDUCTION = Genotype(
    (
        (0, _maximum), (0, _mean),
        (2, _same), (1, _SQUARE),
        (2, _LONG), (2, _mean),
        (3, _same), (1, _maximum),
        (2, _mean), (3, _convolution_1x1),
    ),
    (4, 5, 6),
)  # fmt: skip


class _Cell(nn.Module):
    """Five sums of two operations each; hands on its output, and its input."""

    def __init__(
        self, before: int, last: int, channels: int, genotype: Genotype, was_reduced: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.last = _projected(last, channels)
        self.before: nn.Module = nn.Identity()
        if was_reduced:
            self.before = _Halved(before, channels)
        elif before != channels:
            self.before = _projected(before, channels)
        reduces = genotype is _REDUCTION
        self.operations = nn.ModuleList(
            build(channels, 2 if reduces and state < 2 else 1)
            for state, build in genotype.operations
        )

    def forward(self, inputs: Tensor | Pair) -> Pair:
        last, before = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        states = [self.last(last), self.before(before)]
        branches = zip(self.genotype.operations, self.operations, strict=True)
        for ((a, _), first), ((b, _), second) in zip(branches, branches, strict=True):
            states.append(first(states[a]) + second(states[b]))
        return torch.cat([states[i] for i in self.genotype.put_out], dim=1), last


class _Classify(nn.Module):
    """Logits of the last output's mean."""

    def __init__(self, channels: int, n_classes: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(7)
        self.linear = nn.Linear(channels, n_classes)

    def forward(self, inputs: Pair) -> Tensor:
        return self.linear(self.pool(inputs[0]).flatten(1))


def amoebanet_d(n_layers: int, n_filters: int, n_classes: int = 1000) -> nn.Sequential:
    """Return AmoebaNet-D (n_layers, n_filters): n_layers normal cells in three groups.

    For images of 224 x 224. Of ``n_layers + 6`` layers: a stem, two reduction cells, the groups
    with a reduction cell between them, and the classifier.
    """
    channels = n_filters // 4
    stem = nn.Sequential(
        nn.ReLU(), nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)
    )
    normal = (_NORMAL,) * (n_layers // 3)
    genotypes = (_REDUCTION, _REDUCTION, *normal, _REDUCTION, *normal, _REDUCTION, *normal)
    layers: list[nn.Module] = [stem]
    before, last, was_reduced = channels, channels, False
    for genotype in genotypes:
        reduces = genotype is _REDUCTION
        channels *= 1 + reduces
        layers.append(_Cell(before, last, channels, genotype, was_reduced))
        before, last, was_reduced = last, channels * len(genotype.put_out), reduces
    return nn.Sequential(*layers, _Classify(last, n_classes))
