"""Stages that `torch.compile` has compiled, against the same stages without."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_choice import EVERY_CASE, covering
from parity import lowered
from small_pipelines import assert_same, cut, data, dense, mse, pipeline
from split_models import WORDS, Block, Language, Residual
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import pipeexec as px
from pipeexec.stages.activations import ActivationCounter, ActivationMeter
from pipeexec.stages.stage import Stage
from pipesim.errors import ArgumentError, SplitBackwardWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.slow,
]


class Backend:
    """Counts the runs of compiled graphs; runs them as they are."""

    def __init__(self) -> None:
        self.n_runs = 0

    def __deepcopy__(self, _: object) -> Backend:
        return self  # copies of stages have copies of their options

    def __call__(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.n_runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


class Layers(nn.Module):
    """Two layers and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(torch.tanh(self.first(x))))


def layers(dropout: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layers(dropout) for _ in range(2)]


def in_place(stages: list[nn.Module], backend: Any) -> list[nn.Module]:
    for stage in stages:
        stage.compile(backend=backend)
    return stages


def wrapped(stages: list[nn.Module], backend: Any) -> list[nn.Module]:
    return [torch.compile(stage, backend=backend) for stage in stages]


ways = pytest.mark.parametrize("compile", [in_place, wrapped])


@pytest.mark.parametrize(
    ("compile", "schedule", "recompute", "dropout"),
    covering((way, *row) for way in (in_place, wrapped)
             for row in (("1f1b", "never", 0.0), ("1f1b", "never", 0.5), ("gpipe", "always", 0.5),
                         ("zb_h1", "never", 0.5))),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::pipesim.errors.SplitBackwardWarning")
def test_compiled_stages_train_as_others(
    schedule: str, recompute: Any, dropout: float, compile: Any, backend: Backend
) -> None:
    """They run compiled from the first step; dropout draws the same numbers."""
    graph, expected = lowered(schedule, 2, 3, recompute=recompute), layers(dropout)
    stages = layers(dropout)
    with pipeline(expected, graph) as subject:
        losses = [subject.step(*data(12)).loss for _ in range(2)]
    with pipeline(compile(stages, backend), graph) as subject:
        n_runs = []
        for loss in losses:
            assert torch.equal(subject.step(*data(12)).loss, loss)
            n_runs.append(backend.n_runs)
    assert_same(stages, expected)
    n_forwards = 2 * 3 * (2 if recompute == "always" else 1)
    assert n_runs == [n_forwards, 2 * n_forwards]


def test_split_backwards_of_compiled_stages_warn(backend: Backend) -> None:
    """I computes all gradients, so that times of I and W are no split ones."""
    for compile in (in_place, wrapped):
        with pytest.warns(SplitBackwardWarning, match="stage 0, 1: torch computes all gradients"):
            pipeline(compile(layers(0.0), backend), lowered("zb_h1", 2, 3)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SplitBackwardWarning)
        pipeline(layers(0.0), lowered("zb_h1", 2, 3)).close()
        for compile in (in_place, wrapped):
            pipeline(compile(layers(0.0), px.SplitBackward()), lowered("zb_h1", 2, 3)).close()
        pipeline(in_place(layers(0.0), backend), lowered("1f1b", 2, 3)).close()


# Backwards that `px.SplitBackward` cuts


class Feed(nn.Module):
    """A norm and two layers; backwards compute what is between them again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.norm(x))
        return x + self.second(checkpoint(lambda h: h * torch.sigmoid(h), h, use_reentrant=False))


class Twice(nn.Module):
    """A layer that two compiled graphs use, and parameters whose gradients are the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shift, self.other = (nn.Parameter(torch.randn(4, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.shift + self.other
        torch._dynamo.graph_break()
        return self.layer(torch.tanh(x))


@pytest.mark.parametrize(
    "schedule", ["zb_h1", "zbv", "dualpipev", "interleaved_zb"][:: 1 if EVERY_CASE else 2]
)
def test_split_backwards_train_as_the_unsplit_model(schedule: str) -> None:
    """Nothing is compiled after the first step."""
    torch.manual_seed(0)
    graph = lowered(schedule, 2, 4)
    model = nn.Sequential(*(Feed() for _ in range(graph.n_stages)))
    whole, inputs, targets = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    loss = mse(whole(inputs), targets)
    loss.backward()
    n_graphs = []
    backend = px.SplitBackward("aot_eager")
    with pipeline(wrapped(list(model), backend), graph, timeout=None) as subject:
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(subject.step(inputs, targets).loss, loss)
            n_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert n_graphs[0] == n_graphs[1]
    for p, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)


def split_backward(
    compiled: nn.Module, module: nn.Module, index: int, tolerance: float = 1e-6
) -> tuple[list[int], set[str]]:
    """Run two micro-batches of a stage as I and W, and compare with the module's own gradients.

    Returns the bytes that the stage holds after both F, both I and both W, and the names of the
    parameters that have gradients after I.
    """
    stage = Stage(compiled, index, torch.device("cpu"), ActivationCounter())
    stage.meter = meter = ActivationMeter(list(compiled.parameters()))
    inputs, gradients = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    held = []
    for x, m in zip(inputs, range(2), strict=True):
        stage.forward(m, (x,), 0, False, True)
    held.append(meter.current)
    own = [stage.input_grad(m, (gradients[m],))[0] for m in range(2)]
    held.append(meter.current)
    names = {name for name, p in module.named_parameters() if p.grad is not None}
    for m in range(2):
        stage.weight_grad(m)
    held.append(meter.current)
    whole = copy.deepcopy(module)
    whole.zero_grad()
    leaves = inputs.clone().requires_grad_()
    for m in range(2):
        whole(leaves[m]).backward(gradients[m])
    if index:
        torch.testing.assert_close(torch.stack(own), leaves.grad, atol=tolerance, rtol=tolerance)
    for p, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, atol=tolerance, rtol=tolerance)
    return held, names


@pytest.mark.parametrize("index", [0, 1])
def test_weight_gradients_are_left_to_w(index: int) -> None:
    """I keeps as much for W as without a compiler; norms, whose sums would hold more, are I's."""
    held, names = split_backward(eager := Feed(), eager, index)
    module = Feed()
    compiled = torch.compile(module, backend=px.SplitBackward("aot_eager"))
    own, own_names = split_backward(compiled, module, index)
    assert own[1:] == held[1:]
    assert held[2] == 0
    assert own_names == names == {"norm.weight", "norm.bias"}


def test_inductor_compiles_both_parts() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))  # no C++
    compiled = torch.compile(module, backend=px.SplitBackward())
    assert split_backward(compiled, module, 1, 1e-5)[1] == set()


@pytest.mark.parametrize("module", [Twice(), nn.Conv1d(4, 4, 3, padding=1)])
def test_w_computes_all_gradients_of_parameters(module: nn.Module) -> None:
    """They are no views of each other, nor of the gradient of the output."""
    compiled = torch.compile(module, backend=px.SplitBackward("aot_eager"))
    assert split_backward(compiled, module, 1)[1] == set()


def test_backwards_that_cannot_be_cut() -> None:
    """I computes all: of dynamic shapes, which a warning says, and of parameters with hooks."""
    module = Feed()
    everything = {name for name, _ in module.named_parameters()}
    compiled = torch.compile(module, backend=px.SplitBackward("aot_eager"), dynamic=True)
    with pytest.warns(SplitBackwardWarning, match="of 6 parameters cannot be cut.*dynamic"):
        assert split_backward(compiled, module, 1)[1] == everything
    module = Feed()
    compiled = torch.compile(module, backend=px.SplitBackward("aot_eager"), dynamic=False)
    module.first.weight.register_hook(lambda gradient: gradient)
    assert split_backward(compiled, module, 1)[1] == everything
    with pytest.raises(Exception, match=r"takes no mode of torch\.compile"):
        torch.compile(Feed(), backend=px.SplitBackward(), mode="max-autotune")(torch.ones(4, 8))


def test_replicas_of_compiled_stages(backend: Backend) -> None:
    """Copies of a wrapped stage are compiled; those of one compiled in place would not be."""
    graph = lowered("1f1b", 2, 2, n_replicas=2)
    with pipeline(wrapped(layers(0.0), backend), graph) as subject:
        subject.step(*data(12))
        assert backend.n_runs == 2 * 2 * 2
    with pytest.raises(ArgumentError, match=r"stage 0 .* give torch.compile\(stage\) instead"):
        pipeline(in_place(layers(0.0), backend), graph)


@ways
def test_evaluation_and_prediction(compile: Any, backend: Backend) -> None:
    """They run compiled; names of the state have no trace of it."""
    graph, expected = lowered("1f1b", 2, 2), layers(0.5)
    with pipeline(expected, graph) as subject:
        output, names = subject.predict(data(8)[0]), set(subject.state_dict())
    with pipeline(compile(layers(0.5), backend), graph) as subject:
        assert torch.equal(subject.predict(data(8)[0]), output)
        torch.testing.assert_close(subject.evaluate(*data(8)).loss, mse(output, data(8)[1]))
        assert set(subject.state_dict()) == names
    assert backend.n_runs == 2 * 2 * 2


# Stages of split models

BATCH = torch.arange(24).reshape(4, 6) % WORDS


class Words(nn.Module):
    """An embedding and blocks of one layer, which are compiled sooner than those of `Language`."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, WORDS)])

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def word_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("way", ["modules", "graph"])
def test_blocks_of_split_models(way: Any, backend: Backend) -> None:
    """Each block is compiled, in copies of the stage too; the names of the state stay."""
    torch.manual_seed(0)
    model = Words()
    whole = copy.deepcopy(model)
    stages = px.split(model, 2, sample=BATCH, way=way)
    for stage in stages:
        assert stage is not None
        stage.compile(backend=backend)
    graph = lowered("1f1b", 2, 2, n_replicas=2)
    with pipeline(stages, graph, word_loss, timeout=None) as subject:  # compiles in the step
        result = subject.step(BATCH, BATCH)
        assert backend.n_runs >= 3 * 2 * 2  # compiled modules, micro-batches and replicas
        assert set(subject.state_dict()) == set(whole.state_dict())
    loss = word_loss(whole(BATCH), BATCH)
    loss.backward()
    torch.testing.assert_close(result.loss, loss)
    own = dict(model.named_parameters())
    for name, p in whole.named_parameters():
        torch.testing.assert_close(own[name].grad, p.grad)


def test_blocks_that_are_containers(backend: Backend) -> None:
    """Torch compiles no code of containers, so their parts are compiled."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 8, 8)
    stages = px.split(Residual(), 2, sample=images)
    for stage in stages:
        assert stage is not None
        stage.compile(backend=backend)
    with pipeline(stages, lowered("1f1b", 2, 2), mse) as subject:
        subject.step(images, torch.zeros(4, 5))
    assert backend.n_runs >= 4 * 2


@pytest.mark.parametrize("compile", ["in place", "wrapped", "a block's part"])
def test_compiled_models_cannot_be_split(compile: str, backend: Backend) -> None:
    model = Language(2)
    if compile == "in place":
        model.compile(backend=backend)
    elif compile == "wrapped":
        model.blocks[1] = torch.compile(Block(), backend=backend)
    else:
        model.blocks[1].mlp.compile(backend=backend)
    with pytest.raises(ArgumentError, match=r"compiled.*then compile each stage"):
        px.split(model, 2, sample=BATCH)


@pytest.mark.parametrize("compile", [in_place, wrapped])
def test_aot_autograd_gives_equal_gradients(compile: Any, backend: Backend) -> None:
    """To rounding; the backward is compiled too."""
    model = dense(4)
    expected = copy.deepcopy(model)
    stages = compile(cut(model, [2, 2]), "aot_eager")
    graph = lowered("1f1b", 2, 3, recompute="always")
    with pipeline(cut(expected, [2, 2]), graph) as subject:
        loss = subject.step(*data(12)).loss
    with pipeline(stages, graph) as subject:
        torch.testing.assert_close(subject.step(*data(12)).loss, loss)
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)
