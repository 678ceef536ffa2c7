"""The stand-in for CUDA refuses what torch or a GPU would refuse."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream, check_signature

SECONDS = 0.15


@pytest.fixture
def event_delay() -> float:
    """Let events pass late."""
    return SECONDS


def test_its_functions_take_what_those_of_torch_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name or a default that torch does not have is refused when the stand-in is installed."""

    def current_stream(_: FakeCuda, gpu: Any = None) -> None:
        """Take an argument of another name."""

    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(FakeCuda, "current_stream", current_stream)
    with pytest.raises(AssertionError, match=r"current_stream of the stand-in takes .*'gpu'"):
        fake.install(monkeypatch)


def test_a_signature_may_be_shorter_but_no_other() -> None:
    def real(a: int, b: int = 1, *, c: int = 2) -> None:
        """Stand for a function of torch's."""

    check_signature("f", lambda a, b=1: None, real)
    for wrong in (lambda a, b: None, lambda b: None, lambda a, b=1, c=2: None, lambda: None):
        with pytest.raises(AssertionError):
            check_signature("f", wrong, real)


def test_its_methods_take_what_those_of_torch_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None)
    with pytest.raises(AssertionError, match=r"wait_stream of the stand-in takes .*'other'"):
        FakeCuda().install(monkeypatch)


@pytest.mark.measures_time
@pytest.mark.usefixtures("cuda")
def test_events_pass_late() -> None:
    """The host waits only where it asks for it; what waits for an event passes no earlier."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    start = perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(first)
    second.wait_event(event)
    later = torch.cuda.Event(enable_timing=True)
    later.record(second)
    assert not event.query()
    assert perf_counter() - start < SECONDS
    second.synchronize()
    assert perf_counter() - start >= SECONDS
    assert event.query()
    assert later.query()
    assert event.elapsed_time(later) > 0


@pytest.mark.usefixtures("cuda")
def test_the_time_of_an_event_that_has_not_passed_is_refused() -> None:
    stream, events = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record(stream)
    with pytest.raises(AssertionError, match="must have passed"):
        events[0].elapsed_time(events[1])


@pytest.mark.usefixtures("cuda")
def test_an_event_belongs_to_a_gpu() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(torch.device("cpu:0")))
    with pytest.raises(AssertionError, match="belongs to the GPU"):
        event.record(torch.cuda.Stream(torch.device("cpu:1")))


def test_an_event_is_a_node_if_the_current_stream_captures(cuda: FakeCuda) -> None:
    """The stream that it is recorded on does not count; the time is known after a replay."""
    graph, first, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    inside, outside = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    with torch.cuda.graph(graph, stream=first):
        other.wait_stream(first)
        inside.record(other)
        with torch.cuda.stream(cuda.caller):  # type: ignore[arg-type]
            outside.record(other)
        first.wait_stream(other)
        with pytest.raises(AssertionError, match="a capture cannot be waited for"):
            first.synchronize()
    assert not inside.query()
    with pytest.raises(AssertionError, match="an event of a capture is not asked for"):
        outside.query()
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert inside.query()
