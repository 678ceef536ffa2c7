"""Operations, traffic and kept bytes of layers, by closed forms and by the unsplit model."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pipesim as ps
from pipeexec.demo_models.layer_costs import LayerCosts, layer_costs
from pipeexec.demo_models.roofline import KernelCost, Roofline
from pipeexec.gpipe.skip import Namespace, pop, skippable, stash
from pipesim.errors import ArgumentError

FLOAT = 4  # bytes
N, IN, OUT, SIDE = 5, 3, 8, 10
DEVICE = Roofline(flops=1e12, bandwidth=1e11, launch=1e-6)


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Hands on its input, and stashes it."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Add(nn.Module):
    """Adds the skip."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return x + skip


def counted(*layers: nn.Module, shape: tuple[int, ...] = (N, IN, SIDE, SIDE)) -> LayerCosts:
    return layer_costs(nn.Sequential(*layers), torch.empty(shape))


def skipping() -> nn.Sequential:
    """Return seven layers with two skips, from 0 to 6 and from 2 to 4."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Stash().isolate(outer), nn.Conv2d(IN, OUT, 1), Stash().isolate(inner), nn.ReLU(),
        Add().isolate(inner), nn.Conv2d(OUT, IN, 1), Add().isolate(outer),
    )  # fmt: skip


def test_convolution_by_closed_form() -> None:
    """Two operations a multiply-add; backward as many for the weight, and for the input."""
    [_, layer] = counted(nn.Conv2d(IN, IN, 1), nn.Conv2d(IN, OUT, 3, padding=1, bias=False)).layers
    x, y, w = N * IN * SIDE**2, N * OUT * SIDE**2, OUT * IN * 9
    flops = 2 * y * IN * 9
    assert layer.forward == (KernelCost(flops, FLOAT * (x + w + y), is_3x3=True),)
    backward, added = layer.backward
    assert backward == KernelCost(2 * flops, FLOAT * ((y + x + w) + (x + w)), is_3x3=True)
    assert added == KernelCost(0, FLOAT * 3 * w)  # to the gradient of the micro-batches before
    assert layer.output_bytes == FLOAT * y
    assert layer.parameter_bytes == FLOAT * w
    assert layer.activation_bytes == FLOAT * x  # its input


def test_first_layer_needs_no_gradient_of_its_input() -> None:
    """A sample that requires no gradient adds no work for it."""
    layer = counted(nn.Conv2d(IN, OUT, 1, bias=False)).layers[0]
    assert layer.backward[0].flops == layer.forward[0].flops


@pytest.mark.parametrize(
    ("layer", "forward", "backward", "saved"),
    [
        (nn.ReLU(), 2, 3, 1),  # its output
        (nn.MaxPool2d(2), 1 + 0.25 + 0.5, 0.25 + 1 + 0.5 + 1, 1 + 0.5),  # indices of 8 bytes
        (nn.AvgPool2d(2), 1.25, 0.25 + 1 + 1, 1),
        (nn.Flatten(), 0, 0, 0),  # a view
    ],
)
def test_layers_that_memory_bounds(
    layer: nn.Module, forward: float, backward: float, saved: float
) -> None:
    """Bytes by hand, in those of the input; each operand read once, each result written once."""
    sample = torch.empty(N, IN, SIDE, SIDE, requires_grad=True)
    got = layer_costs(nn.Sequential(layer), sample).layers[0]
    assert sum(k.nbytes for k in got.forward) == forward * sample.nbytes
    assert sum(k.nbytes for k in got.backward) == backward * sample.nbytes
    assert got.activation_bytes == saved * sample.nbytes
    assert not any(k.flops for k in (*got.forward, *got.backward))


def test_batch_norm_moves_its_input_and_output() -> None:
    """And little else: values a channel."""
    sample = torch.empty(N, IN, 100, 100, requires_grad=True)
    got = layer_costs(nn.Sequential(nn.BatchNorm2d(IN)), sample).layers[0]
    assert sum(k.nbytes for k in got.forward) / sample.nbytes == pytest.approx(2, rel=1e-2)
    assert sum(k.nbytes for k in got.backward) / sample.nbytes == pytest.approx(3, rel=1e-2)


def test_what_two_layers_save_counts_once() -> None:
    """ReLU saves its output, which is the input that the convolution saves."""
    relu, convolution = counted(nn.Conv2d(IN, IN, 1), nn.ReLU(), nn.Conv2d(IN, OUT, 1)).layers[1:]
    assert relu.activation_bytes == FLOAT * N * IN * SIDE**2
    assert convolution.activation_bytes == 0


def test_floating_point_operations_are_those_of_the_whole_model() -> None:
    """As torch counts them; the layers are run apart."""
    model = skipping()
    layers = layer_costs(model, torch.empty(N, IN, SIDE, SIDE)).layers
    model = model.to("meta")
    with FlopCounterMode(display=False) as forward:
        output = model(torch.empty(N, IN, SIDE, SIDE, device="meta"))
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert sum(k.flops for layer in layers for k in layer.forward) == forward.get_total_flops()
    assert sum(k.flops for layer in layers for k in layer.backward) == backward.get_total_flops()


def test_the_model_stays_as_it_is() -> None:
    """No gradients, no moved parameters, no statistics."""
    model = nn.Sequential(nn.Conv2d(IN, OUT, 1), nn.BatchNorm2d(OUT)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer_costs(model, torch.empty(N, IN, SIDE, SIDE))
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@cache
def skipping_costs() -> LayerCosts:
    """Return the costs of `skipping`; not made with the module, as torch's compiler is loaded."""
    return layer_costs(skipping(), torch.empty(N, IN, SIDE, SIDE))


@given(st.sets(st.integers(1, 6)))
def test_stages_sum_to_the_same_on_any_balance(borders: set[int]) -> None:
    """Seconds and bytes are distributed; their sums stay the same."""
    balance = [b - a for a, b in pairwise([0, *sorted(borders), 7])]
    costs = skipping_costs().costs(balance, DEVICE)
    whole = skipping_costs().costs([7], DEVICE)
    for name in ("forward", "backward", "activation_bytes", "parameter_bytes"):
        got = costs.per_stage(name, len(balance)).sum()
        assert got == pytest.approx(whole.per_stage(name, 1)[0], rel=1e-12)


def test_skips_across_borders() -> None:
    """Of IN channels from layer 0 to 6, of OUT from 2 to 4."""
    outer, inner = (FLOAT * N * channels * SIDE**2 for channels in (IN, OUT))
    assert skipping_costs().skip_bytes([7]) == {}
    assert skipping_costs().skip_bytes([1, 5, 1]) == {(0, 2): outer}
    assert skipping_costs().skip_bytes([1, 2, 4]) == {(0, 2): outer, (1, 2): inner}
    assert skipping_costs().skip_bytes([3, 4]) == {(0, 1): outer + inner}
    with pytest.raises(ArgumentError, match="sums to 6 layers, but there are 7"):
        skipping_costs().skip_bytes([3, 3])


def test_roofline_takes_what_bounds_a_kernel() -> None:
    """Operations, bytes or the launch; scaled, the rates alone."""
    bounds = {KernelCost(3e9, 1): 3e-3, KernelCost(1, 2e8): 2e-3, KernelCost(1, 1): 1e-6}
    for kernel, seconds in bounds.items():
        assert DEVICE.seconds([kernel]) == seconds
    assert DEVICE.seconds(list(bounds)) == pytest.approx(sum(bounds.values()))
    half = DEVICE.scaled(0.5)
    assert half.seconds(list(bounds)) == pytest.approx(6e-3 + 4e-3 + 1e-6)


@pytest.mark.parametrize(
    ("convolution", "takes_fewer"),
    [
        (nn.Conv2d(IN, OUT, 3), True),
        (nn.Conv2d(IN, OUT, 3, stride=2), False),
        (nn.Conv2d(IN, OUT, (3, 1)), False),
        (nn.Conv2d(IN, OUT, 5), False),
    ],
)
def test_winograd_is_for_3x3_with_stride_1(convolution: nn.Module, takes_fewer: bool) -> None:
    """Forward and backward; a factor of seconds where operations bound."""
    layer = counted(convolution).layers[0]
    direct = Roofline(flops=1e6, bandwidth=1e15)
    winograd = replace(direct, fewer=2.25)
    for kernels in (layer.forward, layer.backward[:1]):
        factor = direct.seconds(kernels) / winograd.seconds(kernels)
        assert factor == pytest.approx(2.25 if takes_fewer else 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flops": 0}, "flops must be a finite rate above 0, got 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be a finite rate above 0, got nan"),
        ({"launch": -1}, "launch must be finite seconds >= 0, got -1"),
        ({"flops": "fast"}, "flops must be a finite rate above 0, got 'fast'"),
        ({"fewer": 0.5}, "fewer must be finite and at least 1, got 0.5"),
    ],
)
def test_impossible_devices(values: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Roofline(**{"flops": 1.0, "bandwidth": 1.0} | values)


def test_costs_simulate() -> None:
    """Two stages of one layer each, on a link: a step by hand."""
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    layers = layer_costs(model, torch.empty(10, 100))
    device = Roofline(flops=2e8, bandwidth=1e15)  # 2 * 10 * 100 * 100 operations take 1 ms
    costs = layers.costs([1, 1], device, network=ps.Network(bandwidth=4e6))  # 4,000 bytes: 1 ms
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), step="none"), costs)
    assert timeline.makespan == pytest.approx(7e-3, rel=1e-5)  # F, 1, F, B of 2 (both), 1, B of 1
