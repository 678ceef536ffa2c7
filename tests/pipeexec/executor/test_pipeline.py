"""The executor against the unsplit model: same loss, same gradients, same parameters.

Where the micro-batches and the order of adding their gradients are the same, the arithmetic is, and
results are equal to the last bit. Against one backward of the whole batch they are close.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from small_pipelines import (
    Nap,
    assert_close,
    assert_order_respected,
    assert_same,
    call_within,
    cut,
    data,
    dense,
    gradients,
    mse,
    one_thread,
    orders,
    pipeline,
    unsplit,
)
from strategies import graphs
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model
from pipeexec.demo_models.split import split
from pipeexec.devices.make_devices import available_cores
from pipeexec.executor.op_handlers import HANDLERS
from pipeexec.stages.batches import split_batch
from pipeexec.stages.random_numbers import OwnGenerator, task_seed
from pipesim.errors import ArgumentError, OversubscriptionWarning, RandomnessWarning
from pipesim.ops import Op
from pipesim.scheduling.registry import schedule_info

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

SCHEDULES = ["gpipe", "1f1b"]
RECOMPUTE = ["never", "always", "except_last"]
everywhere = pytest.mark.parametrize("recompute", RECOMPUTE)
scheduled = pytest.mark.parametrize("schedule", SCHEDULES)


def lowered(schedule: str, p: int, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, p, m), **options)


def check(
    stages: Sequence[nn.Module],
    graph: ps.TaskGraph,
    inputs: Any,
    targets: Any,
    loss_fn: Any = mse,
    **options: Any,
) -> px.StepResult:
    """Run a step, and the unsplit model: everything must be equal. Return the step's result."""
    for stage in stages:
        stage.zero_grad()
    whole = copy.deepcopy(list(stages))
    loss = unsplit(
        whole, graph, inputs, targets, loss_fn, reduction=options.get("loss_reduction", "mean")
    )
    with pipeline(stages, graph, loss_fn, **options) as subject:
        result = call_within(60, lambda: subject.step(inputs, targets))
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)
    assert result.timeline.complete
    assert_order_respected(result.timeline)
    return result


# Splits, schedules, recompute modes


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
    with pytest.warns(OversubscriptionWarning, match=f"{n} CPU devices share {n - 1} cores"):
        check(stages, lowered("1f1b", n), *data(8))


@everywhere
def test_parity_step_after_step(recompute: str) -> None:
    """What a stage learns in its first forward changes nothing afterwards."""
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

    class Add(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x) + y

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return mse(output, target[0]) + (output * target[1]).mean()

    stages = [Add(16, 16), nn.Tanh(), nn.Linear(16, 16)]
    return Case(stages, (inputs, inputs**2), (targets, inputs), loss)


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


@everywhere
@scheduled
@pytest.mark.parametrize("name", CASES)
def test_parity_whatever_the_stages_do(name: str, schedule: str, recompute: str) -> None:
    """The user's batch stays as it was, too."""
    torch.manual_seed(0)
    stages, inputs, targets, loss_fn, whole_batch = CASES[name]()
    before = copy.deepcopy(inputs)
    check(stages, lowered(schedule, 3, recompute=recompute), inputs, targets, loss_fn)
    for mine, its in zip(*(x if isinstance(x, tuple) else (x,) for x in (inputs, before)),
                         strict=True):  # fmt: skip
        assert torch.equal(mine, its)
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
    made: list[int] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(len(parameters := list(parameters)))
        return torch.optim.SGD(parameters, lr=0.1)

    with pipeline([nn.Linear(16, 16), nn.Tanh()], lowered("1f1b", 2), mse, make) as subject:
        subject.step(*data(8))
    assert made == [2]


def test_a_graph_without_steps_leaves_the_parameters() -> None:
    stages = cut(dense(2), [1, 1])
    before = copy.deepcopy(stages)
    graph = lowered("1f1b", 2, step="none")
    with pipeline(stages, graph, mse, lambda p: torch.optim.SGD(p, lr=1.0)) as subject:
        subject.step(*data(8))
    for mine, its in zip(stages, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), its.parameters(),
                                                      strict=True))  # fmt: skip
    assert all(gradient is not None for gradient in gradients(stages))


# Random numbers


class Noise(nn.Module):
    """Draws through operations that take a generator, and through one that takes none."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.randn(x.shape) + torch.empty_like(x).normal_()


def _random_stages() -> list[nn.Module]:
    """Return stages of which the first, the second and the last draw, and the third does not."""
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(16, 16), Noise()),
        nn.Linear(16, 16),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
    ]


def drawing(step: int) -> Any:
    """Return a call that gives each stage and micro-batch its own random numbers."""
    seed = torch.initial_seed()

    def call(stage: int, microbatch: int, module: nn.Module, values: tuple[Tensor, ...]) -> Any:
        with OwnGenerator(task_seed(seed, step, stage, microbatch), torch.device("cpu")):
            return module(*values)

    return call


@everywhere
@scheduled
def test_dropout_is_that_of_a_sequential_run(schedule: str, recompute: str) -> None:
    """The same masks in forward and in recompute, in every step anew; torch's own untouched."""
    stages = _random_stages()
    whole = copy.deepcopy(stages)
    graph = lowered(schedule, 4, 5, recompute=recompute)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    losses = []
    with pipeline(stages, graph) as subject:
        for number in range(3):
            result = subject.step(*data(13))
            loss = unsplit(whole, graph, *data(13), call=drawing(number))
            assert torch.equal(result.loss, loss)
            assert_same(stages, whole)
            losses.append(float(loss))
    assert len(set(losses)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_the_same_in_every_schedule() -> None:
    """After the same seed: same masks, though gradients are added in another order."""
    losses, found = [], []
    for schedule in SCHEDULES:
        for recompute in RECOMPUTE:
            stages = _random_stages()
            torch.manual_seed(11)
            with pipeline(stages, lowered(schedule, 4, 5, recompute=recompute)) as subject:
                losses.append(subject.step(*data(13)).loss)
            found.append(gradients(stages))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for other in found[1:]:
        for mine, its in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, its)


def test_another_seed_drops_others() -> None:
    losses = []
    for seed in (1, 2, 1):
        stages = _random_stages()
        torch.manual_seed(seed)
        with pipeline(stages, lowered("1f1b", 4)) as subject:
            losses.append(float(subject.step(*data(13)).loss))
    assert losses[0] == losses[2] != losses[1]


def test_eval_mode_draws_nothing() -> None:
    """And going back to training draws again."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Dropout()) for _ in range(2)]
    whole = copy.deepcopy(stages)
    graph = lowered("1f1b", 2)
    with pipeline(stages, graph) as subject:
        for number, training in enumerate([True, False, False, True]):
            for stage in (*stages, *whole):
                stage.train(training)
            loss = unsplit(whole, graph, *data(13), call=drawing(number))
            assert torch.equal(subject.step(*data(13)).loss, loss)
            assert_same(stages, whole)


class _DrawsLater(nn.Module):
    """Draws from its second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls == 1 else nn.functional.dropout(self.layer(x))


def test_randomness_that_was_not_seen_at_first_is_warned_of() -> None:
    """Once; then it is known."""
    with pipeline([_DrawsLater(), nn.Linear(16, 16)], lowered("1f1b", 2)) as subject:
        with pytest.warns(RandomnessWarning, match="did not draw in its first forward"):
            subject.step(*data(8))
        subject.step(*data(8))


# Any verified graph runs


GRAPHS: dict[str, Callable[[], ps.TaskGraph]] = {
    "depth first": lambda: ps.lower(orders("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")),
    "mixed order": lambda: ps.lower(orders("0F1 0F0 0F2 0B2 0B1 0B0", "1F1 1F0 1B0 1F2 1B2 1B1")),
    "looped": lambda: ps.lower(
        orders(
            "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1",
            "1F0 1F1 3F0 3B0 3F1 1B0 3B1 1B1",
            placement=ps.looped(2, 2),
        ),
        recompute="always",
    ),
    "v": lambda: ps.lower(
        orders(
            "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
            "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
        )
    ),
    "all stages on one device": lambda: ps.lower(
        orders("0F0 1F0 2F0 2B0 0F1 1B0 1F1 2F1 0B0 2B1 1B1 0B1")
    ),
    "split backward": lambda: ps.lower(
        orders(
            "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
            "1F0 1F1 1I0 1F2 1I1 1I2 1W0 1W1 1W2",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W2 2W1 2W0",
        )
    ),
    "split backward, recomputed": lambda: ps.lower(
        orders("0F0 0F1 0I1 0I0 0W1 0W0", "1F0 1F1 1I1 1I0 1W0 1W1"), recompute="always"
    ),
    "both backwards": lambda: ps.lower(orders("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0")),
    "no overlap": lambda: lowered("1f1b", 3, overlap=False),
    "one copy stream": lambda: lowered("1f1b", 3, streams="single"),
    "rendezvous": lambda: lowered("1f1b", 3, rendezvous=True),
    "a host a device": lambda: lowered("gpipe", 3, hosts="per_device"),
    "everything at once": lambda: lowered(
        "gpipe", 3, streams="single", rendezvous=True, hosts="per_device", recompute="except_last"
    ),
    "torch's gpipe": lambda: ps.lower(ps.schedule("gpipe", 3, 4, backward_order="forward")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_any_verified_graph_runs(name: str) -> None:
    graph = GRAPHS[name]()
    check(cut(dense(graph.n_stages), [1] * graph.n_stages), graph, *data(13))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", ps.schedules().index)
def test_parity_of_every_named_schedule(name: str, recompute: str) -> None:
    """Loss and gradients are the unsplit model's to the last bit, on 2 and on 4 devices."""
    for p, m in ((2, 4), (2, 5), (4, 8), (4, 3)):
        if not schedule_info(name).allows(p, m):
            continue
        graph = lowered(name, p, m, recompute=recompute)
        check(cut(dense(graph.n_stages), [1] * graph.n_stages), graph, *data(2 * m + 1))


@settings(max_examples=30)
@given(graph=graphs(n_replicas=1, sharded=(), shard_optimizer=False))
def test_parity_on_any_graph(graph: ps.TaskGraph) -> None:
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(graph.n_stages)]
    result = check(stages, graph, *data(2 * graph.n_microbatches + 1))
    assert list(result.peak_held) == held_by_simulation(graph)


# Memory and time


def held_by_simulation(graph: ps.TaskGraph) -> list[int]:
    """Return the peak of activations of a byte each, on each device; inputs count nothing.

    What I leaves for W is a byte as well.
    """
    costs = ps.Costs(
        forward=1.0, input_grad=1.0, weight_grad=1.0, activation_bytes=1.0, weight_grad_bytes=1.0
    )
    return [int(peak) for peak in ps.simulate(graph, costs).peak_memory]


@everywhere
@scheduled
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (4, 6)])
def test_activations_held_are_as_simulated(schedule: str, recompute: str, p: int, m: int) -> None:
    graph = lowered(schedule, p, m, recompute=recompute)
    result = check(cut(dense(p), [1] * p), graph, *data(m))
    assert list(result.peak_held) == held_by_simulation(graph)


def test_activations_held_by_gpipe_and_1f1b() -> None:
    """By hand: all of them; and on device i as many as there are devices from i on."""
    stages = cut(dense(3), [1, 1, 1])
    assert check(stages, lowered("gpipe", 3, 5), *data(5)).peak_held == (5, 5, 5)
    assert check(stages, lowered("1f1b", 3, 5), *data(5)).peak_held == (3, 2, 1)
    assert check(stages, lowered("gpipe", 3, 5, recompute="always"), *data(5)).peak_held == (1,) * 3


def nervous(p: int, seed: int) -> list[nn.Module]:
    """Return stages that sleep for random times, each up to 4 ms."""
    return [
        nn.Sequential(nn.Linear(16, 16), Nap(4e-3, 4e-3, seed=seed * p + index))
        for index in range(p)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {"recompute": "always"}),
        ("1f1b", {}),
        ("1f1b", {"recompute": "except_last", "overlap": False}),
        ("1f1b", {"streams": "single", "rendezvous": True}),
    ],
)
def test_stages_that_take_their_time_race_with_nobody(
    schedule: str, options: dict[str, Any], seed: int
) -> None:
    """Results are exact, and every task starts after whatever it waits for has ended."""
    check(nervous(3, seed), lowered(schedule, 3, 5, **options), *data(10))


def test_stages_run_at_the_same_time() -> None:
    """Somewhere in the step, tasks of two devices overlap."""
    result = check(nervous(2, 0), lowered("gpipe", 2, 6), *data(6))
    timeline = result.timeline
    first, second = (
        np.flatnonzero((timeline.graph.device == device) & (timeline.graph.op == Op.F))
        for device in (0, 1)
    )
    overlap = (timeline.start[first][:, None] < timeline.end[second]) & (
        timeline.start[second] < timeline.end[first][:, None]
    )
    assert overlap.any()


def test_durations_are_measured() -> None:
    """F and B that sleep 10 ms take at least that; F without sleep and transfers take less."""
    stages = [nn.Sequential(nn.Linear(16, 16), Nap(0.01, 0.01)), nn.Linear(16, 16)]
    timeline = check(stages, lowered("gpipe", 2, 3), *data(6)).timeline
    frame = timeline.frame
    slept = frame[(frame["stage"] == 0) & frame["op"].isin(["F", "B"])]
    assert len(slept) == 6
    assert (slept["end"] - slept["start"] >= 0.01).all()
    other = frame[(frame["stage"] == 1) & (frame["op"] == "F")]
    assert (other["end"] - other["start"]).median() < 0.01


def test_bytes_of_messages_are_measured() -> None:
    """Micro-batches of 4, 3, 3 and 3 samples of 16 floats, both ways; the rest carries none."""
    timeline = check(cut(dense(2), [1, 1]), lowered("1f1b", 2), *data(13)).timeline
    frame = timeline.frame
    sizes = {0: 256, 1: 192, 2: 192, 3: 192}
    messages = frame[frame["op"].str.contains("SEND|RECV")]
    assert len(messages) == 16
    assert (messages["nbytes"] == messages["microbatch"].map(sizes)).all()
    assert (frame.drop(messages.index)["nbytes"] == 0).all()


def test_a_step_is_replayed_from_its_own_durations() -> None:
    """A check of the graph: what it leaves out would show as time missing.

    The median of 5 is within 10 %.
    """
    graph = lowered("1f1b", 2, 4)
    stages = [nn.Sequential(nn.Linear(16, 16), Nap(5e-3, 5e-3)) for _ in range(2)]
    errors = []
    with pipeline(stages, graph) as subject:
        for _ in range(5):
            timeline = subject.step(*data(8)).timeline
            errors.append(ps.replay(timeline).makespan / timeline.makespan - 1)
    assert abs(float(np.median(errors))) < 0.10


# The pipeline's own ways


def test_every_operation_of_one_process_has_its_work() -> None:
    """Sharded optimizers are simulated alone."""
    assert set(HANDLERS) == set(Op) - {Op.UNSHARD}


def test_pipelines_that_share_stages_run_in_turn() -> None:
    """`with_graph`: other graphs of the same stages, devices and optimizers."""
    stages = cut(dense(4), [2, 2])
    first = lowered("gpipe", 2, recompute="always")
    second, other = lowered("1f1b", 2), lowered("1f1b", 2, 3)
    whole = copy.deepcopy(stages)
    reference = torch.optim.AdamW([p for stage in whole for p in stage.parameters()], lr=0.1)
    with pipeline(stages, first, mse, lambda p: torch.optim.AdamW(p, lr=0.1)) as subject:
        siblings = [subject, *(subject.with_graph(graph) for graph in (second, other))]
        for sibling in [*siblings, *siblings]:
            loss = sibling.step(*data(13)).loss
            reference.zero_grad()
            assert torch.equal(loss, unsplit(whole, sibling.graph, *data(13)))
            reference.step()
            assert_same(stages, whole)


def test_a_graph_that_places_stages_elsewhere_is_refused() -> None:
    with (
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2)) as subject,
        pytest.raises(ArgumentError, match=r"on \[0, 0\], this pipeline on \[0, 1\]"),
    ):
        subject.with_graph(ps.lower(orders("0F0 1F0 1B0 0B0")))


def test_preserved_restores_everything() -> None:
    """Parameters, buffers (also those that are not saved), gradients, optimizers."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)]
    stages[1].register_buffer("secret", torch.zeros(()), persistent=False)

    def count(module: nn.Module, *_: Any) -> None:
        module.secret.add_(1)

    stages[1].register_forward_hook(count)
    make = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731 - one line says it
    with pipeline(stages, lowered("1f1b", 2), mse, make) as subject:
        subject.step(*data(8))
        before = copy.deepcopy(stages)
        for mine, its in zip(stages, before, strict=True):
            for parameter, kept in zip(mine.parameters(), its.parameters(), strict=True):
                kept.grad = parameter.grad.clone()
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in subject.optimizers]
        numbers = [subject.n_steps, int(stages[1].secret)]
        with subject.preserved():
            subject.step(*data(8, seed=1))
            assert int(stages[1].secret) == 8
        assert_same(stages, before)
        assert [subject.n_steps, int(stages[1].secret)] == numbers
        for mine, its in zip(subject.optimizers, states, strict=True):
            torch.testing.assert_close(mine.state_dict(), its, rtol=0, atol=0)


@pytest.mark.parametrize("had_state", [True, False])
def test_preserved_leaves_an_optimizers_tensors_where_they_are(had_state: bool) -> None:
    """A CUDA graph reads them there. A state that there was not is gone again."""
    make = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1))  # noqa: E731 - one line says it
    with pipeline(cut(dense(2), [1, 1]), lowered("1f1b", 2), mse, make) as subject:
        if had_state:
            subject.step(*data(8))

        def tensors() -> list[torch.Tensor]:
            found = [x for o in subject.optimizers for s in o.state.values() for x in s.values()]
            return [*found, *(o.param_groups[0]["lr"] for o in subject.optimizers)]

        before = [(x, x.clone()) for x in tensors()]
        with subject.preserved():
            subject.step(*data(8, seed=1))
            for optimizer in subject.optimizers:
                optimizer.param_groups[0]["lr"].fill_(0.2)
                optimizer.param_groups[0]["weight_decay"] = 0.5
        after = tensors()
        assert len(before) == len(after) == (14 if had_state else 2)
        for (old, value), new in zip(before, after, strict=True):
            assert not had_state or old is new
            assert torch.equal(new, value)
        assert subject.optimizers[0].param_groups[0]["weight_decay"] == 0.01


def test_a_pipeline_says_what_it_is() -> None:
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2)) as subject:
        assert repr(subject) == (
            "<Pipeline of <TaskGraph gpipe: 34 tasks, 2 devices, 2 stages, 4 micro-batches, "
            "recompute=never> on cpu:0, cpu:1>"
        )


def test_host_seconds_are_counted() -> None:
    result = check(nervous(2, 0), lowered("gpipe", 2), *data(8))
    assert 0 < result.host_seconds < 60


@pytest.mark.parametrize(("n", "m", "sizes"), [(13, 4, [4, 3, 3, 3]), (4, 4, [1] * 4), (5, 1, [5])])
def test_batches_are_split_as_evenly_as_can_be(n: int, m: int, sizes: list[int]) -> None:
    batch = torch.arange(n), torch.arange(n) * 2
    parts, found = split_batch(batch, m, "inputs")
    assert found == sizes
    assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])
    assert all(torch.equal(part[0] * 2, part[1]) for part in parts)


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
            for mine, its in zip(gradients(stages), gradients(whole), strict=True):
                torch.testing.assert_close(mine, its)
            assert result.timeline.complete


def _random_free_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)),
    ]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
