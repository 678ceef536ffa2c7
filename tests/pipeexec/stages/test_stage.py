"""One stage by itself: its tasks, its random numbers, its buffers, and the bytes that it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_pipelines import call_within, mse
from torch import Tensor, nn

import pipeexec.stages.module_call
from pipeexec.devices.thread_settings import one_thread
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.module_call import OwnGenerator, task_seed
from pipeexec.stages.stage import Stage
from pipesim.errors import ExecutionError

CPU = torch.device("cpu")


def stage(module: nn.Module, index: int = 1, target: Tensor | None = None) -> Stage:
    """Return a stage; with a target it is the last one, and ends in a loss."""
    finish = None if target is None else (lambda output, microbatch: mse(output, target))
    return Stage(module, index, CPU, ActivationCounter(), finish)


def run(stage: Stage, x: Tensor, gradient: Tensor, how: str) -> tuple[Tensor, Tensor | None]:
    """Run F and the backward of one micro-batch; return the output and the input's gradient."""
    outputs = stage.forward(0, (x,), seed=5, recomputed="R" in how)
    if "R" in how:
        stage.recompute(0, seed=5)
    gradients = () if stage.loss_fn is not None else (gradient,)
    if "B" in how:
        (input_gradient,) = stage.backward(0, gradients)
    else:
        (input_gradient,) = stage.input_grad(0, gradients)
        stage.weight_grad(0)
    return outputs[0], input_gradient


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gradient() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


HOW = ["FB", "FRB", "FIW", "FRIW"]


@pytest.mark.parametrize("how", HOW)
def test_a_stage_computes_what_its_module_does(how: str, x: Tensor, gradient: Tensor) -> None:
    """Output, gradient of the input, gradients of the weights; nothing held at the end."""
    module, same = layers(), layers()
    subject = stage(module)
    with one_thread():
        output, input_gradient = run(subject, x, gradient, how)
        leaf = x.clone().requires_grad_()
        expected = same(leaf)
        expected.backward(gradient)
    assert torch.equal(output, expected)
    assert not output.requires_grad
    assert input_gradient is not None
    assert torch.equal(input_gradient, leaf.grad)
    for actual, wanted in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(actual.grad, wanted.grad)
    assert (subject.counter.current, subject.counter.peak) == (0, 1)


@pytest.mark.parametrize("how", HOW)
def test_the_last_stage_starts_from_its_loss(how: str, x: Tensor, gradient: Tensor) -> None:
    module, same = layers(), layers()
    with one_thread():
        output, input_gradient = run(stage(module, target=gradient), x, gradient, how)
        leaf = x.clone().requires_grad_()
        loss = mse(same(leaf), gradient)
        loss.backward()
    assert torch.equal(output, loss)
    assert input_gradient is not None
    assert torch.equal(input_gradient, leaf.grad)
    for actual, wanted in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(actual.grad, wanted.grad)


@pytest.mark.parametrize("how", HOW)
def test_stage_0_computes_no_gradient_of_the_data(how: str, x: Tensor, gradient: Tensor) -> None:
    module = layers()
    _, input_gradient = run(stage(module, index=0), x, gradient, how)
    assert input_gradient is None
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("module", [nn.Identity(), nn.Tanh(), nn.Flatten(0, 0)])
@pytest.mark.parametrize("how", HOW)
def test_a_stage_without_parameters_passes_gradients_on(
    module: nn.Module, how: str, x: Tensor, gradient: Tensor
) -> None:
    leaf = x.clone().requires_grad_()
    module(leaf).backward(gradient)
    _, input_gradient = run(stage(module), x, gradient, how)
    assert input_gradient is not None
    assert torch.equal(input_gradient, leaf.grad)


@pytest.mark.parametrize("how", HOW)
def test_an_in_place_operation_leaves_the_input_alone(
    how: str, x: Tensor, gradient: Tensor
) -> None:
    """Others hold it: the stage before saved its output, the user the batch."""
    before = x.clone()
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    subject = stage(module)
    for _ in range(3):
        _, input_gradient = run(subject, x, gradient, how)
        assert torch.equal(x, before)
        assert input_gradient is not None
        assert torch.equal(input_gradient == 0, before <= 0)
    assert subject.modifies_input == {True: True}


def test_an_input_that_nobody_changes_is_copied_once(x: Tensor, gradient: Tensor) -> None:
    """In the first forward, before that is known."""
    addresses: list[int] = []
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_forward_pre_hook(lambda _, args: addresses.append(args[0].data_ptr()))
    subject = stage(module)
    for _ in range(3):
        run(subject, x, gradient, "FB")
    assert addresses[0] != x.data_ptr()
    assert addresses[1:] == [x.data_ptr()] * 2


class _Later(nn.Module):
    """Changes its input in place, but not at first."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls == 1 else x.mul_(2)


def test_a_stage_that_changes_its_input_later_is_refused(x: Tensor, gradient: Tensor) -> None:
    subject = stage(_Later(), index=0)
    subject.forward(0, (x,), 0, False)
    with pytest.raises(ExecutionError, match="stage 0 changed its input in place"):
        subject.forward(1, (x,), 0, False)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (3.0, "must be a tensor or a tuple of tensors, got float"),
        (None, "got NoneType"),
        ([torch.ones(2)], "got list"),
        ((torch.ones(2), "x"), "got tuple with str"),
    ],
)
def test_an_output_that_is_no_tensor_is_refused(output: Any, message: str, x: Tensor) -> None:
    class Odd(nn.Module):
        def forward(self, _: Tensor) -> Any:
            return output

    with pytest.raises(ExecutionError, match=f"output of stage 1 .*{message}"):
        stage(Odd()).forward(0, (x,), 0, False)


def test_tuples_with_tensors_that_take_no_gradient(x: Tensor) -> None:
    """Integers and booleans pass; outputs without a backward have no gradient."""

    class Several(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return x * 2, index + 1, x > 0, x * 3

    subject = stage(Several())
    index = torch.arange(5)
    outputs = subject.forward(0, (x, index), 0, False)
    assert [value.dtype for value in outputs] == [
        torch.float32,
        torch.int64,
        torch.bool,
        torch.float32,
    ]
    input_gradients = subject.backward(0, (torch.ones_like(x), None, None, None))
    assert torch.equal(input_gradients[0], torch.full_like(x, 2))
    assert input_gradients[1] is None


@pytest.mark.parametrize("how", ["FRB", "FRIW"])
def test_buffers_are_updated_once(how: str, x: Tensor, gradient: Tensor) -> None:
    module, same = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    run(stage(module), x, gradient, how)
    same(x)
    assert int(module.num_batches_tracked) == 1
    assert torch.equal(module.running_mean, same.running_mean)
    assert torch.equal(module.running_var, same.running_var)


def test_a_recompute_sees_a_buffer_that_was_replaced(x: Tensor, gradient: Tensor) -> None:
    """A module may assign a new tensor to its buffer, not only change the one it has."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = Scaled()
    subject = stage(module)
    module.scale = torch.full((), 3.0)
    _, input_gradient = run(subject, x, gradient, "FRB")
    assert input_gradient is not None
    assert torch.equal(input_gradient, 3 * gradient)


def test_a_reset_stage_holds_nothing(x: Tensor) -> None:
    subject = stage(layers())
    subject.meter = ActivationMeter()
    subject.forward(0, (x,), 0, False)
    subject.forward(1, (x,), 0, True)
    assert subject.counter.current == 1
    assert subject.meter.current > 0
    subject.reset()
    assert subject.counter.current == 0
    assert subject.meter.current == 0


# Random numbers


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "randperm": lambda x: torch.randperm(len(x)),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "normal_": lambda x: x.clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_an_own_generator_repeats_itself(name: str, x: Tensor) -> None:
    """And leaves the process's generator alone."""
    draw = DRAWS[name]

    def drawn(seed: int) -> list[Tensor]:
        with OwnGenerator(seed, CPU) as random:
            values = [draw(x) for _ in range(3)]
        assert random.drew
        return values

    before = torch.get_rng_state()
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


def test_a_generator_that_the_module_chose_is_kept(x: Tensor) -> None:
    with OwnGenerator(1, CPU):
        drawn = torch.rand(5, generator=torch.Generator().manual_seed(9))
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(9)))


@pytest.mark.parametrize("name", ["dropout", "randn"])
def test_threads_that_draw_at_once_do_not_disturb_each_other(name: str, x: Tensor) -> None:
    """Through their own generators, and where the process's has to be lent."""

    def drawn(seed: int) -> list[Tensor]:
        with OwnGenerator(seed, CPU):
            return [DRAWS[name](x) for _ in range(200)]

    expected = [drawn(seed) for seed in range(4)]
    results: dict[int, list[Tensor]] = {}
    workers = [
        threading.Thread(target=lambda seed=seed: results.update({seed: drawn(seed)}))
        for seed in range(4)
    ]
    before = torch.get_rng_state()
    for worker in workers:
        worker.start()
    call_within(30, lambda: [worker.join() for worker in workers])
    assert torch.equal(torch.get_rng_state(), before)
    for seed in range(4):
        assert all(torch.equal(a, b) for a, b in zip(results[seed], expected[seed], strict=True))


def test_seeds_differ_in_every_argument() -> None:
    seeds = {
        task_seed(seed, step, stage, microbatch)
        for seed in (0, 1, 2**63)
        for step in range(3)
        for stage in range(3)
        for microbatch in range(3)
    }
    assert len(seeds) == 81
    assert task_seed(1, 2, 3, 4) == task_seed(1, 2, 3, 4)


def test_a_module_is_watched_for_randomness_once_a_mode(
    monkeypatch: pytest.MonkeyPatch, x: Tensor, gradient: Tensor
) -> None:
    """Stages without it do not pay; one that draws in training only pays in training only."""
    entered: list[int] = []

    class Counting(OwnGenerator):
        def __enter__(self) -> Any:
            entered.append(1)
            return super().__enter__()

    monkeypatch.setattr(pipeexec.stages.module_call, "OwnGenerator", Counting)

    def times(subject: Stage) -> int:
        entered.clear()
        for _ in range(3):
            run(subject, x, gradient, "FRB")
        return len(entered)

    plain, dropping = stage(layers()), stage(nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    assert [times(plain), times(plain)] == [1, 0]
    assert [times(dropping), times(dropping)] == [6, 6]
    dropping.module.eval()
    assert [times(dropping), times(dropping)] == [1, 0]
    dropping.module.train()
    assert times(dropping) == 6


# Bytes held


def held(module: nn.Module, x: Tensor, how: str = "FB") -> int:
    """Return the most bytes that a stage holds for one micro-batch, and see that they go."""
    subject = stage(module)
    run(subject, x, torch.ones_like(module(x)), "FB")  # a first forward is given a copy
    subject.meter = ActivationMeter([*module.parameters(), *module.buffers()])
    run(subject, x, torch.ones_like(module(x)), how)
    assert subject.meter.current == 0
    return subject.meter.peak


@pytest.mark.parametrize(
    ("module", "floats"),
    [
        (nn.Linear(4, 8), 5 * 4),  # its input
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 5 * (4 + 8)),  # both inputs
        (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), 5 * (4 + 8)),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 5 * (4 + 8)),
        (nn.Tanh(), 5 * (4 + 4)),  # input, as the stage's own, and output
        (nn.Identity(), 5 * 4),
    ],
)
def test_bytes_held_are_those_of_what_autograd_saves(
    module: nn.Module, floats: int, x: Tensor
) -> None:
    """Each storage once: Tanh's output is the next layer's input. Weights are held anyway."""
    assert held(module, x) == 4 * floats
    assert held(module, x, "FRB") == 4 * floats
    assert held(module, x, "FIW") == 4 * floats


def test_frozen_weights_are_not_counted_as_activations(x: Tensor) -> None:
    """Autograd saves them for the gradient of the input, but they are held anyway."""
    module = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)).requires_grad_(False)
    assert held(module, x) == 4 * 5 * 4


def test_a_dropped_forward_holds_its_input_only(x: Tensor) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    subject = stage(module)
    subject.modifies_input = {True: False}
    subject.meter = ActivationMeter(module.parameters())
    subject.forward(0, (x,), 0, True)
    assert subject.meter.current == 4 * 5 * 4
    assert subject.counter.current == 0


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
def test_attention_is_random_only_with_dropout(dropout: float, draws: bool) -> None:
    """Torch tags attention as random whatever its dropout; only what draws numbers must pay."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.view(1, 1, *x.shape)
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    subject = stage(Attention())
    subject.forward(0, (torch.ones(5, 4),), seed=5, recomputed=False)
    assert subject.is_random == {True: draws}
