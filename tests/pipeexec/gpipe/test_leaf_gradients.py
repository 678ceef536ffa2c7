"""Gradients that autograd takes from `px.GPipe`, beside those of the module without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from case_choice import covering
from gpipe_models import CASES, CPUS, MODES, batch, sequential, step
from torch import Tensor, nn

import pipeexec as px
from pipesim.errors import ExecutionError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning"),
    pytest.mark.filterwarnings("ignore:Using backward"),
    pytest.mark.usefixtures("one_torch_thread"),
]

Module = Callable[[Tensor], Tensor]
Gradients = list[Tensor | None]


def _grad_of_parameters(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    return [*torch.autograd.grad(module(x).square().mean(), parameters)]


def _grad_of_input(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    return [*torch.autograd.grad(module(x).square().mean(), [x, parameters[-1]])]


def _backward_of_some(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    module(x).square().mean().backward(inputs=parameters[:1])
    return [x.grad, *(p.grad for p in parameters)]


def _retained(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    """Two losses of one output."""
    output = module(x)
    output.square().mean().backward(retain_graph=True)
    output.sin().mean().backward()
    return [x.grad, *(p.grad for p in parameters)]


def _gradient_penalty(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    """WGAN-GP: the loss has the norm of the gradient of each sample."""
    output = module(x)
    (slope,) = torch.autograd.grad(output.sum(), [x], create_graph=True)
    (output.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    return [x.grad, *(p.grad for p in parameters)]


def _created(module: Module, x: Tensor, parameters: list[Tensor]) -> Gradients:
    """A sum of squared gradients of parameters, from ``backward(create_graph=True)``."""
    module(x).square().sum().backward(create_graph=True)
    first = [p.grad for p in parameters if p.grad is not None]
    return [*torch.autograd.grad(sum(g.square().sum() for g in first), [x, *parameters])]


USES = (
    _grad_of_parameters, _grad_of_input, _backward_of_some, _retained, _gradient_penalty, _created
)  # fmt: skip


def _in_parts(plain: nn.Module, chunks: int) -> Module:
    return lambda x: torch.cat([plain(part) for part in x.chunk(chunks)])


def _check(gradients: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    assert len(gradients) == len(wanted)
    for a, b in zip(gradients, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "balance", "checkpoint", "dependencies", "threads"),
    covering(
        (*case, checkpoint, dependencies, threads)
        for case in CASES
        if case[0] != "no parameters"
        for checkpoint in MODES
        for dependencies in (True, False)
        for threads in (True, False)
    ),
)
def test_gradients_are_those_of_the_module(
    name: str, balance: list[int], checkpoint: Any, dependencies: bool, threads: bool
) -> None:
    """In double precision, so that second derivatives of batch norms do not cancel."""
    for use in USES:
        plain = sequential(name).double()
        model = px.GPipe(
            copy.deepcopy(plain), balance, devices=CPUS, chunks=3, checkpoint=checkpoint,
            dependencies=dependencies, threads=threads,
        )  # fmt: skip
        x, y = (batch().double().requires_grad_() for _ in range(2))
        _check(
            use(model, x, list(model.parameters())),
            use(_in_parts(plain, 3), y, list(plain.parameters())),
        )
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("checkpoint", MODES)
def test_collected_gradients_have_the_bits_of_backward(checkpoint: Any) -> None:
    """And are measured tasks, which leave ``.grad`` as it was."""
    model = px.GPipe(sequential("dense"), [1, 2, 1], devices=CPUS, chunks=4, checkpoint=checkpoint)
    step(model, batch())
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.partitions[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    collected = torch.autograd.grad(model(batch()).square().mean(), trained)
    assert all(map(torch.equal, collected, wanted[-len(collected) :]))
    assert all(p.grad is None for p in model.parameters())
    assert model.timeline().graph.n_microbatches == 4


def test_a_hook_of_a_parameter_gets_the_gradient_of_the_mini_batch() -> None:
    """Once, as without a pipeline, before and after it is added to ``.grad``."""
    calls: list[Tensor | None] = []

    def doubled(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return 2 * gradient

    for repeats in (False, True):
        plain = sequential("dense")
        model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=4)
        for module in (model, plain):
            weight = next(iter(module.parameters()))
            weight.register_hook(doubled)
            weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
            calls.clear()
            loss = module(batch()).square().mean()
            loss.backward(retain_graph=True)
            if repeats:
                loss.backward()
            assert len(calls) == 2 + 2 * repeats
        _check([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_generator_and_a_critic() -> None:
    """Two modules in pipelines: the critic's output has a part in both losses."""
    plain = sequential("dense"), sequential("skips")
    models = [
        px.GPipe(copy.deepcopy(module), balance, devices=CPUS, chunks=4)
        for module, balance in zip(plain, ([2, 2], [3, 5]), strict=True)
    ]
    results: list[Gradients] = []
    for generator, critic in (models, plain):
        images = generator(batch())
        score = critic(images).mean()
        loss = critic(batch(16)[8:]).mean() - score
        own = list(critic.parameters())
        of_critic = torch.autograd.grad(loss, own, retain_graph=True)
        (-score).backward(inputs=list(generator.parameters()))
        results.append([*of_critic, *(p.grad for p in (*generator.parameters(), *own))])
    _check(*results)


def test_dropout_of_a_repeated_forward_is_that_of_the_first() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    model = px.GPipe(layers, [1, 2], devices=CPUS, chunks=4, checkpoint="never")
    parameters = list(model.parameters())
    loss = model(batch()).square().mean()
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, parameters)))


def test_parameters_that_were_computed() -> None:
    """The backward of a partition goes on to what its parameters were computed from."""
    plain = sequential("dense")
    model = px.GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS, checkpoint="never")
    for module in (model, plain):
        doubled = {name: 2 * p for name, p in module.named_parameters()}
        torch.func.functional_call(module, doubled, (batch(),)).sum().backward()
    _check([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Counts(nn.Module):
    """Multiplies by the number of its forwards."""

    n: Any

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        if in_buffer:
            self.register_buffer("n", torch.zeros(()))
        else:
            self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return x * self.n


@pytest.mark.parametrize(
    ("layer", "chunks", "message"),
    [
        (nn.Dropout(0.5), 1, "a single micro-batch draws random numbers"),
        (Counts(in_buffer=True), 2, "Counts changes its buffer 'n' in every forward"),
        (Counts(in_buffer=False), 2, "Counts changes 'n' in every forward"),
    ],
)
def test_forwards_that_cannot_be_repeated(layer: nn.Module, chunks: int, message: str) -> None:
    """The module works afterwards, and draws the numbers that it would have drawn."""
    layers = nn.Sequential(nn.Linear(6, 6), layer)
    model = px.GPipe(layers, [1, 1], devices=CPUS, chunks=chunks, checkpoint="never")
    loss = model(batch()).sum()
    state = torch.get_rng_state()
    with pytest.raises(ExecutionError, match=message):
        loss.backward(create_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_leaves_that_changed_since_the_forward() -> None:
    model = px.GPipe(sequential("dense"), [2, 2], devices=CPUS, chunks=2)
    x = batch(requires_grad=True)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ExecutionError, match=r"an input of GPipe, of shape \(8, 6\), was changed"):
        loss.backward(retain_graph=True)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(ExecutionError, match=r"a parameter of GPipe.* before the optimizer's step"):
        loss.backward()
