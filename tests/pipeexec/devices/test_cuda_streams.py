"""CUDA's streams, events and captures, as they are called; on a stand-in that runs on CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import (
    Faulty,
    assert_order_respected,
    assert_same,
    cut,
    data,
    dense,
    mse,
    unsplit,
)
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.cuda import CapturedEvent, CudaEvent, CudaStream
from pipeexec.executor.step import Step
from pipeexec.executor.step_capture import Recorder
from pipesim.errors import StageError


def _graph(schedule: str, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, n_devices=2, n_microbatches=4), **options)


def _pipeline(graph: ps.TaskGraph, stages: list[Any] | None = None) -> px.Pipeline:
    n = graph.n_stages
    return px.Pipeline(stages or cut(dense(n), [1] * n), graph, [FakeGpu(), FakeGpu()], mse)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("cuda")
def test_a_step_is_that_of_the_unsplit_model(schedule: str, overlap: bool) -> None:
    """Through the streams of CUDA, to the last bit, and in the order of the graph."""
    graph = _graph(schedule, overlap=overlap)
    stages, whole = (cut(dense(graph.n_stages), [1] * graph.n_stages) for _ in range(2))
    loss = unsplit(whole, graph, *data(8))
    result = _pipeline(graph, stages).step(*data(8))
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)
    assert_order_respected(result.timeline)


def test_the_host_waits_after_the_last_task_only(cuda: FakeCuda) -> None:
    """Once a stream, at the end of the step; in between it only queues."""
    subject = _pipeline(_graph("1f1b"))
    subject.step(*data(8))
    cuda.log.clear()
    subject.step(*data(8))
    kinds = [call[0] for call in cuda.log]
    first = kinds.index("query")
    assert set(kinds[first:]) == {"query", "synchronize"}
    assert kinds.count("synchronize") == 2 * 3  # compute, to the other, from the other
    assert kinds[:first].count("record") == 2 * len(subject.graph) + 2 + 2  # marks, their waits


def test_there_is_a_copy_stream_for_each_peer_and_direction(cuda: FakeCuda) -> None:
    subject = _pipeline(_graph("1f1b"))
    streams = [task.stream for task in subject._runner.tasks]
    assert len({id(stream) for stream in streams}) == 6
    assert len({stream.stream.number for stream in streams}) == 6  # type: ignore[attr-defined]
    single = _pipeline(_graph("1f1b", overlap=False))
    assert len({id(task.stream) for task in single._runner.tasks}) == 2
    assert cuda.calls("synchronize") == []


def test_messages_are_kept_until_both_ends_have_used_them(cuda: FakeCuda) -> None:
    """By the stream that sends, and by the one that computes with them."""
    subject = _pipeline(_graph("gpipe"))
    subject.step(*data(8))
    kept = [call[1] for call in cuda.calls("keep")]
    numbers = {
        (device, name): subject.devices[device].stream(name).stream.number  # type: ignore[attr-defined]
        for device in (0, 1)
        for name in ("compute", f"send:{1 - device}")
    }
    assert {number: kept.count(number) for number in numbers.values()} == dict.fromkeys(
        numbers.values(), 4
    )


def test_a_failure_is_named(cuda: FakeCuda) -> None:
    """And the streams are waited for all the same."""
    stages = [nn.Linear(16, 16), nn.Sequential(Faulty(ValueError("no"), forward=2), nn.ReLU())]
    subject = _pipeline(_graph("1f1b"), stages)
    with pytest.raises(StageError, match=r"1F2 failed .*ValueError: no"):
        subject.step(*data(8))
    assert [call[0] for call in cuda.log if call[0] != "query"][-1] == "synchronize"


# Captures


def test_a_captured_event_tells_the_time_by_another_one(cuda: FakeCuda) -> None:
    """The note of the time comes first; who waits, waits for the other."""
    stream, other = CudaStream(torch.cuda.Stream()), CudaStream(torch.cuda.Stream())
    base = stream.record()
    stream.make_event = CapturedEvent
    event = stream.record()
    number = stream.stream.number  # type: ignore[attr-defined]
    assert cuda.log[-2:] == [("record", number, True), ("record", number, False)]
    other.wait_event(event)
    assert event.seconds_since(base) == pytest.approx(1e-3)
    assert type(base) is CudaEvent
    assert base.time is base.order


def _recorded(cuda: FakeCuda, schedule: str) -> tuple[px.Pipeline, Step]:
    """Capture a step through the walk of a pipeline."""
    subject = _pipeline(_graph(schedule))
    subject.step(*data(8))
    cuda.log.clear()
    kept: list[Step] = []

    def walk(run: Step, tasks: Any) -> None:
        graph = Recorder(torch.device("cpu")).record(run, tasks)
        kept.append(run)
        assert Recorder(torch.device("cpu")).launch(graph) >= 0.0

    subject._runner.run(*data(8), walk)
    return subject, kept[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv", "chimera"])
def test_a_capture_forks_and_joins_every_stream(cuda: FakeCuda, schedule: str) -> None:
    """The stand-in refuses streams that have not joined the capture, or have not left it."""
    subject, run = _recorded(cuda, schedule)
    kinds = [call[0] for call in cuda.log]
    assert "synchronize" not in kinds[: kinds.index("end")]
    assert kinds[kinds.index("end") + 1 :][:2] == ["replay", "synchronize"]
    assert cuda.calls("replay") == [("replay", cuda.caller.number)]
    assert cuda.current is cuda.caller
    timeline = run.readings().timeline
    assert timeline.complete
    assert_order_respected(timeline)
    assert np.isfinite(timeline.end).all()
    for task in subject._runner.tasks:
        assert isinstance(task.stream, CudaStream)
        assert task.stream.make_event is CudaEvent


@pytest.mark.usefixtures("cuda")
def test_a_stream_whose_tasks_wait_for_nothing_is_captured_too() -> None:
    """It joins at the fork, not by a separate wait."""
    subject = _pipeline(_graph("gpipe"))
    free = [task._replace(waits=()) for task in subject._runner.tasks]
    subject._runner.run(*data(8), lambda run, _: _discard(Recorder(torch.device("cpu")), run, free))


def _discard(recorder: Recorder, run: Step, tasks: Any) -> None:
    recorder.record(run, tasks)


def test_a_capture_that_fails_gives_the_current_stream_back(cuda: FakeCuda) -> None:
    """The context of torch does not, where the capture cannot be ended."""
    subject = _pipeline(_graph("1f1b"))
    stray = torch.cuda.Stream()

    def walk(run: Step, tasks: Any) -> None:
        inner = run.issue

        def issue(tasks: Any) -> None:
            inner(tasks)
            stray.wait_stream(torch.cuda.current_stream())
            torch.cuda.Event().record(stray)

        run.issue = issue  # type: ignore[method-assign]
        Recorder(torch.device("cpu")).record(run, tasks)

    with pytest.raises(RuntimeError, match="were not joined"):
        subject._runner.run(*data(8), walk)
    assert cuda.current is cuda.caller
    assert all(task.stream.make_event is CudaEvent for task in subject._runner.tasks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("copies", [True, False])
def test_a_gpipe_lets_its_host_go_on(cuda: FakeCuda, copies: bool) -> None:
    """Forward and backward wait for no device; the caller's own stream waits for both ends."""
    layers = nn.Sequential(*dense(3))
    plain = copy.deepcopy(layers)
    model = px.GPipe(
        layers, [1, 2], devices=[FakeGpu(0), FakeGpu(1)], chunks=2, copy_streams=copies
    )
    x, y = data(8)
    cuda.log.clear()
    output = model(x)
    assert torch.equal(output, torch.cat([plain(part) for part in x.chunk(2)]))
    waited = {target for _, who, target in cuda.calls("wait") if who == cuda.caller.number}
    compute = [d.stream("compute").stream.number for d in model._runtime.devices]  # type: ignore[union-attr]
    assert set(compute) <= waited
    assert ("keep", compute[0]) in cuda.log  # the inputs
    assert ("keep", cuda.caller.number) in cuda.log  # the outputs
    n_waits = len(cuda.calls("wait"))
    mse(output, y).backward()
    mse(torch.cat([plain(part) for part in x.chunk(2)]), y).backward()
    started = {
        who for _, who, target in cuda.calls("wait")[n_waits:] if target == cuda.caller.number
    }
    assert set(compute) <= started
    ends = [target for _, who, target in cuda.calls("wait")[n_waits:] if who == cuda.caller.number]
    assert set(ends[-2:]) == set(compute)
    assert not cuda.calls("synchronize")
    assert not cuda.calls("query")
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    assert model.timeline().complete


@pytest.mark.parametrize("mode", ["last", "every", "bucketed"])
@pytest.mark.usefixtures("cuda")
def test_replicas_reduce_their_gradients(mode: Any) -> None:
    """On a stream of their own; a bucket behind an event that was recorded within a backward."""
    graph = ps.lower(
        ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync=mode, n_buckets=2, step="none"
    )
    model, whole = dense(4), dense(4)
    mse(whole(data(8)[0]), data(8)[1]).backward()
    _pipeline(graph, [model]).step(*data(8))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
