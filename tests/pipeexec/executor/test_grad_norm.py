"""Clipping by the norm of all gradients, and tied parameters, against the unsplit model in torch.

The model is an embedding, layers, and a head whose matrix may be the embedding's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.executor import StepResult
from pipesim.errors import ArgumentError, StageError
from pipesim.ops import Op

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

WORDS, WIDTH = 11, 8
MAX_NORM = 0.5


class Embedding(nn.Module):
    """An embedding of words."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)


class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Head(nn.Module):
    """A head without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def stages_of(n: int, *, tied: bool, sparse: bool = False) -> list[nn.Module]:
    """Return ``n`` stages; the first and the last have equal matrices if they are tied."""
    torch.manual_seed(0)
    stages = [Embedding(sparse=sparse), *(Layer() for _ in range(n - 2)), Head()]
    if tied:
        stages[-1].head.weight.data.copy_(stages[0].embedding.weight.data)
    return stages


def batch(n: int = 8, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, WORDS, (n,), generator=generator) for _ in range(2))


def names_of(n: int) -> list[list[tuple[int, str]]]:
    return [[(0, "embedding.weight"), (n - 1, "head.weight")]]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return 5 * nn.functional.cross_entropy(output, target)


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Words of an even number count."""
    counts = target % 2 == 0
    losses = nn.functional.cross_entropy(output, target, reduction="none")
    return 5 * (losses * counts).sum(), counts.sum()


class Whole(NamedTuple):
    """Losses, norms and final weights of the unsplit model."""

    losses: list[Tensor]
    norms: list[Tensor]
    weights: list[Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def train_whole(
    n: int, n_steps: int, loss_fn: Any, *, tied: bool, max_norm: float, sparse: bool = False
) -> Whole:
    stages = stages_of(n, tied=tied, sparse=sparse)
    if tied:
        stages[-1].head.weight = stages[0].embedding.weight
    model = nn.Sequential(*stages)
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for step in range(n_steps):
        inputs, targets = batch(step=step)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        losses.append(loss.detach())
    return Whole(losses, norms, [p.detach() for s in stages for p in s.parameters()])


def assert_equals_whole(
    schedule: ps.Schedule, loss_fn: Any = mean_loss, *, tied: bool = True, **options: Any
) -> None:
    """Losses, norms and weights of three steps are those of the unsplit model, to rounding."""
    n = schedule.n_stages
    whole = train_whole(n, 3, loss_fn, tied=tied, max_norm=MAX_NORM)
    assert max(whole.norms) > MAX_NORM  # it clips
    stages = stages_of(n, tied=tied)
    groups = {"tied": [(0, n - 1)]} if tied else {}
    graph = ps.lower(schedule, grad_norm=True, **groups, **options)
    names = {"tied": names_of(n)} if tied else {}
    with px.Pipeline(
        stages, graph, ["cpu"] * graph.n_devices, loss_fn, sgd, max_grad_norm=MAX_NORM, **names
    ) as pipeline:
        for step in range(3):
            result = pipeline.step(*batch(step=step))
            torch.testing.assert_close(result.loss, whole.losses[step])
            torch.testing.assert_close(result.grad_norm, whole.norms[step])
            if tied:
                assert torch.equal(stages[0].embedding.weight, stages[-1].head.weight)
    assert result.timeline.complete
    assert_weights(stages, whole.weights)


def assert_weights(stages: Sequence[nn.Module], weights: Sequence[Tensor]) -> None:
    for parameter, weight in zip(
        (p for stage in stages for p in stage.parameters()), weights, strict=True
    ):
        torch.testing.assert_close(parameter.detach(), weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p", "options"),
    [
        ("gpipe", 3, {}),
        ("1f1b", 3, {"recompute": "always", "overlap": False}),
        ("interleaved_1f1b", 2, {}),
        ("zb_h1", 3, {}),
        ("zbv", 2, {}),
        ("chimera", 2, {}),
        ("1f1b", 3, {"n_replicas": 2}),
        ("1f1b", 2, {"n_replicas": 2, "grad_sync": "every", "layout": "stage_major"}),
        ("gpipe", 2, {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_steps_equal_those_of_torch(name: str, p: int, options: Any, tied: bool) -> None:
    """Clipped as torch.nn.utils.clip_grad_norm_ does, and tied copies stay equal to the bit."""
    m = 4 if "n_replicas" not in options else 2
    assert_equals_whole(ps.schedule(name, p, m), tied=tied, **options)


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_counts_of_the_loss(n_replicas: int) -> None:
    """The norm is that of the gradients that are divided by the count."""
    assert_equals_whole(ps.schedule("1f1b", 2, 2), counted_loss, n_replicas=n_replicas)


def run(
    stages: list[nn.Module], graph: ps.TaskGraph, optimizer: Any = sgd, **options: Any
) -> StepResult:
    with px.Pipeline(
        stages, graph, ["cpu"] * graph.n_devices, mean_loss, optimizer, **options
    ) as pipeline:
        return pipeline.step(*batch())


def lowered(**options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("gpipe", 2, 2), **options)


def test_reported_without_clipping() -> None:
    """Weights are those of a step without the norm."""
    stages, others = stages_of(2, tied=False), stages_of(2, tied=False)
    whole = train_whole(2, 1, mean_loss, tied=False, max_norm=float("inf"))
    result = run(stages, lowered(grad_norm=True))
    torch.testing.assert_close(result.grad_norm, whole.norms[0])
    graph = result.timeline.graph
    assert result.timeline.nbytes[graph.op == Op.GRAD_NORM].tolist() == [8, 8]
    assert run(others, lowered()).grad_norm is None
    assert_weights(stages, [p.detach() for stage in others for p in stage.parameters()])


def test_sparse_gradients() -> None:
    """Rows of an embedding that occur twice are summed before they are squared."""
    stages = stages_of(2, tied=False, sparse=True)
    result = run(stages, lowered(grad_norm=True), _plain, max_grad_norm=MAX_NORM)
    dense = stages_of(2, tied=False)
    expected = run(dense, lowered(grad_norm=True), _plain, max_grad_norm=MAX_NORM)
    torch.testing.assert_close(result.grad_norm, expected.grad_norm)
    assert_weights(stages, [p.detach() for stage in dense for p in stage.parameters()])


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


class Broken(nn.Module):
    """A layer whose gradient is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(lambda g: g * float("nan"))
        return x + 0 * y.detach() + (y - y.detach())


def test_nan_in_the_norm() -> None:
    """No optimizer has stepped, and the stages are named; unless the norm may be NaN."""
    stages = stages_of(2, tied=False)
    stages[0].add_module("broken", Broken())
    stages[0].forward = lambda x: stages[0].broken(stages[0].embedding(x))  # type: ignore[method-assign]
    before = [p.detach().clone() for stage in stages for p in stage.parameters()]
    with pytest.raises(
        StageError, match=r"norm of the gradients is nan: gradients of stage 0 are not finite; no"
    ):
        run(stages, lowered(grad_norm=True))
    assert_weights(stages, before)
    result = run(stages, lowered(grad_norm=True), max_grad_norm=1.0, error_if_nonfinite=False)
    assert result.grad_norm is not None
    assert result.grad_norm.isnan()
    assert stages[1].head.weight.isnan().any()


def test_no_gradients() -> None:
    """As in torch, the norm of none is 0; but nothing to train is a mistake."""
    stages = stages_of(2, tied=False)
    frozen = stages_of(2, tied=False)
    for stage in frozen:
        stage.requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"max_grad_norm=1, but no parameter of any stage is"):
        run(frozen, lowered(grad_norm=True), max_grad_norm=1.0)
    stages[1].requires_grad_(False)
    assert run(stages, lowered(grad_norm=True), max_grad_norm=1.0).grad_norm > 0


@pytest.mark.parametrize(
    ("graph", "options", "message"),
    [
        ({}, {"max_grad_norm": 1.0}, "computes no norm of its gradients; lower .* grad_norm=True"),
        ({"grad_norm": True}, {"max_grad_norm": 0}, "max_grad_norm must be a positive number"),
        ({"grad_norm": True}, {"max_grad_norm": "1"}, "max_grad_norm must be a positive number"),
        ({"grad_norm": True}, {"error_if_nonfinite": 1}, "error_if_nonfinite must be True or F"),
        ({"grad_norm": True}, {"optimizer": None}, "but without an optimizer gradients add up"),
        ({}, {"tied": names_of(2)}, r"does not add; lower the schedule with tied=\[\(0, 1\)\]"),
        ({"tied": [(0, 1)]}, {}, r"the graph adds gradients of stages 0 and 1 .* tied=\[\[\(0, 'e"),
        ({"tied": [(0, 1)] * 2}, {"tied": names_of(2)}, "adds gradients of the same stages twice"),
        ({"tied": [(0, 1)]}, {"tied": [[(0, "x"), (1, "y")]]}, "tied names 'x' of stage 0, which"),
        ({"tied": [(0, 1)]}, {"tied": [[(0, "embedding.weight")]]}, "tied has the group"),
        ({"tied": [(0, 1)]}, {"tied": [(0, "embedding.weight")]}, "tied names 0"),
        ({"tied": [(0, 1)]}, {"tied": 3}, "tied must be groups such as"),
        ({"tied": [(0, 1)]}, {"tied": [[(0, "embedding.weight"), (9, "x")]]}, "tied names stage 9"),
        ({"tied": [(0, 1)]}, {"tied": names_of(2)}, "are tied, but have different values"),
    ],
)
def test_options_that_do_not_suit(graph: Any, options: Any, message: str) -> None:
    options = {"optimizer": sgd, **options}
    with pytest.raises(ArgumentError, match=message):
        run(stages_of(2, tied=False), lowered(**graph), **options)


def test_copies_of_other_shapes() -> None:
    stages = stages_of(2, tied=True)
    stages[1].head = nn.Linear(WIDTH, WORDS + 1, bias=False)
    with pytest.raises(ArgumentError, match="are tied, but have different shapes, types or flags"):
        run(stages, lowered(tied=[(0, 1)]), tied=names_of(2))


def test_one_parameter_object_in_two_stages_is_refused() -> None:
    """The error names the way out."""
    stages = stages_of(2, tied=True)
    stages[1].head.weight = stages[0].embedding.weight
    with pytest.raises(ArgumentError, match=r"share the parameter .* and lower with tied=\[\(0, 1"):
        run(stages, lowered(tied=[(0, 1)]), tied=names_of(2))


@pytest.mark.parametrize("loss_fn", [mean_loss, counted_loss])
def test_tied_gradients_add_up_over_steps(loss_fn: Any) -> None:
    """Without an optimizer, each copy holds the sum of the gradients of all steps."""
    model = nn.Sequential(*stages_of(2, tied=True))
    model[1].head.weight = model[0].embedding.weight
    stages, graph = stages_of(2, tied=True), lowered(tied=[(0, 1)], n_replicas=2)
    with px.Pipeline(stages, graph, ["cpu"] * 4, loss_fn, tied=names_of(2)) as pipeline:
        for step in range(3):
            inputs, targets = batch(step=step)
            pipeline.step(inputs, targets)
            loss = loss_fn(model(inputs), targets)
            (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
            torch.testing.assert_close(
                stages[0].embedding.weight.grad, model[0].embedding.weight.grad
            )
            torch.testing.assert_close(stages[1].head.weight.grad, model[0].embedding.weight.grad)


@pytest.mark.slow
def test_a_model_that_split_cuts() -> None:
    """`pipeexec.split` makes the copies and knows their names."""
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(), Layer(), Layer(), Head())
    model[-1].head.weight = model[0].embedding.weight
    whole = nn.Sequential(*stages_of(4, tied=True))
    whole.load_state_dict(model.state_dict())
    whole[-1].head.weight = whole[0].embedding.weight
    optimizer = sgd(whole.parameters())
    stages = px.split(model, 3, sample=batch()[0])
    graph = ps.lower(ps.schedule("1f1b", 3, 4), tied=stages.tied_stages, grad_norm=True)
    with px.Pipeline(stages, graph, ["cpu"] * 3, mean_loss, sgd, max_grad_norm=MAX_NORM) as p:
        for step in range(3):
            inputs, targets = batch(step=step)
            result = p.step(inputs, targets)
            optimizer.zero_grad()
            mean_loss(whole(inputs), targets).backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
            optimizer.step()
            torch.testing.assert_close(result.grad_norm, norm)
        assert p.evaluate(*batch()).grad_norm is None
    for name, value in p.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name])


def test_copies_follow_weights_that_are_loaded_between_steps() -> None:
    """Of the model, whose parameter is the first copy: before a step, and before an evaluation."""
    model = nn.Sequential(*stages_of(3, tied=True))
    model[-1].head.weight = model[0].embedding.weight
    whole = copy.deepcopy(model)
    stages = px.split(model, 2, sample=batch()[0])
    graph = ps.lower(ps.schedule("1f1b", 2, 4), tied=stages.tied_stages)
    with px.Pipeline(stages, graph, ["cpu"] * 2, mean_loss, sgd) as pipeline:
        for run_batch in (pipeline.step, pipeline.evaluate, pipeline.step):
            for parameter in whole.parameters():
                parameter.data.mul_(0.5)
            model.load_state_dict(whole.state_dict())
            expected = mean_loss(whole(batch()[0]), batch()[1])
            torch.testing.assert_close(run_batch(*batch()).loss, expected.detach())
    first, second = (stages[k].get_parameter(name) for k, name in stages.tied[0])
    assert torch.equal(first, second)


@pytest.mark.slow
def test_profile_measures_both() -> None:
    """The predicted step has both, with measured seconds."""
    stages, graph = stages_of(2, tied=True), lowered(tied=[(0, 1)], grad_norm=True)
    with (
        px.Pipeline(
            stages, graph, ["cpu"] * 2, mean_loss, sgd, tied=names_of(2), max_grad_norm=MAX_NORM
        ) as pipeline,
        pytest.warns(ps.errors.AccuracyWarning),
    ):
        costs = px.profile(pipeline, *batch(), n_steps=2, warm_up=1)
    assert costs.reduce_tied[0] > 0
    predicted = ps.simulate(graph, costs)
    lasted = predicted.duration[graph.op == Op.REDUCE_TIED]
    assert lasted == pytest.approx([costs.reduce_tied[0]] * 2)
    norms = predicted.duration[graph.op == Op.GRAD_NORM]
    assert norms.min() >= max(costs.grad_norm) * (1 - 1e-6)


# Processes


def _ranks_case(processes: Processes, layout: str, counted: bool) -> None:
    """Two replicas of two stages: each rank has a replica, or each has a stage of both."""
    loss_fn = counted_loss if counted else mean_loss
    whole = train_whole(2, 3, loss_fn, tied=True, max_norm=MAX_NORM)
    stages = stages_of(2, tied=True)
    graph = ps.lower(
        ps.schedule("1f1b", 2, 2), tied=[(0, 1)], grad_norm=True, n_replicas=2, layout=layout
    )
    by_stage = layout == "stage_major"
    own: list[nn.Module | None] = [*stages]
    if by_stage:
        own[1 - processes.rank] = None
    with px.Pipeline(
        own,
        graph,
        ["cpu"] * 2,
        loss_fn,
        sgd,
        processes=processes,
        tied=names_of(2),
        max_grad_norm=MAX_NORM,
    ) as pipeline:
        for step in range(3):
            inputs, targets = batch(step=step)
            if not by_stage:
                half = slice(4 * processes.rank, 4 * processes.rank + 4)
                inputs, targets = inputs[half], targets[half]
            result = pipeline.gather(pipeline.step(inputs, targets))
            torch.testing.assert_close(result.grad_norm, whole.norms[step])
            torch.testing.assert_close(result.loss, whole.losses[step])
            ran = result.timeline.ran[graph.op == Op.GRAD_NORM]
            assert ran.all()
    number = {id(p): k for k, p in enumerate(p for s in stages for p in s.parameters())}
    for stage in own:
        for parameter in () if stage is None else stage.parameters():
            torch.testing.assert_close(parameter.detach(), whole.weights[number[id(parameter)]])


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("layout", ["replica_major", "stage_major"])
def test_two_processes_of_two_replicas(two_ranks: Ranks, layout: str, counted: bool) -> None:
    two_ranks.run(_ranks_case, layout=layout, counted=counted)


def _nan_case(processes: Processes) -> str:
    stages: list[nn.Module | None] = [*stages_of(2, tied=False)]
    if processes.rank == 0:
        stages[0].embedding.weight.register_hook(lambda g: g * float("nan"))  # type: ignore[union-attr]
    stages[1 - processes.rank] = None
    with px.Pipeline(
        stages, lowered(grad_norm=True), ["cpu"], mean_loss, sgd, processes=processes
    ) as pipeline:
        try:
            pipeline.step(*batch())
        except ps.errors.ExecutionError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_nan_in_another_process(two_ranks: Ranks) -> None:
    """All processes name the stage."""
    for text in two_ranks.run(_nan_case):
        assert "gradients of stage 0 are not finite" in text


@pytest.mark.parametrize("loss_fn", [mean_loss, counted_loss])
def test_gradients_of_several_steps(loss_fn: Any) -> None:
    """The last of the steps that train as one adds the tied gradients, and clips by their norm."""
    whole = train_whole(2, 1, loss_fn, tied=True, max_norm=MAX_NORM)
    stages, graph = stages_of(2, tied=True), lowered(tied=[(0, 1)], grad_norm=True)
    inputs, targets = batch()
    with px.Pipeline(
        stages, graph, ["cpu"] * 2, loss_fn, sgd, tied=names_of(2), max_grad_norm=MAX_NORM
    ) as pipeline:
        first = pipeline.step(inputs[:3], targets[:3], accumulate=True)
        last = pipeline.step(inputs[3:], targets[3:])
    assert first.grad_norm is None
    torch.testing.assert_close(last.grad_norm, whole.norms[0])
    assert_weights(stages, whole.weights)
