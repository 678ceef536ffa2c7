"""A stand-in for CUDA's streams and events on CPU: work runs at once, calls are written down.

It checks the rules that a real one would punish with an error or a race: an event is recorded
before anybody waits for it, timing events tell the time, external ones order nothing, and within a
capture only streams that have joined it may be used, all of which must come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipeexec.devices import CudaDevice

__all__ = ["FakeCuda", "FakeGpu"]


class FakeCuda:
    """What is under way; ``log`` has every call in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.now = 0
        self.n_streams = 0
        self.capturing: set[int] | None = None  # streams that have joined
        self.open: set[int] = set()  # those of them that have not come back
        self.caller = self.current = FakeStream(self)

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        """Return the calls of one kind."""
        return [call for call in self.log if call[0] == name]

    def touch(self, stream: FakeStream) -> None:
        """Note that a stream is given work."""
        if self.capturing is not None:
            assert stream.number in self.capturing, f"stream {stream.number} is not captured"
            self.open.add(stream.number)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, stream: FakeStream) -> Iterator[None]:
        """Capture what is given to a stream."""
        before, self.current = self.current, stream  # not undone by a capture that fails to end
        self.capturing, self.open = {stream.number}, set()
        self.log.append(("begin", stream.number))
        try:
            yield
        finally:
            left, self.capturing = self.open - {stream.number}, None
            self.log.append(("end", stream.number))
            if left:
                raise RuntimeError(f"streams {sorted(left)} were not joined")
            self.current = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the stand-in in the place of torch's."""
        patch.setattr(torch.cuda, "Stream", lambda *_: FakeStream(self))
        patch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self, **options))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(FakeStream, "device_index", 0, raising=False)
        patch.setattr(torch.cuda, "device", lambda _: self.stream(self.current))
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        patch.setattr(
            torch.Tensor, "record_stream", lambda _, s: self.log.append(("keep", s.number))
        )


class FakeStream:
    """A stream; its work is done when it is given."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.number = cuda, cuda.n_streams
        cuda.n_streams += 1

    def wait_event(self, event: FakeEvent) -> None:
        assert event.at is not None, "nobody has recorded this event"
        assert not event.external, "an external event orders nothing in a capture"
        self.cuda.log.append(("wait", self.number, event.on))
        capturing = self.cuda.capturing
        assert event.captured == (capturing is not None), "an event from outside the capture"
        if capturing is not None:
            assert event.on in capturing
            capturing.add(self.number)
            self.cuda.open.discard(event.on)  # what waits for it brings it back
            self.cuda.open.add(self.number)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.cuda)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        assert self.cuda.capturing is None, "a capture cannot be waited for"
        self.cuda.log.append(("synchronize", self.number))


class FakeEvent:
    """An event; passes when it is recorded."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, external: bool = False) -> None:
        self.cuda, self.timing, self.external = cuda, enable_timing, external
        self.at: int | None = None
        self.on = -1
        self.usable = self.captured = False

    def record(self, stream: FakeStream) -> None:
        self.cuda.touch(stream)
        self.cuda.now += 1
        self.at, self.on = self.cuda.now, stream.number
        self.captured = self.cuda.capturing is not None
        # In a capture only external events are nodes of the graph, which have a time.
        self.usable = self.timing and (self.cuda.capturing is None or self.external)
        self.cuda.log.append(("record", stream.number, self.external))

    def query(self) -> bool:
        self.cuda.log.append(("query", self.on))
        return self.at is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.usable, "no time was noted"
        assert other.usable, "no time was noted"
        assert self.at is not None
        assert other.at is not None
        return float(other.at - self.at)


class FakeGraph:
    """A graph that does nothing when it is replayed."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.log.append(("replay", self.cuda.current.number))


class FakeGpu(CudaDevice):
    """A GPU whose memory is the host's."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cuda", index))
        self.torch_device = torch.device("cpu")
