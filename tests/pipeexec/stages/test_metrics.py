"""Metrics beside the loss: those of the whole batch, over micro-batches, replicas and processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import cut, data, dense, mse, pipeline
from torch import Tensor

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import ExecutionError, StageError

X, Y = data(13)


def with_metrics(output: Tensor, targets: Tensor) -> Any:
    return mse(output, targets), {
        "mean": output.mean(),
        "samples": float(len(output)),
        "large": ((output > 0).sum(), output.numel()),
    }


def counted(output: Tensor, targets: Tensor) -> Any:
    loss, metrics = with_metrics(output, targets)
    return (loss * len(output), len(output)), metrics


def lowered(**options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule("1f1b", 2, 4), **options)


def expected() -> dict[str, float]:
    """Return the metrics of the whole batch of an untrained model."""
    output = dense(2)(X).detach()
    return {
        "mean": float(output.mean()),
        "samples": (4 * 4 + 3 * 9) / 13,  # weighted by samples: 4, 3, 3 and 3
        "large": float((output > 0).float().mean()),
    }


@pytest.mark.filterwarnings("error::pipesim.errors.LossWarning")
@pytest.mark.parametrize("loss_fn", [with_metrics, counted])
def test_metrics_are_those_of_the_batch(loss_fn: Any) -> None:
    """Means are weighted by samples, pairs are exact, and the loss and gradients stay."""
    model = cut(dense(2), [1, 1])
    whole = dense(2)
    loss = mse(whole(X), Y)
    loss.backward()
    with pipeline(model, lowered(), loss_fn) as subject:
        evaluated = subject.evaluate(X, Y)
        result = subject.step(X, Y)
    assert result.metrics == pytest.approx(expected())
    assert evaluated.metrics == pytest.approx(expected())
    assert evaluated.loss == pytest.approx(loss.item())
    assert not any(getattr(x, "requires_grad", False) for x in result.metric_sums["mean"].totals)
    for own, its in zip(
        (p for stage in model for p in stage.parameters()), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, its.grad)


def test_metrics_of_sums_are_sums() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Any:
        return ((output - targets) ** 2).sum(), {"samples": len(output)}

    with pipeline(cut(dense(2), [1, 1]), lowered(), loss_fn, loss_reduction="sum") as subject:
        assert subject.step(X, Y).metrics == {"samples": 13.0}


def test_metrics_of_replicas_and_without() -> None:
    graph = lowered(n_replicas=2)
    x, y = data(16)
    with pipeline(cut(dense(2), [1, 1]), graph, with_metrics) as subject:
        assert subject.step(x, y).metrics["mean"] == pytest.approx(float(dense(2)(x).mean()))
        subject.loss_fn = mse
        assert subject.step(x, y).metrics == {}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"a": torch.ones(2)}, "as metric 'a'; a metric is a number, or a tensor with one el"),
        ({"a": "text"}, "returned 'text' as metric 'a'"),
        ({"a": (1.0, None, 2.0)}, "as metric 'a'"),
        ({3: 1.0}, "a metric with the name 3; give text"),
    ],
)
def test_metrics_that_are_refused(metrics: Any, message: str) -> None:
    with (
        pipeline(cut(dense(2), [1, 1]), lowered(), lambda o, t: (mse(o, t), metrics)) as subject,
        pytest.raises(StageError, match=message),
    ):
        subject.step(X, Y)


def test_metrics_of_other_names_are_refused() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Any:
        return mse(output, targets), {f"of {len(output)}": 1.0}

    with (
        pipeline(cut(dense(2), [1, 1]), lowered(), loss_fn) as subject,
        pytest.raises(
            StageError, match="the metrics of 4 for one micro-batch and of 3 for another"
        ),
    ):
        subject.step(X, Y)


def over_processes(processes: Processes) -> tuple[Any, Any, bool]:
    model: list[Any] = list(cut(dense(2), [1, 1]))
    model[1 - processes.rank] = None
    with px.Pipeline(model, lowered(), ["cpu"], counted, processes=processes) as subject:
        result = subject.step(X, Y)
        try:
            is_here = bool(result.metrics)
        except ExecutionError:
            is_here = False
        evaluated = subject.gather(subject.evaluate(X, Y))
        return subject.gather(result).metrics, evaluated.metrics, is_here


def test_metrics_over_processes(two_ranks: Ranks) -> None:
    for rank, (metrics, evaluated, is_here) in enumerate(two_ranks.run(over_processes)):
        assert metrics == pytest.approx(expected())
        assert evaluated == pytest.approx(expected())
        assert is_here == (rank == 1)
