"""The result of a step: read from events on first access, and small until then."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
import weakref
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import cut, data, dense, mse
from torch import Tensor

import pipeexec as px
import pipesim as ps
from pipeexec.devices import clocks
from pipeexec.devices.clocks import Clocks
from pipeexec.executor import StepResult
from pipesim.errors import NanLossWarning

GRAPH = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=4))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the stand-in in torch's place; return a list that grows with each event that is read."""
    FakeCuda().install(monkeypatch)
    devices: list[int] = []
    seconds = Clocks.seconds

    def counted(clock: Clocks, device: int, event: Any) -> float:
        devices.append(device)
        return seconds(clock, device, event)

    monkeypatch.setattr(Clocks, "seconds", counted)
    return devices


def _pipeline(devices: list[Any] | None = None, **options: Any) -> px.Pipeline:
    devices = devices or [FakeGpu(), FakeGpu()]
    return px.Pipeline(cut(dense(2), [1, 1]), GRAPH, devices, options.pop("loss", mse), **options)


def test_a_loop_that_never_looks_reads_no_event(reads: list[int]) -> None:
    """Nor does the loss; the timeline reads two a task, once."""
    result = _pipeline().step(*data(8))
    assert torch.isfinite(result.loss)
    assert reads == []
    assert result.timeline.complete
    assert len(reads) == 2 * len(GRAPH)
    assert result.timeline is result.timeline
    assert (result.clock_error, result.milestones) == (0.0, {})
    assert len(reads) == 2 * len(GRAPH)


def test_a_host_that_is_suspended_as_clocks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of hosts and devices, and of processes, count from the moment of the same clock."""
    start, seconds = clocks.start, 0.05

    def suspended(devices: Any) -> Clocks:
        clock = start(devices)
        time.sleep(seconds)
        return clock

    monkeypatch.setattr(clocks, "start", suspended)
    with _pipeline(["cpu", "cpu"]) as pipeline:
        timeline = pipeline.step(*data(8)).timeline
    assert timeline.issue_times.min() >= seconds
    assert timeline.start.min() >= seconds


def test_earlier_results_stay_what_they_were(reads: list[int]) -> None:
    """Each step has separate events."""
    subject = _pipeline()
    first = subject.step(*data(8))
    second = subject.step(*data(8))
    assert second.timeline.complete
    assert first.timeline.complete
    assert first.timeline.end.max() > 0


def test_replays_are_read_at_once(reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one overwrites the events."""
    for check in ("check_can_capture", "check_state"):
        monkeypatch.setattr(f"pipeexec.executor.step_capture.{check}", lambda *_: None)
    subject = _pipeline(cuda_graph=True)
    for number in range(1, 5):
        subject.step(*data(8))
        assert len(reads) == number * 2 * len(GRAPH)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], None])
@pytest.mark.usefixtures("reads")
def test_a_result_holds_nothing_of_the_batch(devices: list[Any] | None) -> None:
    """Before its events are read, as after."""
    with _pipeline(devices) as subject:
        inputs, targets = data(8)
        references = [weakref.ref(inputs), weakref.ref(targets)]
        result = subject.step(inputs, targets)
        del inputs, targets
        assert [reference() for reference in references] == [None, None]
        assert result.timeline.complete


@pytest.mark.usefixtures("reads")
def test_a_result_is_copied_as_any_record() -> None:
    """With its times, which are read for it."""
    result = _pipeline().step(*data(8))
    copies = [pickle.loads(pickle.dumps(result)), copy.copy(result), copy.deepcopy(result)]  # noqa: S301
    copies += [replace(result, host_seconds=1.0), StepResult(*_values(result))]
    for duplicate in copies:
        np.testing.assert_array_equal(duplicate.timeline.start, result.timeline.start)
        np.testing.assert_array_equal(duplicate.timeline.end, result.timeline.end)
        assert torch.equal(duplicate.loss, result.loss)
    assert copies[3].host_seconds == 1.0
    short = StepResult(result.losses, result.timeline, (1, 1), 0.5)
    assert (short.clock_error, short.milestones, short.part, short.n_losses) == (0.0, {}, None, 1)


def _values(result: StepResult) -> list[Any]:
    return [getattr(result, item.name) for item in fields(result)]


@pytest.mark.usefixtures("reads")
def test_a_result_is_printed_with_its_loss_and_times() -> None:
    """In notebooks the picture of the timeline follows."""
    with px.Pipeline(cut(dense(2), [1, 1]), GRAPH, ["cpu"] * 2, mse) as pipeline:
        result = pipeline.step(*data(8))
        evaluation = pipeline.evaluate(*data(8))
    assert f"loss {float(result.loss):.6g}, <Timeline 1f1b: {len(GRAPH)} tasks" in repr(result)
    assert "array(" not in repr(result)
    assert repr(evaluation).startswith("<EvaluationResult: loss ")
    assert "<img" in result._repr_html_()
    partial = replace(result, losses=result.losses[:1], grad_norm=torch.tensor(2.0), skipped=True)
    text = repr(partial)
    assert "1 of 4 losses in this process, grad_norm 2, skipped" in text
    on_gpus = _pipeline().step(*data(8))
    assert repr(on_gpus).startswith("<StepResult: loss ")
    with pytest.raises(AttributeError, match="'StepResult' object has no attribute 'time'"):
        on_gpus.time  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("devices", [["cpu", "cpu"], None])
def test_each_loss_that_is_no_number_is_named(
    devices: list[Any] | None, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one question a step, for which the caller waits once."""
    shapes: list[torch.Size] = []
    isnan = Tensor.isnan

    def counted(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return isnan(x)

    monkeypatch.setattr(Tensor, "isnan", counted)
    inputs, targets = data(8)
    targets[2], targets[7] = torch.nan, torch.nan
    with _pipeline(devices) as subject, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = subject.step(inputs, targets)
    messages = [str(w.message) for w in caught if w.category is NanLossWarning]
    assert [text.partition(";")[0] for text in messages] == [
        f"the loss of micro-batch {k} is NaN (step 0)" for k in (1, 3)
    ]
    assert caught[-1].filename == __file__
    assert shapes == [torch.Size([4])]
    assert [bool(x.isnan()) for x in result.losses] == [False, True, False, True]


def test_losses_of_several_types_and_places_are_kept_in_order() -> None:
    """As of last stages on several GPUs; None for those of other processes."""
    from pipeexec.executor.step_result import copy_losses

    values = [0.5, None, float("nan"), 1.5, float("nan")]
    types = [torch.float32, None, torch.float64, torch.bfloat16, torch.float32]
    losses = [None if v is None else torch.tensor(v, dtype=t) for v, t in zip(values, types)]  # noqa: B905
    kept, nan = copy_losses(losses)
    assert nan == [2, 4]
    assert [x.dtype for x in kept] == [t for t in types if t is not None]
    torch.testing.assert_close([float(x) for x in kept], [0.5, torch.nan, 1.5, torch.nan],
                               equal_nan=True)  # fmt: skip
    assert copy_losses([None]) == ((), [])
