"""Gradients that add up over steps train as one step of all their batches together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import Faulty, cut, data, dense, mse, pipeline, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.executor import StepResult
from pipesim.errors import ArgumentError, ArgumentTypeError, StageError
from pipesim.ops import Op

#: Batches of unlike sizes, which train two updates.
SIZES = ((8, 12, 4), (12, 8, 8))


def rounds(divisor: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the batches of each update."""
    return [[data(n * divisor, seed=10 * k + n) for n in sizes] for k, sizes in enumerate(SIZES)]


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean over half of the values, as sum and count."""
    mask = targets > 0
    return ((output - targets) ** 2 * mask).sum(), mask.sum()


def summed(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).sum()


LOSSES: dict[str, tuple[Any, str]] = {
    "mean": (mse, "mean"), "counted": (counted, "mean"), "sum": (summed, "sum"),
}  # fmt: skip


def at_once(loss_fn: Any) -> nn.Sequential:
    """Return the unsplit model, trained on the batches of each update together."""
    model = dense(2)
    optimizer = sgd(model.parameters())
    for batches in rounds():
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
    return model


def train(subject: px.Pipeline) -> list[StepResult]:
    return [
        subject.step(*batch, accumulate=k + 1 < len(batches))
        for batches in rounds()
        for k, batch in enumerate(batches)
    ]


def assert_trained(parameters: Any, whole: nn.Module) -> None:
    for own, its in zip(parameters, whole.parameters(), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error::pipesim.errors.LossWarning")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), ("zb_h1", {}), ("gpipe", {"n_replicas": 2}),
                              ("gpipe", {"n_replicas": 2, "grad_sync": 1})],
)  # fmt: skip
def test_steps_train_as_one(name: str, schedule: str, options: dict[str, Any]) -> None:
    """Batches may have unlike sizes; every loss is weighted as in one batch."""
    loss_fn, reduction = LOSSES[name]
    model = cut(dense(2), [1, 1])
    graph = ps.lower(ps.schedule(schedule, 2, 2), **options)
    with pipeline(model, graph, loss_fn, sgd, loss_reduction=reduction) as subject:
        results = train(subject)
        assert subject.n_steps == 6
    assert_trained((p for stage in model for p in stage.parameters()), at_once(loss_fn))
    has_steps = [bool((x.timeline.graph.op == Op.STEP).any()) for x in results]
    assert has_steps == [False, False, True] * 2
    first = loss_fn(dense(2)(rounds()[0][0][0]), rounds()[0][0][1])
    torch.testing.assert_close(
        results[0].loss, (first[0] / first[1] if name == "counted" else first).detach()
    )
    costs = ps.Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0, optimizer_step=3.0)
    accumulating, last = (ps.simulate(x.timeline.graph, costs).makespan for x in results[1:3])
    assert 0 < accumulating <= last - 3.0


def test_other_calls_leave_the_gradients() -> None:
    """Evaluating, counting and profiling between the steps change nothing."""
    model = cut(dense(2), [1, 1])
    with pipeline(model, ps.lower(ps.schedule("1f1b", 2, 2)), mse, sgd) as subject:
        for batches in rounds():
            for k, batch in enumerate(batches):
                subject.step(*batch, accumulate=k < 2)
                subject.evaluate(*batch)
                subject.held_bytes(*batch)
    assert_trained((p for stage in model for p in stage.parameters()), at_once(mse))


def test_a_failed_step_begins_afresh() -> None:
    """Gradients from before a step that fails are dropped."""
    faulty = Faulty(ValueError("broken"), backward=3)
    model = [
        nn.Sequential(part, x) for part, x in zip(dense(2), (nn.Identity(), faulty), strict=True)
    ]
    whole = copy.deepcopy(nn.Sequential(*model))
    x, y = data(8)
    with pipeline(model, ps.lower(ps.schedule("1f1b", 2, 2)), mse, sgd) as subject:
        subject.step(2 * x, y, accumulate=True)
        with pytest.raises(StageError, match="broken"):
            subject.step(3 * x, y, accumulate=True)
        faulty.repair()
        subject.step(x, y)
    whole[1][1].repair()
    mse(whole(x), y).backward()
    for own, its in zip(
        (p for stage in model for p in stage.parameters()), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, its.grad)


def test_what_cannot_accumulate() -> None:
    model, batch = cut(dense(2), [1, 1]), data(8)
    with pipeline(model, ps.lower(ps.schedule("1f1b", 2, 2))) as subject:
        with pytest.raises(ArgumentError, match="accumulate=True leaves gradients for an optimiz"):
            subject.step(*batch, accumulate=True)
        with pytest.raises(ArgumentTypeError, match="accumulate"):
            subject.step(*batch, accumulate=3)
    many = ps.lower(ps.schedule("1f1b", 2, 4).with_updates(2, "stashed"))
    with (
        pipeline(model, many, mse, sgd) as subject,
        pytest.raises(ArgumentError, match="has several mini-batches"),
    ):
        subject.step(*batch, accumulate=True)


def over_processes(processes: Processes, name: str) -> list[Tensor]:
    """Train the stage of this process; return its parameters."""
    loss_fn, reduction = LOSSES[name]
    model: list[Any] = list(cut(dense(2), [1, 1]))
    model[1 - processes.rank] = None
    graph = ps.lower(ps.schedule("1f1b", 2, 2))
    with px.Pipeline(
        model, graph, ["cpu"], loss_fn, sgd, processes=processes, loss_reduction=reduction
    ) as subject:
        for batches in rounds():
            for k, (x, y) in enumerate(batches):
                subject.step(x[:4], y[:4], accumulate=k < 2)
    return [p.detach() for p in model[processes.rank].parameters()]


@pytest.mark.parametrize("name", ["mean", "counted"])
def test_steps_train_as_one_over_processes(name: str, two_ranks: Ranks) -> None:
    loss_fn, _ = LOSSES[name]
    model = dense(2)
    optimizer = sgd(model.parameters())
    for batches in rounds():
        x, y = (torch.cat([part[:4] for part in column]) for column in zip(*batches, strict=True))
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
    assert_trained([p for row in two_ranks.run(over_processes, name=name) for p in row], model)
