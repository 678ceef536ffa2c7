"""Operations, traffic and kept bytes of layers, by closed forms and by the unsplit model."""

from __future__ import annotations

from collections.abc import Generator
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
from pipeexec.gpipe.skip import Namespace, pop, skippable, stash
from pipesim.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from pipesim.models.gpu import Kernel

FLOAT = 4  # bytes
N, IN, OUT, SIDE = 5, 3, 8, 10
DEVICE = ps.GPU(flops=1e12, bandwidth=1e11)


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
    assert layer.forward == (Kernel("convolution", flops, FLOAT * (x + w + y)),)
    backward, added = layer.backward
    moved = FLOAT * ((y + x + w) + (x + w))
    assert backward == Kernel("convolution_backward", 2 * flops, moved)
    assert added == Kernel("add_", 0, FLOAT * 3 * w)  # to the gradient of the micro-batches before
    assert layer.output_bytes == FLOAT * y
    assert layer.parameter_bytes == FLOAT * w
    assert layer.activation_bytes == FLOAT * x  # its input


def test_matrix_products_have_their_depth() -> None:
    """They sum over the input's size, the output's (gradient of the input), and the samples."""
    layer = counted(nn.ReLU(), nn.Linear(IN, OUT), shape=(N, IN)).layers[1]
    forward, backward = (
        {kernel.depth for kernel in kernels if kernel.flops}
        for kernels in (layer.forward, layer.backward)
    )
    assert (forward, backward) == ({IN}, {N})  # the sample needs no gradient
    inner = counted(nn.Linear(IN, IN), nn.Linear(IN, OUT), shape=(N, IN)).layers[1]
    assert {kernel.depth for kernel in inner.backward if kernel.flops} == {OUT, N}
    assert not any(kernel.depth for kernel in inner.backward if not kernel.flops)


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


def test_a_stage_takes_its_kernels_or_their_launches() -> None:
    """The host launches kernels of a short layer while the GPU runs a long one."""
    layers = counted(nn.ReLU(), nn.Linear(1000, 1000, bias=False), nn.ReLU(), shape=(10, 1000))
    relu, product = 8e-8, 2e-5  # 80,000 bytes read and written; 2 * 10 * 1000 * 1000 operations
    for launch, stages, by_layer in (
        (0, (relu + product, relu), (relu, product, relu)),
        (5e-6, (relu + product, 5e-6), (5e-6, product, 5e-6)),
        (3e-5, (6e-5, 3e-5), (3e-5, 3e-5, 3e-5)),
    ):
        gpu = ps.GPU(flops=1e12, bandwidth=1e12, launch=launch)
        assert layers.costs([2, 1], gpu).forward == pytest.approx(stages)
        assert layers.to_layers(gpu).columns["forward"] == pytest.approx(by_layer)


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
    """Forward and backward; bytes stay the same."""
    sample = torch.empty(N, IN, SIDE, SIDE)
    direct, fewer = (
        layer_costs(nn.Sequential(convolution), sample, winograd=factor).layers[0]
        for factor in (1, 2.25)
    )
    for name in ("forward", "backward"):
        kernel, executed = getattr(direct, name)[0], getattr(fewer, name)[0]
        assert kernel.flops / executed.flops == pytest.approx(2.25 if takes_fewer else 1)
        assert executed == kernel._replace(flops=executed.flops)


@pytest.mark.parametrize("winograd", [0.5, float("nan"), float("inf"), "F(2 x 2)"])
def test_impossible_algorithms(winograd: float) -> None:
    with pytest.raises(ArgumentError, match="winograd must be finite and at least 1, got"):
        layer_costs(nn.Sequential(nn.ReLU()), torch.empty(1), winograd=winograd)


def test_gpus_by_name_and_others() -> None:
    """As in `pipesim.Transformer.costs`."""
    layers = counted(nn.ReLU())
    assert layers.costs([1], "h100_sxm") == layers.costs([1], ps.GPU.preset("h100_sxm"))
    assert layers.costs([1], {"flops": 1e12, "bandwidth": 1e11}) == layers.costs([1], DEVICE)
    with pytest.raises(UnknownNameError, match="unknown GPU"):
        layers.costs([1], "h10")
    with pytest.raises(ArgumentTypeError, match="gpu must be"):
        layers.to_layers(1e12)  # type: ignore[arg-type]


def test_costs_simulate() -> None:
    """Two stages of one layer each, on a link: a step by hand."""
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    layers = layer_costs(model, torch.empty(10, 100))
    device = ps.GPU(flops=2e8, bandwidth=1e15)  # 2 * 10 * 100 * 100 operations take 1 ms
    costs = layers.costs([1, 1], device, network=ps.Network(bandwidth=4e6))  # 4,000 bytes: 1 ms
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), step="none"), costs)
    assert timeline.makespan == pytest.approx(7e-3, rel=1e-5)  # F, 1, F, B of 2 (both), 1, B of 1
