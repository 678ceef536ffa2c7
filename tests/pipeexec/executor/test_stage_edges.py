"""Pipelines whose stages are a graph train as the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import mse, pipeline
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError

#: Two encoders feed stage 2, and the first, of two outputs, feeds stage 3 too.
EDGES = [(0, 2), (0, 3), (1, 2), (2, 3), (3, 4)]
N_OUTPUTS = (2, 1, 1, 2, 1)
IMAGES, SOUND, TARGETS = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
INPUTS = {0: IMAGES, 1: {"sound": SOUND, "scale": 0.5}}


class Mix(nn.Module):
    """Takes outputs of other stages side by side, so that their order counts."""

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        self.linear, self.n_outputs = nn.Linear(4 * n_inputs, 4 * n_outputs), n_outputs

    def forward(self, *inputs: Tensor) -> Any:
        y = torch.tanh(self.linear(torch.cat(inputs, -1)))
        return y if self.n_outputs == 1 else y.chunk(self.n_outputs, -1)


class Audio(Mix):
    """An encoder that takes arguments by name."""

    def forward(self, sound: Tensor, scale: float) -> Any:  # type: ignore[override]
        return super().forward(sound * scale)


def modules() -> list[nn.Module]:
    """Return the stages, always with the same parameters."""
    torch.manual_seed(0)
    n_inputs = [1, 1, 3, 3, 2]
    kinds = [Audio if stage == 1 else Mix for stage in range(5)]
    return [
        kind(n, N_OUTPUTS[stage])
        for stage, (kind, n) in enumerate(zip(kinds, n_inputs, strict=True))
    ]


def unsplit(model: list[nn.Module]) -> Tensor:
    outputs: list[tuple[Tensor, ...]] = []
    for stage, module in enumerate(model):
        own = [x for a, b in EDGES if b == stage for x in outputs[a]]
        y = module(**INPUTS[1]) if stage == 1 else module(*(own or [IMAGES]))
        outputs.append(y if isinstance(y, tuple) else (y,))
    return outputs[-1][0]


def expected() -> tuple[Tensor, list[Tensor]]:
    """Return output and loss, and the gradient of each parameter."""
    model = modules()
    output = unsplit(model)
    loss = mse(output, TARGETS)
    parameters = [p for module in model for p in module.parameters()]
    return output.detach(), [loss.detach(), *torch.autograd.grad(loss, parameters)]


def graph(*paths: list[int], m: int = 3, split: bool = False, **options: Any) -> ps.TaskGraph:
    placement = ps.Placement(*paths, edges=EDGES)
    return ps.lower(ps.order_by(placement, m, split_backward=split), **options)


def assert_close(own: list[Tensor], its: list[Tensor]) -> None:
    for a, b in zip(own, its, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("subject", "replicas"),
    [
        (graph([0, 1, 2, 3, 4]), 1),
        (graph([0, 1, 2, 0, 1], split=True), 1),
        (graph([0, 0, 0, 0, 0], split=True, recompute="always"), 1),
        (graph([0, 1, 0, 1, 0], recompute="always", n_replicas=2), 2),
        (graph([0, 1, 3, 4, 4], [2, 1, 3, 4, 4], split=True), 1),
        (graph([0, 1, 2, 3, 3], [0, 1, 4, 5, 5], recompute="always"), 1),
        (graph([0, 2, 0, 1, 1], [1, 2, 1, 0, 0], [3, 2, 0, 1, 1], split=True, m=7), 1),
    ],
    ids=[
        "apart",
        "colocated and split",
        "one device",
        "replicas",
        "replicas of an encoder",
        "replicas after encoders",
        "replicas of both",
    ],
)
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_steps_are_those_of_the_unsplit_model(subject: ps.TaskGraph, replicas: int) -> None:
    model, (output, its) = modules(), expected()
    with pipeline(model, subject, mse) as pipe:
        for _ in range(2):  # a result that one step leaves would reach the next
            for module in model:
                module.zero_grad()
            loss = pipe.step(INPUTS, TARGETS).loss
            assert_close([loss, *(p.grad for m in model for p in m.parameters())], its)
        assert_close([pipe.evaluate(INPUTS, TARGETS).loss], its[:1])
        assert_close([pipe.predict(dict(reversed(INPUTS.items())))], [output])


class Skip(nn.Sequential):
    """Two layers, and the input beside the second."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self[0](x)) * x + self[1](x)


class Pair(Skip):
    """Two layers, and a second input between them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self[1](torch.tanh(self[0](x)) + y)


def test_an_encoder_before_a_split_model_trains() -> None:
    """Both stages of the split return gradients of its input to the encoder."""
    model, encoder = Skip(), Mix(1, 1)
    loss = mse(model(encoder(IMAGES)), TARGETS)
    its = [loss.detach(), *torch.autograd.grad(loss, list(encoder.parameters()))]
    cut = px.split(model, 2, sample=IMAGES[:2].clone().requires_grad_(), check=False)
    with pipeline([encoder, *cut], ps.lower(ps.schedule("zb_h1", 3, 3)), mse) as pipe:
        own = [pipe.step(IMAGES, TARGETS).loss]
    assert_close([*own, *(p.grad for p in encoder.parameters())], its)


def test_an_encoder_whose_gradients_would_be_lost_is_refused() -> None:
    """The sample requires gradients of one input, and the encoder returns two."""
    sample = IMAGES[:2].clone().requires_grad_(), SOUND[:2]
    cut = px.split(Pair(), 2, sample=sample, check=False)
    order = ps.lower(ps.schedule("1f1b", 3, 3))
    message = "does not return gradients of all its inputs, and stage 0 .* all of whose floating"
    with pytest.raises(ArgumentError, match=message):
        pipeline([Mix(1, 2), *cut], order, mse)


def of_rank(processes: Processes, paths: list[list[int]]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Return the loss, and the gradients of the stages of this process."""
    subject = graph(*paths, split=True)
    model: list[Any] = modules()
    own = sorted({s for path in paths for s in range(5) if path[s] == processes.rank})
    listed = [module if stage in own else None for stage, module in enumerate(model)]
    inputs = {stage: INPUTS[stage] for stage in own if stage in INPUTS} or None
    targets = TARGETS if processes.rank == paths[0][4] else None
    with px.Pipeline(listed, subject, ["cpu"], mse, processes=processes) as pipe:
        result = pipe.gather(pipe.step(inputs, targets))
        pipe.evaluate(inputs, targets)
        return result.loss, {s: [p.grad for p in model[s].parameters()] for s in own}


@pytest.mark.parametrize(
    "paths",
    [[[0, 1, 0, 1, 0]], [[0, 1, 0, 1, 0], [1, 1, 0, 1, 0]], [[0, 0, 0, 1, 1], [0, 0, 1, 0, 1]]],
    ids=["one path", "replicas of an encoder", "replicas after encoders"],
)
def test_over_processes(two_ranks: Ranks, paths: list[list[int]]) -> None:
    """Each process gives the inputs of its own stages; copies of a stage have one gradient."""
    _, its = expected()
    (loss, first), (_, second) = two_ranks.run(of_rank, paths=paths)
    for gradients in (second | first, first | second):
        assert_close([loss, *(x for stage in range(5) for x in gradients[stage])], its)


def test_costs_and_predictions() -> None:
    """A profile has the bytes of all outputs, also of those that no next stage takes."""
    subject = graph([0, 1, 0, 1, 0])
    with pipeline(modules(), subject, mse, torch.optim.SGD) as pipe:
        costs = px.profile(pipe, INPUTS, TARGETS, n_steps=1, warm_up=0)
    assert costs.output_bytes == (64, 32, 32, 64, 0)  # of 2 samples
    assert ps.simulate(subject, costs).makespan > 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (IMAGES, "stages 0, 1 have no stage before them.*give inputs={0: ..., 1: ...}, got Tensor"),
        ({0: IMAGES, 2: SOUND}, r"got \[0, 2\]"),
        ({0: IMAGES}, r"inputs\[1\] have no tensors, but this process has stage 1"),
        ({0: IMAGES, 1: SOUND[:5]}, r"inputs\[1\] has shape \(5, 4\)"),
    ],
)
def test_inputs_that_are_refused(inputs: Any, message: str) -> None:
    with pipeline(modules(), graph([0, 1, 0, 1, 0]), mse) as pipe:
        for call in (pipe.step, pipe.check_batch, pipe.evaluate):
            with pytest.raises(ArgumentError, match=message):
                call(inputs, TARGETS)


def test_stages_that_are_refused() -> None:
    model: list[nn.Module] = [*modules()[:2], nn.Linear(4, 4), *modules()[3:]]
    with pytest.raises(ArgumentError, match=r"stage 2 has edges from stages 0, 1.* takes 1"):
        pipeline(model, graph([0, 1, 0, 1, 0]), mse)
    cut = px.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, sample=IMAGES)
    with pytest.raises(ArgumentError, match=r"stage 0 before it .* with a sample all of whose"):
        pipeline([Mix(1, 1), *cut], ps.lower(ps.schedule("1f1b", 3, 2)), mse)
    fed = ps.lower(ps.order_by(ps.Placement([0, 1, 1], edges=[(0, 1), (0, 2), (1, 2)]), 2))
    with pytest.raises(
        ArgumentError, match=r"stage 1 is the first of a model cut .* stage 0 before"
    ):
        pipeline([Mix(1, 1), cut[0], Mix(2, 1)], fed, mse)
    losses = ps.Placement([0, 1, 1], edges=[(0, 1), (0, 2)])
    with pytest.raises(ArgumentError, match=r"stage 1 .* no edge from it.* such as \(1, 2\)"):
        pipeline(modules()[:3], ps.lower(ps.order_by(losses, 2)), mse)
    with pipeline(modules(), graph([0, 1, 0, 1, 0]), mse) as pipe:
        chain = ps.lower(ps.order_by(ps.Placement([0, 1, 0, 1, 0]), 3))
        with pytest.raises(ArgumentError, match=r"edges \[\], this pipeline"):
            pipe.with_graph(chain)
