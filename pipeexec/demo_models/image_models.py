"""Networks for images: a small residual network, and U-Net and ResNet with skips."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeexec.demo_models.construction import (
    check_parameters,
    check_sizes,
    costed_layer,
    seeded_model,
)
from pipeexec.gpipe.skip import Namespace, Skippable, pop, skippable, stash
from pipesim.errors import ArgumentError, check_count, number


def convnet(
    *,
    n_blocks: int = 8,
    channels: int = 32,
    image_size: int = 32,
    n_classes: int = 10,
    seed: int = 0,
) -> nn.Sequential:
    """Build a residual network: a stem, ``n_blocks`` blocks of one width, pooling with classifier.

    The model has ``n_blocks + 2`` layers. It demands more of a pipeline than the language model:

    - its ReLUs work in place;
    - its batch norms keep running statistics, which are those of a micro-batch;
    - in training mode its outputs depend on the micro-batch size.

    Returns
    -------
    nn.Sequential
        From (batch, 3, image_size, image_size) to logits (batch, n_classes).
    """
    check_sizes(n_blocks=n_blocks, channels=channels, image_size=image_size, n_classes=n_classes)
    check_parameters(
        n_blocks * (18 * channels**2 + 4 * channels) + (27 + n_classes) * channels,
        n_blocks=n_blocks, channels=channels, n_classes=n_classes,
    )  # fmt: skip
    return seeded_model(
        lambda: [
            costed_layer(0.15, *_conv_norm(3, channels), nn.ReLU(inplace=True)),
            *(_ResidualBlock(channels) for _ in range(n_blocks)),
            costed_layer(
                0.03, nn.AvgPool2d(image_size), nn.Flatten(), nn.Linear(channels, n_classes)
            ),
        ],
        seed,
    )


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, channels, height, width) to the same."""

    relative_cost = 1.0

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels, channels), nn.ReLU(inplace=True), *_conv_norm(channels, channels)
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.body(x) + x)
        return y


def _conv_norm(n_in: int, n_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)


# U-Net and ResNet as flat sequential modules whose connections around layers are skips.
#
# The layers are exactly those of torchgpipe's benchmarks. A balance published for those therefore
# cuts these models at the same layers. Weights come from torch's generator: the same seed gives
# the same weights. Under ``with torch.device("meta")`` large models need no memory.

NamedLayers = Iterator[tuple[str, nn.Module]]

_EXPANSION = 4  # output channels of a bottleneck block over its middle channels


@skippable(stash=["skip"])
class _Stash(nn.Module):
    """Return the input, and stash it."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class _Concatenate(nn.Module):
    """Append the channels of the skip to the input, which is padded with zeros to the same size."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        height, width = (a - b for a, b in zip(skip.shape[2:], x.shape[2:], strict=True))
        if height or width:  # the max pool rounds odd sizes down
            x = F.pad(x, (0, width, 0, height))
        return torch.cat((x, skip), dim=1)


@skippable(pop=["skip"])
class _Add(nn.Module):
    """Add the skip; a projection, if given, first maps it to the shape of the input."""

    def __init__(self, projection: nn.Module | None) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return x + (skip if self.projection is None else self.projection(skip))


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
    *,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Return a U-Net with one long skip per level.

    ::

        down0 ---------------- up0 - segment
            down1 -------- up1
               bottleneck

    Each ``down``, ``up`` and the bottleneck is a run of convolutions, each of which is four layers
    (convolution, dropout, instance norm, leaky ReLU). There are ``2 * depth * (4 * num_convs + 2)
    + 4 * num_convs + 1`` layers: 241 by default.

    Maps float (batch, input_channels, height, width) to (batch, output_channels, height, width),
    for heights and widths of at least ``2 ** (depth + 1)``.

    Parameters
    ----------
    depth
        Levels, each of which halves the image.
    num_convs, base_channels
        Convolutions per run, and channels of the first run; B and C of the paper's U-Net (B, C).
        A small model: ``unet(2, 1, 8)``.
    dropout
        Probability that a channel is dropped; at 0 the model draws no random numbers.

    References
    ----------
    U-Net, arXiv 1505.04597; in this simplified form torchgpipe, arXiv 2004.09910, benchmarks.
    """
    check_count("depth", depth)
    check_count("num_convs", num_convs)
    check_count("base_channels", base_channels, 2)  # the last run has half as many
    check_count("input_channels", input_channels)
    check_count("output_channels", output_channels)
    probability = number(dropout)
    if probability is None or not 0 <= probability < 1:
        raise ArgumentError(f"dropout must be at least 0 and less than 1, got {dropout!r}")

    def run(name: str, n_in: int, n_mid: int, n_out: int) -> NamedLayers:
        channels = [n_in, *[n_mid] * (num_convs - 1), n_out]
        for i, (a, b) in enumerate(pairwise(channels)):
            yield f"{name}_conv{i}", nn.Conv2d(a, b, 3, padding=1, bias=False)
            yield f"{name}_dropout{i}", nn.Dropout2d(probability)
            yield f"{name}_norm{i}", nn.InstanceNorm2d(b)
            yield f"{name}_relu{i}", nn.LeakyReLU(0.01)

    def layers() -> NamedLayers:
        widths = [base_channels * 2**level for level in range(depth)]
        namespaces = [Namespace() for _ in range(depth)]
        for level, (n, namespace) in enumerate(zip(widths, namespaces, strict=True)):
            yield from run(f"down{level}", n // 2 if level else input_channels, n, n)
            yield f"down{level}_stash", _isolated(_Stash(), namespace)
            yield f"down{level}_pool", nn.MaxPool2d(2)
        yield from run("bottleneck", widths[-1], 2 * widths[-1], widths[-1])
        for level in reversed(range(depth)):
            n = widths[level]
            yield f"up{level}_upsample", nn.Upsample(scale_factor=2)
            yield f"up{level}_concatenate", _isolated(_Concatenate(), namespaces[level])
            yield from run(f"up{level}", 2 * n, n // 2, n // 2)
        yield "segment", nn.Conv2d(base_channels // 2, output_channels, 1, bias=False)

    return nn.Sequential(OrderedDict(layers()))


def resnet(
    blocks: Sequence[int] = (3, 4, 23, 3),
    num_classes: int = 1000,
    base_channels: int = 64,
    input_channels: int = 3,
) -> nn.Sequential:
    """Return a ResNet of bottleneck blocks, with one skip per block.

    A block has eleven layers: the stash, three times convolution, batch norm and ReLU, and before
    the last ReLU the layer that adds the skip. Four layers precede the blocks and three follow
    them: ``11 * sum(blocks) + 7`` layers, 370 by default, which is ResNet-101. Layers have
    torchvision's names, with ``_`` for ``.``.

    Maps float (batch, input_channels, height, width) to scores (batch, num_classes).

    Parameters
    ----------
    blocks
        Number of blocks of each group. Each group but the first halves the image and doubles the
        channels. (3, 4, 6, 3) is ResNet-50. A small model: ``resnet([1, 1], 10, 8)``.
    base_channels
        Channels of the first convolution, and of the middle of the first group's blocks.

    References
    ----------
    Deep residual learning, arXiv 1512.03385, table 1, with the stride in the 3x3 convolution as
    torchvision has it; as a sequential module torchgpipe, arXiv 2004.09910.
    """
    if not len(blocks):
        raise ArgumentError("blocks must list how many blocks each group has, got none")
    for group, n in enumerate(blocks):
        check_count(f"blocks[{group}]", n)
    check_count("num_classes", num_classes)
    check_count("base_channels", base_channels)
    check_count("input_channels", input_channels)

    def layers() -> NamedLayers:
        yield "conv1", nn.Conv2d(input_channels, base_channels, 7, 2, padding=3, bias=False)
        yield "bn1", nn.BatchNorm2d(base_channels)
        yield "relu", nn.ReLU()
        yield "maxpool", nn.MaxPool2d(3, 2, padding=1)
        channels = base_channels
        for group, n in enumerate(blocks):
            middle = base_channels * 2**group
            for block in range(n):
                stride = 2 if group and not block else 1
                yield from _bottleneck(f"layer{group + 1}_{block}", channels, middle, stride)
                channels = middle * _EXPANSION
        yield "avgpool", nn.AdaptiveAvgPool2d(1)
        yield "flat", nn.Flatten()
        yield "fc", nn.Linear(channels, num_classes)

    model = nn.Sequential(OrderedDict(layers()))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _isolated(layer: nn.Module, namespace: Namespace) -> nn.Module:
    """Put a layer's skip into a namespace; type checkers see the undecorated class."""
    assert isinstance(layer, Skippable)
    return layer.isolate(namespace)


def _bottleneck(name: str, n_in: int, middle: int, stride: int) -> NamedLayers:
    """Yield the layers of one block, from ``n_in`` channels to four times ``middle``."""
    n_out, namespace, projection = middle * _EXPANSION, Namespace(), None
    if stride > 1 or n_in != n_out:
        conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
        projection = nn.Sequential(conv, nn.BatchNorm2d(n_out))
    yield f"{name}_identity", _isolated(_Stash(), namespace)
    yield f"{name}_conv1", nn.Conv2d(n_in, middle, 1, bias=False)
    yield f"{name}_bn1", nn.BatchNorm2d(middle)
    yield f"{name}_relu1", nn.ReLU()
    yield f"{name}_conv2", nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
    yield f"{name}_bn2", nn.BatchNorm2d(middle)
    yield f"{name}_relu2", nn.ReLU()
    yield f"{name}_conv3", nn.Conv2d(middle, n_out, 1, bias=False)
    yield f"{name}_bn3", nn.BatchNorm2d(n_out)
    yield f"{name}_residual", _isolated(_Add(projection), namespace)
    yield f"{name}_relu3", nn.ReLU()
