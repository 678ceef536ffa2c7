"""Learning-rate schedules of pipelines against those of the unsplit model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity import lowered
from ranks import Ranks
from small_pipelines import cut, data, dense, mse, pipeline
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim import lr_scheduler as lrs

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ArgumentTypeError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")

#: Schedulers of each kind that keeps its state in another way.
FACTORIES: dict[str, Callable[[Optimizer], lrs.LRScheduler]] = {
    "cosine": lambda optimizer: lrs.CosineAnnealingLR(optimizer, 10),
    "warm-up, then cosine": lambda optimizer: lrs.SequentialLR(
        optimizer, [lrs.LinearLR(optimizer, 0.1, 1.0, 3), lrs.CosineAnnealingLR(optimizer, 7)], [3]
    ),
    "one cycle, of momentum too": lambda optimizer: lrs.OneCycleLR(optimizer, 0.2, 12),
    "function": lambda optimizer: lrs.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
}


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.02)


def unsplit_losses(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Return the losses of steps of the unsplit model, with torch's loop."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def split_losses(
    subject: px.Pipeline, scheduler: px.LRSchedulers, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        losses.append(subject.gather(subject.step(inputs, targets)).loss.item())
        scheduler.step()
    return losses


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*epoch parameter")  # SequentialLR's own
        yield


BATCHES = [data(12, seed=k) for k in range(10)]


@pytest.mark.parametrize("n_replicas", [1, 2])
@pytest.mark.parametrize("kind", FACTORIES)
def test_losses_are_those_of_the_unsplit_model_with_its_scheduler(
    kind: str, n_replicas: int
) -> None:
    """Over ten steps, also with copies of stages, which have optimizers of their own."""
    factory, model = FACTORIES[kind], dense(4)
    whole = copy.deepcopy(model)
    optimizer = adam(whole.parameters())
    scheduler = factory(optimizer)
    expected = unsplit_losses(whole, optimizer, scheduler, BATCHES)
    graph = lowered("1f1b", 2, 2, n_replicas=n_replicas)
    with pipeline(cut(model, [2, 2]), graph, mse, adam) as subject, no_warnings():
        schedulers = px.LRSchedulers(subject, factory)
        losses = split_losses(subject, schedulers, BATCHES)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert schedulers.get_last_lr() == scheduler.get_last_lr()
        rates = {group["lr"] for x in subject.optimizers if x for group in x.param_groups}
        assert rates == set(scheduler.get_last_lr())


def test_schedule_and_rates_that_are_tensors() -> None:
    """As CUDA graphs need them: the tensors stay, their values change."""
    with pipeline(
        cut(dense(2), [1, 1]),
        lowered("gpipe", 2, 2),
        mse,
        lambda parameters: Adam(parameters, lr=torch.tensor(0.5), capturable=False, foreach=False),
    ) as subject:
        tensors = [x.param_groups[0]["lr"] for x in subject.optimizers if x]
        scheduler = px.LRSchedulers(subject, lambda optimizer: lrs.ExponentialLR(optimizer, 0.5))
        split_losses(subject, scheduler, BATCHES[:2])
        assert all(
            x is y.param_groups[0]["lr"] for x, y in zip(tensors, subject.optimizers, strict=True)
        )
        assert [x.item() for x in tensors] == [0.125, 0.125]
        other = px.LRSchedulers(subject, lambda optimizer: lrs.ExponentialLR(optimizer, 0.5))
        other.load_state_dict(scheduler.state_dict())
        assert other.state_dict()["last_epoch"] == 2


def test_plateau_takes_the_loss() -> None:
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, adam) as subject:
        scheduler = px.LRSchedulers(
            subject, lambda optimizer: lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        )
        for loss in (1.0, 2.0, 0.5):
            scheduler.step(loss)
        assert scheduler.get_last_lr() == [0.01]


@pytest.mark.parametrize("counts", [[4], [1, 1, 1, 1]])
def test_a_state_loads_into_another_number_of_stages(counts: list[int]) -> None:
    """And into torch's scheduler of the unsplit model."""
    factory, model = FACTORIES["warm-up, then cosine"], dense(4)
    with pipeline(cut(model, [2, 2]), lowered("1f1b", 2, 2), mse, adam) as subject:
        first = px.LRSchedulers(subject, factory)
        split_losses(subject, first, BATCHES[:4])
        state = copy.deepcopy(first.state_dict())
    stages = cut(dense(4), counts)
    with pipeline(stages, lowered("1f1b", len(counts), 2), mse, adam) as subject:
        second = px.LRSchedulers(subject, factory)
        second.load_state_dict(state)
        assert second.state_dict() == first.state_dict()
        split_losses(subject, second, BATCHES[4:5])
    whole = factory(adam(dense(1).parameters()))
    whole.load_state_dict(state)
    whole.step()
    assert whole.get_last_lr() == second.get_last_lr()


def test_schedules_of_stages_may_differ() -> None:
    """Then each stage has a state, which loads into as many stages."""
    slow = iter([0.5, 0.25] * 2)

    def factory(optimizer: Optimizer) -> lrs.LRScheduler:
        return lrs.ExponentialLR(optimizer, next(slow))

    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, adam) as subject:
        scheduler, other = (px.LRSchedulers(subject, factory) for _ in range(2))
        split_losses(subject, scheduler, BATCHES[:1])
        state = scheduler.state_dict()
        assert set(state["by_stage"]) == {"0", "1"}
        other.load_state_dict(state)
        assert other.state_dict() == state
        del state["by_stage"]["1"]
        with pytest.raises(ArgumentError, match="none for stage 1"):
            other.load_state_dict(state)


def test_what_cannot_be_loaded_is_refused_and_changes_nothing() -> None:
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, adam) as subject:
        scheduler = px.LRSchedulers(subject, FACTORIES["cosine"])
        state = copy.deepcopy(scheduler.state_dict())
        others: list[tuple[Any, str]] = [
            ({}, "empty"),
            (lrs.StepLR(adam(dense(1).parameters()), 2).state_dict(), "CosineAnnealingLR.*T_max"),
            ({**state, "base_lrs": [0.1, 0.2]}, "1 parameter groups, state_dict is of 2"),
        ]
        for other, words in others:
            with pytest.raises(ArgumentError, match=words):
                scheduler.load_state_dict(other)
        assert scheduler.state_dict() == state


def test_wrong_factories_are_refused() -> None:
    other = adam(dense(1).parameters())
    with pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2), mse, adam) as subject:
        for factory, words in [
            (lambda _: None, "returned None for the optimizer of stage 0"),
            (lambda _: lrs.ConstantLR(other), "of another optimizer"),
            (lambda x: lrs.LambdaLR(x, [abs, abs]), "stage 0: ValueError: Expected 1 lr_lambdas"),
        ]:
            with pytest.raises(ArgumentError, match=words):
                px.LRSchedulers(subject, factory)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="factory must be a function"):
            px.LRSchedulers(subject, 0.1)  # type: ignore[arg-type]
    with (
        pipeline(cut(dense(2), [1, 1]), lowered("gpipe", 2, 2)) as subject,
        pytest.raises(ArgumentError, match="pipeline has no optimizer"),
    ):
        px.LRSchedulers(subject, FACTORIES["cosine"])


def _in_process(processes: Processes) -> tuple[list[float], Any, list[Any]]:
    torch.manual_seed(0)
    stages: list[nn.Module | None] = list(cut(dense(4), [2, 2]))
    stages[1 - processes.rank] = None
    graph = lowered("1f1b", 2, 2)
    with px.Pipeline(stages, graph, ["cpu"], mse, adam, processes=processes) as subject:
        scheduler = px.LRSchedulers(subject, FACTORIES["warm-up, then cosine"])
        losses = split_losses(subject, scheduler, BATCHES[:4])
        return losses, scheduler.state_dict(), scheduler.get_last_lr()


@pytest.mark.slow
def test_two_processes_have_the_schedule_of_one(two_ranks: Ranks) -> None:
    model, factory = dense(4), FACTORIES["warm-up, then cosine"]
    optimizer = adam(model.parameters())
    scheduler = factory(optimizer)
    expected = unsplit_losses(model, optimizer, scheduler, BATCHES[:4])
    for losses, state, rates in two_ranks.run(_in_process):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert state == scheduler.state_dict()
        assert rates == scheduler.get_last_lr()
