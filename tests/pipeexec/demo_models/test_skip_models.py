"""The U-Net and the ResNet are those of the published benchmarks, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipeexec as px
from pipeexec.demo_models.image_models import resnet, unet
from pipeexec.gpipe.partition import skips_across
from pipeexec.gpipe.skip import Shelf, Skippable, use_shelf
from pipesim.errors import ArgumentError

META = torch.device("meta")


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# torchgpipe's benchmarks: docs/benchmarks.rst, benchmarks/unet-{memory,speed,timeline}/main.py and
# resnet101-{accuracy,speed}/main.py at kakaobrain/torchgpipe@a1b4ee25.
UNETS: list[tuple[int, int, int, str | None, list[list[int]]]] = [
    (6, 72, 285, "362.2M", []),
    (11, 128, 505, "2.21B", [[505]]),
    (24, 128, 1077, "4.99B", [[526, 551]]),
    (24, 160, 1077, "7.80B", [[472, 54, 36, 515]]),
    (48, 160, 2133, "15.82B", [[800, 140, 62, 36, 36, 36, 36, 987]]),
    (5, 64, 241, None, [[241], [104, 137], [30, 66, 84, 61], [16, 27, 31, 44, 22, 57, 27, 17],
                        [34, 76, 70, 61]]),
]  # fmt: skip
RESNET101 = [
    [370], [135, 235], [140, 230], [44, 92, 124, 110], [26, 22, 33, 44, 44, 66, 66, 69],
]  # fmt: skip


def published(n: int) -> str:
    """Write a number of parameters as the benchmarks do."""
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"


@pytest.mark.slow
@pytest.mark.parametrize(("num_convs", "channels", "n_layers", "parameters", "balances"), UNETS)
def test_published_unets(
    num_convs: int, channels: int, n_layers: int, parameters: str | None, balances: list[list[int]]
) -> None:
    with META:
        model = unet(5, num_convs, channels)
    assert len(model) == n_layers == 10 * (4 * num_convs + 2) + 4 * num_convs + 1
    if parameters is not None:
        assert published(n_parameters(model)) == parameters
    assert [sum(balance) for balance in balances] == [n_layers] * len(balances)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "n_layers", "parameters", "balances"),
    [((3, 4, 6, 3), 183, 25_557_032, []), ((3, 4, 23, 3), 370, 44_549_160, RESNET101)],
    ids=["50", "101"],
)
def test_published_resnets(
    blocks: tuple[int, ...], n_layers: int, parameters: int, balances: list[list[int]]
) -> None:
    """Parameters are torchvision's."""
    with META:
        model = resnet(blocks)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert len(model) == n_layers
    assert n_parameters(model) == parameters
    assert [sum(balance) for balance in balances] == [n_layers] * len(balances)


@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_the_published_cut_of_the_timeline() -> None:
    """By hand: which partition stashes, and which pops; narrow, the model has the same layers.

    ::

        stashed in layers  20 | 42 64 86 108 |             |
        popped in layers      |              | 131 153 175 | 197 219
        partitions from     0 | 34           | 110         | 180
    """
    torch.manual_seed(0)
    plain = unet(5, 5, 2)
    model = px.GPipe(copy.deepcopy(plain), [34, 76, 70, 61], devices=["cpu"] * 4)
    cuts = skips_across(model.partitions)  # type: ignore[arg-type]
    assert sorted(cuts.values()) == [(0, 3), (1, 2), (1, 2), (1, 2), (1, 3)]
    x = torch.rand(1, 3, 64, 64)
    outputs = []
    for module in (plain, model):
        torch.manual_seed(1)
        outputs.append(module(x))
    assert torch.equal(*outputs)


def test_a_small_unet_by_hand() -> None:
    """One level: 3 channels to 4, down, to 8 and back to 4, up, and to 2 behind the skip."""
    model = unet(1, 2, 4)
    kinds = [type(layer).__name__.strip("_") for layer in model]
    run = ["Conv2d", "Dropout2d", "InstanceNorm2d", "LeakyReLU"]
    assert kinds == [
        *run * 2, "Stash", "MaxPool2d", *run * 2, "Upsample", "Concatenate", *run * 2, "Conv2d",
    ]  # fmt: skip
    convs = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [(conv.in_channels, conv.out_channels) for conv in convs] == [
        (3, 4), (4, 4), (4, 8), (8, 4), (8, 2), (2, 2), (2, 1),
    ]  # fmt: skip


def test_a_small_resnet_by_hand() -> None:
    """Two groups of one block: from 2 channels to 8, and on to 16 at half the size."""
    model = resnet([1, 1], 5, 2)
    kinds = [type(layer).__name__.strip("_") for layer in model]
    conv = ["Conv2d", "BatchNorm2d", "ReLU"]
    block = ["Stash", *conv, *conv, *conv[:2], "Add", "ReLU"]
    assert kinds == [*conv, "MaxPool2d", *block, *block, "AdaptiveAvgPool2d", "Flatten", "Linear"]
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in convs] == [
        (3, 2, 7, 2),
        (2, 2, 1, 1), (2, 2, 3, 1), (2, 8, 1, 1), (2, 8, 1, 1),
        (8, 4, 1, 1), (4, 4, 3, 2), (4, 16, 1, 1), (8, 16, 1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("size", [(8, 8), (13, 11), (9, 16)])
def test_a_unet_keeps_the_size_of_its_image(size: tuple[int, int]) -> None:
    """The size is kept where max pools cut odd sizes; 8 is the least for two levels."""
    assert unet(2, 1, 4, 2, 3)(torch.zeros(2, 2, *size)).shape == (2, 3, *size)


def test_what_is_made_up_for_is_zero() -> None:
    """At the right and below, and the channels of the skip come second."""
    layer = unet(1, 1, 2)[11]
    assert isinstance(layer, Skippable)
    (key,) = layer.poppable()
    with use_shelf(Shelf({key: torch.full((1, 1, 3, 4), 5.0)})):
        output = layer(torch.ones(1, 1, 2, 2))
    assert output.tolist() == [
        [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], [[5, 5, 5, 5]] * 3]
    ]  # fmt: skip


def test_a_block_adds_its_input() -> None:
    """With a last convolution of zeros, the block is its input, projected if need be."""
    model = resnet([2], 5, 2).eval()
    nn.init.zeros_(model.get_submodule("layer1_1_conv3").weight)  # type: ignore[arg-type]
    first, second = model[4:15], model[15:26]
    x = first(torch.rand(2, 2, 3, 3))
    assert x.count_nonzero()
    torch.testing.assert_close(second(x), x)


@pytest.mark.parametrize("make", [lambda: unet(2, 1, 4), lambda: resnet([1, 1], 5, 4)])
def test_one_seed_one_model(make: Callable[[], nn.Sequential]) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make().parameters())

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_without_dropout_nothing_is_drawn() -> None:
    without, with_it = unet(2, 1, 4, dropout=0), unet(2, 1, 4)
    state, x = torch.get_rng_state(), torch.zeros(1, 3, 8, 8)
    without(x)
    assert torch.equal(state, torch.get_rng_state())
    with_it(x)
    assert not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unet(0), "depth must be at least 1, got 0"),
        (lambda: unet(num_convs=0), "num_convs must be at least 1"),
        (lambda: unet(base_channels=1), "base_channels must be at least 2, got 1"),
        (lambda: unet(input_channels=1.5), "input_channels must be a whole number, got 1.5"),
        (lambda: unet(output_channels=0), "output_channels must be at least 1"),
        (lambda: unet(dropout=1), "dropout must be at least 0 and less than 1, got 1"),
        (lambda: unet(dropout=math.nan), "dropout must be at least 0 and less than 1, got nan"),
        (lambda: unet(dropout="much"), "dropout must be at least 0 and less than 1, got 'much'"),
        (lambda: resnet([]), "blocks must list how many blocks each group has, got none"),
        (lambda: resnet([2, 0]), r"blocks\[1\] must be at least 1, got 0"),
        (lambda: resnet(num_classes=0), "num_classes must be at least 1"),
        (lambda: resnet(base_channels=0), "base_channels must be at least 1"),
        (lambda: resnet(input_channels=0), "input_channels must be at least 1"),
    ],
)
def test_mistakes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
