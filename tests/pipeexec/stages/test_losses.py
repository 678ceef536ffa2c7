"""Losses that are means over an uneven number of things: the step against the unsplit model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_choice import covering
from ranks import Ranks
from small_pipelines import train_whole
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.executor import StepResult
from pipeexec.stages.loss_function import LossFunction
from pipesim.errors import ArgumentError, ExecutionError, LossWarning, StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

VOCABULARY = 7
IGNORED = -100
WEIGHTS = torch.linspace(0.1, 2.0, VOCABULARY, dtype=torch.float64)


def tokens(n_samples: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; of sample k all but k mod 6 targets are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(VOCABULARY, (2, n_samples, length), generator=generator)
    n_kept = torch.arange(n_samples)[:, None] % (length + 1)
    return x, torch.where(torch.arange(length) < n_kept, y, IGNORED)


def masked(n_samples: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x, y = tokens(n_samples)
    return x, (y.clamp(min=0), (y != IGNORED).double())


def _flat(output: Tensor, y: Tensor, **options: Any) -> Tensor:
    return cross_entropy(output.flatten(0, 1), y.flatten(), **options)


def _ignoring(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _flat(output, y, reduction="sum"), (y != IGNORED).sum()


def _weighing(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    count = (WEIGHTS[y.clamp(min=0)] * (y != IGNORED)).sum()
    return _flat(output, y, weight=WEIGHTS, reduction="sum"), count


def _masking(output: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    y, mask = targets
    losses = _flat(output, y, reduction="none").view_as(mask)
    return (losses * mask).sum(), float(mask.sum())


Loss = Callable[[Any, Any], Any]
#: A batch, the loss of the whole as torch has it, and the same as a sum and a count.
LOSSES: dict[str, tuple[Callable[[int], tuple[Any, Any]], Loss, Loss]] = {
    "ignore_index": (tokens, _flat, _ignoring),
    "class weights": (tokens, lambda o, y: _flat(o, y, weight=WEIGHTS), _weighing),
    "mask": (masked, lambda o, t: torch.divide(*_masking(o, t)), _masking),
}


def model(n_stages: int) -> list[nn.Module]:
    """Return stages with always the same weights, in double precision."""
    torch.manual_seed(1)
    layers = [nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)]
    ends = [round(k * len(layers) / n_stages) for k in range(n_stages + 1)]
    return [nn.Sequential(*layers[a:b]).double() for a, b in pairwise(ends)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def unsplit(loss_fn: Loss, x: Any, y: Any, n_steps: int) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of steps with the whole batch."""
    whole = nn.Sequential(*model(1))
    return train_whole(whole, sgd(whole.parameters()), loss_fn, x, y, n_steps)


def weights(stages: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach() for stage in stages for p in stage.parameters()]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


GRAPHS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpipe", 4, {"recompute": "always"}),
    ("1f1b", 4, {}),
    ("zb_h1", 4, {}),
    ("zbv", 4, {"recompute": "except_last"}),
    ("chimera", 4, {}),
    ("1f1b", 2, {"n_replicas": 2}),
    ("1f1b", 2, {"n_replicas": 2, "grad_sync": "every"}),
    ("1f1b", 2, {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "n_microbatches", "options", "name"),
    covering((*graph, name) for graph in GRAPHS for name in LOSSES),
)
def test_steps_are_those_of_the_whole_batch(
    schedule: str, n_microbatches: int, options: dict[str, Any], name: str
) -> None:
    """Eleven samples in four micro-batches, all of whose targets may be ignored."""
    batch, mean, counted = LOSSES[name]
    x, y = batch(11)
    losses, expected = unsplit(mean, x, y, 2)
    graph = ps.lower(ps.schedule(schedule, 2, n_microbatches), **options)
    stages = model(graph.n_stages)
    with (
        px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, counted, sgd) as pipeline,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", LossWarning)
        results = [pipeline.step(x, y) for _ in range(2)]
    assert [float(r.loss) for r in results] == pytest.approx(losses, rel=1e-12)
    assert_equal(weights(stages), expected)


@pytest.mark.parametrize(("schedule", "step"), [("1f1b", "flush"), ("gpipe", "none")])
def test_without_an_optimizer_gradients_add_up(schedule: str, step: Any) -> None:
    x, y = tokens(11)
    whole = nn.Sequential(*model(1))
    graph = ps.lower(ps.schedule(schedule, 2, 4), step=step)
    stages = model(2)
    with px.Pipeline(stages, graph, ["cpu"] * 2, _ignoring) as pipeline:
        for sign in (1, -1):
            _flat(whole(x), sign * y if sign > 0 else y.flip(0)).backward()
            pipeline.step(x, y if sign > 0 else y.flip(0))
    gradients = [p.grad for stage in stages for p in stage.parameters()]
    assert_equal(gradients, [p.grad for p in whole.parameters()])  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("optimizer", [None, sgd])
def test_each_mini_batch_is_divided_by_its_own_count(schedule: str, optimizer: Any) -> None:
    """The first mini-batch's gradients, which the first weights give in both schedules."""
    x, y = tokens(12)
    options = {"n_batches": 2} if schedule == "pipedream_2bw" else {}
    n_microbatches = 4 if options else 2
    graph = ps.lower(ps.schedule(schedule, 2, n_microbatches, **options))
    stages = model(2)
    with px.Pipeline(stages, graph, ["cpu"] * 2, _ignoring, optimizer) as pipeline:
        result = pipeline.step(x, y)
    if optimizer is None:
        whole = nn.Sequential(*model(1))
        losses = [_flat(whole(x[half]), y[half]) for half in (slice(6), slice(6, 12))]
        torch.stack(losses).sum().backward()
        gradients = [p.grad for stage in stages for p in stage.parameters()]
        assert_equal(gradients, [p.grad for p in whole.parameters()])  # type: ignore[arg-type]
        assert float(result.loss) == pytest.approx(float(torch.stack(losses).detach().mean()))
    else:
        first = float(torch.stack(result.losses[: n_microbatches // 2]).sum())
        assert first == pytest.approx(unsplit(_flat, x[:6], y[:6], 1)[0][0], rel=1e-12)


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_each_step_of_several_is_divided_by_its_own_count(n_replicas: int) -> None:
    """PipeDream on one stage: one mini-batch after the other, each over all replicas."""
    x, y = tokens(11)
    graph = ps.lower(ps.schedule("pipedream", 1, 2), n_replicas=n_replicas)
    (stage,), (whole,) = model(1), model(1)
    with px.Pipeline([stage], graph, ["cpu"] * n_replicas, _ignoring, sgd) as pipeline:
        result = pipeline.step(x, y)
    optimizer, losses = sgd(whole.parameters()), []
    parts = torch.arange(11).tensor_split(2 * n_replicas)
    for samples in (torch.cat(parts[first::2]) for first in range(2)):
        optimizer.zero_grad()
        loss = _flat(whole(x[samples]), y[samples])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert float(result.loss) == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert_equal(weights([stage]), weights([whole]))


def _steps(
    processes: Processes, name: str, schedule: str, n_replicas: int = 1, **options: Any
) -> tuple[list[float], list[Tensor]]:
    """Run two steps of a pipeline, of which this process has a part; return losses, weights."""
    batch, _, counted = LOSSES[name]
    x, y = batch(11)
    graph = ps.lower(ps.schedule(schedule, 2 // n_replicas, 4 // n_replicas),
                     n_replicas=n_replicas, **options)  # fmt: skip
    torch.manual_seed(0)
    stages = model(graph.n_stages)
    if n_replicas > 1:
        share = slice(6) if processes.rank == 0 else slice(6, 11)
        x = x[share]
        y = tuple(z[share] for z in y) if isinstance(y, tuple) else y[share]
    with px.Pipeline(stages, graph, ["cpu"], counted, sgd, processes=processes) as pipeline:
        results = [pipeline.gather(pipeline.step(x, y)) for _ in range(2)]
        own = weights([m for m in pipeline.modules if any(True for _ in m.parameters())])
    return [float(r.loss) for r in results], own


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "name": "ignore_index"},
        {"schedule": "zbv", "name": "class weights"},
        {"schedule": "1f1b", "name": "mask", "n_replicas": 2},
        {"schedule": "gpipe", "name": "ignore_index", "n_replicas": 2, "grad_sync": "every"},
    ],
)
def test_two_processes(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """Stages, or replicas, of two processes, of which one may not know the loss."""
    batch, mean, _ = LOSSES[options["name"]]
    losses, expected = unsplit(mean, *batch(11), 2)
    results = two_ranks.run(_steps, **options)
    for rank_losses, _ in results:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
    if "n_replicas" in options:
        for _, own in results:
            assert_equal(own, expected)
    else:
        every = sorted((p for _, own in results for p in own), key=lambda p: p.numel())
        assert_equal([p.sum() for p in every],
                     [p.sum() for p in sorted(expected, key=lambda p: p.numel())])  # fmt: skip


def _ddp_steps(processes: Processes) -> list[Tensor]:
    x, y = (z.tensor_split(2)[processes.rank] for z in tokens(11))
    stages = [DistributedDataParallel(stage, process_group=dist.new_group()) for stage in model(2)]
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(stages, graph, ["cpu"] * 2, _ignoring, sgd) as pipeline:
        for _ in range(2):
            pipeline.step(x, y)
    return weights(stages)


def test_replicas_of_distributed_data_parallel(two_ranks: Ranks) -> None:
    """Each process knows its own count; gradients are divided by the mean of them."""
    _, expected = unsplit(_flat, *tokens(11), 2)
    for own in two_ranks.run(_ddp_steps):
        assert_equal(own, expected)


def one_step(
    loss_fn: Loss, x: Any, y: Any, **options: Any
) -> tuple[StepResult, list[warnings.WarningMessage]]:
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with (
        px.Pipeline(model(2), graph, ["cpu"] * 2, loss_fn, **options) as pipeline,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        result = pipeline.step(x, y)
        pipeline.step(x, y)
    return result, [w for w in caught if w.category is LossWarning]


def _even(output: Tensor, y: Tensor) -> Tensor:
    return _flat(output, y.clamp(min=0))


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (_flat, {}),
        (lambda o, y: _flat(o, y, weight=WEIGHTS), {}),
        (lambda o, y: _flat(o - o.detach(), y), {}),  # equal losses, other gradients
        (lambda o, y: _even(o, y) * len(y), {}),
        (_even, {"loss_reduction": "sum"}),
        (lambda o, y: (_flat(o, y, reduction="sum"), 1), {}),
        (lambda o, y: (_even(o, y), (o.argmax(-1) == y).double().mean()), {}),
    ],
    ids=["ignored", "class weights", "equal losses", "sum", "mean", "constant count", "accuracy"],
)
def test_losses_that_do_not_combine_are_warned_of(loss_fn: Loss, options: dict[str, Any]) -> None:
    x, y = tokens(11)
    _, caught = one_step(loss_fn, x, y, **options)
    assert len(caught) == 1, "once, in the first step"
    assert "(sum, count)" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (_even, {}),
        (lambda o, y: _even(o, y) * len(y), {"loss_reduction": "sum"}),
        (_ignoring, {}),
        (lambda o, y: _even(o, y) if len(y) < 4 else 1 / 0, {}),
        (lambda o, y: _even(o * torch.rand_like(o), y), {}),
    ],
    ids=["mean", "sum", "sum and count", "not of larger batches", "random"],
)
def test_losses_that_combine_are_not(loss_fn: Loss, options: dict[str, Any]) -> None:
    x, y = tokens(11)
    assert not one_step(loss_fn, x, y, **options)[1]


class Nested(nn.Module):
    """Returns the output of a module as a model of transformers does, and further values."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.module(x)
        return {
            "unused": (x, logits * 2, None),
            "logits": logits,
            "width": torch.tensor(VOCABULARY),
            "loss": logits.square().mean(),
            "n": torch.tensor(len(x)),
        }


def nested_step(loss_fn: Loss, n_microbatches: int = 4) -> list[str]:
    """Return the warnings of a step."""
    first, last = model(2)
    graph = ps.lower(ps.schedule("1f1b", 2, n_microbatches))
    with (
        px.Pipeline([first, Nested(last)], graph, ["cpu"] * 2, loss_fn) as pipeline,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            pipeline.step(*tokens(11))
    return [str(w.message) for w in caught if w.category is LossWarning]


@pytest.mark.parametrize("loss_fn", [_flat, _even, _ignoring])
def test_losses_of_nested_outputs(loss_fn: Loss) -> None:
    """They are checked as those of tensors."""
    caught = nested_step(lambda o, y: loss_fn(o["logits"], y))
    assert len(caught) == (loss_fn is _flat)
    assert all("computed at once their loss is" in text for text in caught)


def test_a_loss_that_the_model_computes() -> None:
    """It cannot be checked, and is warned of; with one micro-batch it is exact."""
    (text,) = nested_step(lambda o, y: o["loss"])
    assert "the loss depends on output['loss'], a number that the model computes" in text
    assert not nested_step(lambda o, y: o["loss"], 1)
    assert not nested_step(lambda o, y: (o["loss"], 1.0))


def test_the_check_keeps_two_outputs_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeexec.stages.step_loss.MOST_BYTES", 1)
    x, y = tokens(11)
    (warning,) = one_step(_flat, x, y)[1]
    assert "the losses of 2 micro-batches" in str(warning.message)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (None, {}, "must be a tensor with one element, got NoneType"),
        (1.0, {}, "must be a tensor with one element, got float"),
        (torch.ones(2), {}, r"must be a tensor with one element, got \(2,\)"),
        (torch.ones((), dtype=torch.complex64), {}, "real floating-point tensor"),
        (torch.ones((), dtype=torch.int64), {}, "real floating-point tensor"),
        (torch.ones(()), {}, "does not depend on any parameter"),
        ((torch.ones(()), None), {}, "the count None"),
        ((torch.ones(()), -1), {}, "the count -1"),
        ((torch.ones(()), float("nan")), {}, "the count nan"),
        ((torch.ones(()), torch.ones(2)), {}, "a tensor with one element"),
        ((torch.ones(()), 2, 3), {}, "got tuple"),
        ((torch.ones(()), torch.ones((), requires_grad=True)), {}, "depends on parameters"),
        ((torch.ones(()), 2), {"loss_reduction": "sum"}, "loss_reduction is 'sum'"),
    ],
)
def test_other_losses_are_refused(value: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        one_step(lambda o, y: value, *tokens(11), **options)


def test_a_loss_cut_off_from_the_model_is_refused() -> None:
    """It would train nothing, and `backward` of torch refuses it too."""
    with pytest.raises(StageError, match="would train nothing"):
        one_step(lambda o, y: _even(o.detach(), y), *tokens(11))


def test_a_loss_of_frozen_stages_is_not() -> None:
    stages = [stage.requires_grad_(False) for stage in model(1)]
    graph = ps.lower(ps.schedule("gpipe", 1, 4))
    with px.Pipeline(stages, graph, ["cpu"], _even) as pipeline:
        assert pipeline.step(*tokens(11)).loss > 0


def test_a_loss_has_a_count_always_or_never() -> None:
    def changing(output: Tensor, y: Tensor) -> Any:
        total = _flat(output, y, reduction="sum")
        return (total, 1) if len(y) == 3 else total

    with pytest.raises(StageError, match="return the same for all"):
        one_step(changing, *tokens(11))


def test_loss_fn_must_be_callable() -> None:
    with pytest.raises(ArgumentError, match="trains, and needs loss_fn"):
        one_step(None, *tokens(11))  # type: ignore[arg-type]


def test_mini_batches_without_steps_cannot_be_divided() -> None:
    """Their gradients add up before the last count is known."""
    graph = ps.lower(ps.schedule("pipedream", 2, 4), step="none")
    with (
        px.Pipeline(model(2), graph, ["cpu"] * 2, _ignoring) as pipeline,
        pytest.raises(ExecutionError, match="step='flush'"),
    ):
        pipeline.step(*tokens(11))


def test_a_batch_without_anything_to_count_changes_no_weights() -> None:
    x, y = tokens(11)
    stages = model(2)
    before = [p.clone() for p in weights(stages)]
    graph = ps.lower(ps.schedule("1f1b", 2, 4))
    with (
        px.Pipeline(stages, graph, ["cpu"] * 2, _ignoring, sgd) as pipeline,
        pytest.raises(StageError, match="counts of mini-batch 0 add up to 0"),
    ):
        pipeline.step(x, torch.full_like(y, IGNORED))
    assert_equal(weights(stages), before)


@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_a_cuda_graph_needs_a_count_on_the_gpu(count: Any) -> None:
    """Another would be the same in every replay."""
    function = LossFunction(lambda o, y: (torch.ones(()), count), "mean", on_device=True)
    with pytest.raises(ExecutionError, match="which a CUDA graph would repeat"):
        function(None, None)
