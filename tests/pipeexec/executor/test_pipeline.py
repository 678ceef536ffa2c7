"""The executor against the unsplit model: same loss, same gradients, same parameters.

Where the micro-batches and the order of adding their gradients are the same, the arithmetic is, and
results are equal to the last bit. Against one backward of the whole batch they are close.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import small_pipelines
import torch
from case_choice import covering
from parity import RECOMPUTE, SCHEDULES, check, everywhere, lowered, needs_cuda, scheduled
from small_pipelines import (
    AddInputs,
    assert_close,
    assert_order_respected,
    assert_same,
    cut,
    data,
    dense,
    gradients,
    mse,
    orders,
    pipeline,
    two_target_loss,
    unsplit,
)
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split
from pipeexec.devices.make_devices import available_cores
from pipeexec.devices.thread_settings import one_thread
from pipesim.errors import OversubscriptionWarning

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


# Splits, schedules, recompute modes


@pytest.mark.slow
@everywhere
@scheduled
@pytest.mark.parametrize("counts", [[9], [7, 2], [1, 5, 3], [1, 2, 1, 1, 1, 1, 1, 1]])
def test_parity(counts: list[int], schedule: str, recompute: str) -> None:
    """On 1, 2, 3 and 8 devices, stages uneven, and 13 samples in 4 micro-batches."""
    stages = cut(dense(9), counts)
    inputs, targets = data(13)
    check(stages, lowered(schedule, len(counts), recompute=recompute), inputs, targets)
    assert_close(stages, inputs, targets)


@scheduled
@pytest.mark.parametrize("m", [1, 2, 7])
def test_parity_with_few_and_many_microbatches(m: int, schedule: str) -> None:
    """Fewer than devices, and as many as samples."""
    stages = cut(dense(3), [1, 1, 1])
    inputs, targets = data(7)
    check(stages, lowered(schedule, 3, m), inputs, targets)
    assert_close(stages, inputs, targets)


def test_more_devices_than_cores_are_warned_of_and_work() -> None:
    n = len(available_cores()) + 1
    stages = cut(dense(n), [1] * n)
    match = f"{n} CPU devices share {n - 1} cores"
    with pytest.warns(OversubscriptionWarning, match=match) as warned:
        check(stages, lowered("1f1b", n), *data(8))
    assert warned[0].filename == small_pipelines.__file__  # the line that makes the pipeline


@everywhere
def test_parity_step_after_step(recompute: str) -> None:
    """Observations of a stage's first forward change no later step."""
    stages = cut(dense(4), [2, 2])
    graph = lowered("1f1b", 2, recompute=recompute)
    with pipeline(stages, graph) as subject:
        for number in range(3):
            inputs, targets = data(8, seed=number)
            for stage in stages:
                stage.zero_grad()
            whole = copy.deepcopy(stages)
            loss = unsplit(whole, graph, inputs, targets)
            assert torch.equal(subject.step(inputs, targets).loss, loss)
            assert_same(stages, whole)


# What stages are made of


class Case(NamedTuple):
    """Stages and what to train them on."""

    stages: list[nn.Module]
    inputs: Any
    targets: Any
    loss_fn: Any = mse
    whole_batch: bool = False  # whether it equals the whole batch at once


class Fork(nn.Module):
    """One tensor to several: values, an integer mask, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), (x > 0).long(), x


class Along(nn.Module):
    """Several to several; passes the mask on, and does not use the skip connection but hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.layer(x * mask)), mask, skip * 2


class Join(nn.Module):
    """Several to one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> Tensor:
        return self.layer(x + skip) * mask


class Pair(nn.Module):
    """A last stage whose output the loss alone understands."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": x, "spread": x.exp()}


def _tuples() -> Case:
    return Case([Fork(), Along(), Join()], *data(13), whole_batch=True)


def _two_inputs() -> Case:
    """A batch of several tensors, and targets that are several too."""
    inputs, targets = data(13)
    stages = [AddInputs(16, 16), nn.Tanh(), nn.Linear(16, 16)]
    return Case(stages, (inputs, inputs**2), (targets, inputs), two_target_loss)


def _output_for_the_loss() -> Case:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return ((output["mean"] - target) ** 2 / output["spread"]).mean()

    return Case([nn.Linear(16, 16), nn.Linear(16, 16), Pair()], *data(13), loss)


def _tokens() -> Case:
    work = build_model("gpt", layers=2, width=16, heads=2, sequence=8)
    tokens, targets = work.make_batch(13, 0)
    return Case(list(split(work.layers, balance=[1, 2, 1])), tokens, targets, work.loss, True)


def _convolutions() -> Case:
    """Batch norm, residuals, in-place ReLUs."""
    work = build_model("convnet", layers=2, width=4, image_size=8, classes=3)
    images, classes = work.make_batch(13, 0)
    return Case(list(split(work.layers, 3)), images, classes, work.loss)


def _batch_norm() -> Case:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)]
    return Case(list(layers), *data(13))


def _batch_norm_in_eval_mode() -> Case:
    case = _batch_norm()
    for stage in case.stages:
        stage.eval()
    return case._replace(whole_batch=True)


def _in_place() -> Case:
    layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(3)]
    return Case(list(layers), *data(13), whole_batch=False)


def _in_place_chain() -> Case:
    """A view of the input, changed; and an output that is the changed input itself."""
    layers = [nn.Linear(16, 16), nn.Hardtanh(inplace=True), nn.ReLU(inplace=True)]
    return Case(list(layers), *data(13))


def _without_parameters() -> Case:
    return Case([nn.Linear(16, 16), nn.Tanh(), nn.Identity()], *data(13), whole_batch=True)


def _without_parameters_first() -> Case:
    return Case([nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)], *data(13), whole_batch=True)


def _frozen(*frozen: int) -> Case:
    stages = cut(dense(3), [1, 1, 1])
    for index in frozen:
        stages[index].requires_grad_(False)
    return Case(list(stages), *data(13))


def _partly_frozen() -> Case:
    stages = cut(dense(6), [2, 2, 2])
    stages[1][0].requires_grad_(False)
    return Case(list(stages), *data(13))


def _doubles() -> Case:
    inputs, targets = data(13)
    stages = [nn.Linear(16, 16).double() for _ in range(3)]
    return Case(list(stages), inputs.double(), targets.double(), whole_batch=True)


CASES: dict[str, Callable[[], Case]] = {
    "tuples": _tuples,
    "two inputs": _two_inputs,
    "output for the loss": _output_for_the_loss,
    "tokens": _tokens,
    "convolutions": _convolutions,
    "batch norm": _batch_norm,
    "batch norm in eval mode": _batch_norm_in_eval_mode,
    "in place": _in_place,
    "in place, chained": _in_place_chain,
    "without parameters": _without_parameters,
    "without parameters first": _without_parameters_first,
    "first frozen": lambda: _frozen(0),
    "middle frozen": lambda: _frozen(1),
    "last frozen": lambda: _frozen(2),
    "all but the last frozen": lambda: _frozen(0, 1),
    "all frozen": lambda: _frozen(0, 1, 2),
    "partly frozen": _partly_frozen,
    "doubles": _doubles,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute", "name"), covering(product(SCHEDULES, RECOMPUTE, CASES))
)
def test_parity_whatever_the_stages_do(name: str, schedule: str, recompute: str) -> None:
    """The user's batch stays as it was, too."""
    torch.manual_seed(0)
    stages, inputs, targets, loss_fn, whole_batch = CASES[name]()
    before = copy.deepcopy(inputs)
    check(stages, lowered(schedule, 3, recompute=recompute), inputs, targets, loss_fn)
    for actual, wanted in zip(*(x if isinstance(x, tuple) else (x,) for x in (inputs, before)),
                         strict=True):  # fmt: skip
        assert torch.equal(actual, wanted)
    if whole_batch and not isinstance(stages[0], Fork):
        assert_close(stages, inputs, targets, loss_fn)


@everywhere
def test_batch_norm_counts_each_microbatch_once(recompute: str) -> None:
    stages = _batch_norm().stages
    with pipeline(stages, lowered("gpipe", 3, recompute=recompute)) as subject:
        subject.step(*data(13))
        subject.step(*data(13))
    assert [int(stage[1].num_batches_tracked) for stage in stages] == [8, 8, 8]


@pytest.mark.parametrize("split_backward", [False, True])
def test_parity_of_a_stage_with_a_frozen_head_and_split_backward(split_backward: bool) -> None:
    """W has nothing to do in a stage without trained parameters."""
    stages = _frozen(1).stages
    backward = "I0 {s}W0" if split_backward else "B0"
    rows = [f"{s}F0 {s}{backward}".format(s=s) for s in range(3)]
    check(stages, ps.lower(orders(*rows)), *data(5))


# Losses and optimizers


@everywhere
@scheduled
def test_a_loss_that_is_a_sum(schedule: str, recompute: str) -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum()

    stages = cut(dense(2), [1, 1])
    inputs, targets = data(13)
    graph = lowered(schedule, 2, recompute=recompute)
    result = check(stages, graph, inputs, targets, summed, loss_reduction="sum")
    assert_close(stages, inputs, targets, summed)
    with one_thread():
        torch.testing.assert_close(result.loss, summed(nn.Sequential(*stages)(inputs), targets))


def test_the_loss_of_a_mean_is_that_of_the_whole_batch() -> None:
    """Micro-batches of 4 and of 3 samples count by their sizes."""
    stages = cut(dense(2), [1, 1])
    inputs, targets = data(13)
    result = check(stages, lowered("1f1b", 2), inputs, targets)
    torch.testing.assert_close(result.loss, mse(nn.Sequential(*stages)(inputs), targets))
    assert len(result.losses) == 4
    assert torch.equal(torch.stack(result.losses).sum(), result.loss)


def test_a_loss_of_one_element_and_some_dimension() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target)[None]

    stages = cut(dense(2), [1, 1])
    with pipeline(stages, lowered("1f1b", 2), loss) as subject:
        assert subject.step(*data(13)).loss.shape == ()


@pytest.mark.slow
@everywhere
@scheduled
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_step_is_the_unsplit_optimizer(
    optimizer: type[torch.optim.Optimizer], schedule: str, recompute: str
) -> None:
    """One optimizer a stage does what one for all does, step after step."""
    stages = cut(dense(5), [3, 2])
    whole = copy.deepcopy(stages)
    graph = lowered(schedule, 2, recompute=recompute)
    parameters = [p for stage in whole for p in stage.parameters()]
    reference = optimizer(parameters, lr=0.05)
    with pipeline(stages, graph, mse, lambda p: optimizer(p, lr=0.05)) as subject:
        for number in range(4):
            inputs, targets = data(13, seed=number)
            result = subject.step(inputs, targets)
            reference.zero_grad()
            loss = unsplit(whole, graph, inputs, targets)
            with one_thread():
                reference.step()
            assert torch.equal(result.loss, loss)
            assert_same(stages, whole)


def test_without_an_optimizer_gradients_add_up() -> None:
    stages = cut(dense(3), [2, 1])
    whole = copy.deepcopy(stages)
    graph = lowered("gpipe", 2)
    with pipeline(stages, graph) as subject:
        for number in range(3):
            inputs, targets = data(8, seed=number)
            subject.step(inputs, targets)
            unsplit(whole, graph, inputs, targets)
            assert_same(stages, whole)


def test_an_optimizer_is_made_for_each_stage_that_has_parameters() -> None:
    n_parameters: list[int] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        n_parameters.append(len(parameters := list(parameters)))
        return torch.optim.SGD(parameters, lr=0.1)

    with pipeline([nn.Linear(16, 16), nn.Tanh()], lowered("1f1b", 2), mse, make) as subject:
        subject.step(*data(8))
    assert n_parameters == [2]


def test_a_graph_without_steps_leaves_the_parameters() -> None:
    stages = cut(dense(2), [1, 1])
    before = copy.deepcopy(stages)
    graph = lowered("1f1b", 2, step="none")
    with pipeline(stages, graph, mse, lambda p: torch.optim.SGD(p, lr=1.0)) as subject:
        subject.step(*data(8))
    for actual, wanted in zip(stages, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual.parameters(), wanted.parameters(),
                                                      strict=True))  # fmt: skip
    assert all(gradient is not None for gradient in gradients(stages))


# On a GPU


def _cuda_parity(recompute: str, schedule: str, device: str = "cuda:0") -> None:
    """Compare with the same modules, unsplit, on the GPU's default stream.

    Close and not equal: the GPU's libraries may choose other kernels for other streams.
    """
    stages = _random_free_stages()
    whole = copy.deepcopy(stages)
    graph = lowered(schedule, 2, recompute=recompute)
    inputs, targets = data(13, width=64)
    for module in whole:
        module.to(device)
    loss = unsplit(whole, graph, inputs.to(device), targets.to(device))
    with px.Pipeline(stages, graph, [device] * 2, mse) as subject:
        for _ in range(3):
            for stage in stages:
                stage.zero_grad()
            result = subject.step(inputs, targets)
            torch.testing.assert_close(result.loss, loss)
            for actual, wanted in zip(gradients(stages), gradients(whole), strict=True):
                torch.testing.assert_close(actual, wanted)
            assert result.timeline.complete


def _random_free_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)),
    ]


@pytest.mark.cuda
@needs_cuda
@everywhere
@scheduled
def test_parity_on_cuda(schedule: str, recompute: str) -> None:
    _cuda_parity(recompute, schedule)


@pytest.mark.cuda
@needs_cuda
@scheduled
def test_order_is_respected_on_cuda(schedule: str) -> None:
    """By CUDA's own events, whose clock is good to a microsecond."""
    stages = [nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))) for _ in range(2)]
    graph = lowered(schedule, 2, recompute="always")
    with px.Pipeline(stages, graph, ["cuda:0"] * 2, mse) as subject:
        for _ in range(3):
            timeline = subject.step(*data(64, width=1024)).timeline
    assert_order_respected(timeline, slack=5e-6)
    compute = timeline.frame[timeline.frame["op"].isin(["F", "B", "R"])]
    assert (compute["end"] > compute["start"]).all()


@pytest.mark.cuda
@needs_cuda
def test_a_step_waits_for_what_its_caller_has_queued() -> None:
    """The batch is still being written on the caller's stream when the step begins."""
    stages = _random_free_stages()
    graph = lowered("1f1b", 2)
    inputs, targets = (x.to("cuda:0") for x in data(13, width=64))
    with px.Pipeline(stages, graph, ["cuda:0"] * 2, mse) as subject:
        expected = subject.step(inputs, targets).loss
        late = torch.zeros_like(inputs)
        torch.cuda._sleep(200_000_000)
        late.copy_(inputs)
        assert torch.equal(subject.step(late, targets).loss, expected)


@pytest.mark.cuda
@needs_cuda
def test_dropout_on_cuda_is_the_same_in_every_schedule() -> None:
    losses = []
    before = torch.cuda.get_rng_state()
    for schedule in SCHEDULES:
        for recompute in RECOMPUTE:
            stages = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(2)]
            for stage in stages:
                nn.init.eye_(stage[0].weight)
                nn.init.zeros_(stage[0].bias)
            torch.manual_seed(3)
            before = torch.cuda.get_rng_state()
            graph = lowered(schedule, 2, recompute=recompute)
            with px.Pipeline(stages, graph, ["cuda:0"] * 2, mse) as subject:
                losses.append(subject.step(*data(13)).loss.cpu())
            assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
