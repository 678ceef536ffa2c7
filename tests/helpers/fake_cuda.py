"""A stand-in for CUDA's streams and events on CPU: work runs at once, calls are written down.

It checks the rules that a real one would punish with an error or a race: an event is recorded
before anybody waits for it, an event tells the time only if it was made for it and has passed,
external ones order nothing, and within a capture only streams that have joined it may be used, all
of which must come back. Its functions take the arguments of torch's, by the same names.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch

from pipeexec.devices.cuda import CudaDevice

#: torch's own, which a test may have replaced by a stand-in when another one is installed.
_REAL: dict[str, Any] = {
    "Stream": torch.cuda.Stream,
    "Event": torch.cuda.Event,
    "current_stream": torch.cuda.current_stream,
    "stream": torch.cuda.stream,
    "set_stream": torch.cuda.set_stream,
    "device": torch.cuda.device,
    "graph": torch.cuda.graph,
    "CUDAGraph": torch.cuda.CUDAGraph,
}


def _parameters(real: Any) -> list[inspect.Parameter]:
    """Return what a function takes; of a class, of a new object; without self."""
    made_by = real.__new__ if inspect.isclass(real) else real
    if made_by is object.__new__:
        made_by = real.__init__
    parameters = list(inspect.signature(made_by).parameters.values())
    return parameters[1:] if inspect.isclass(real) else parameters


def check_signature(name: str, stand_in: Callable[..., Any], real: Any) -> None:
    """Check that a stand-in takes no argument that torch's own does not.

    Parameters have torch's names, order and defaults; the last ones of torch's may be missing.
    """
    own, its = _parameters(stand_in), _parameters(real)
    accepted = [(p.name, p.kind, p.default) for p in own]
    allowed = [(p.name, p.kind, p.default) for p in its[: len(own)]]
    assert accepted == allowed, f"{name} of the stand-in takes {accepted}, torch's {allowed}"
    needed = [p.name for p in its[len(own) :] if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    assert not needed, f"{name} of torch's needs {needed}, too"


class Observer(Protocol):
    """Receives the calls that order streams or keep memory."""

    def recorded(self, event: FakeEvent, stream: FakeStream) -> None:
        """Note that an event was recorded on a stream."""
        ...

    def waited(self, stream: FakeStream, event: FakeEvent) -> None:
        """Note that a stream waits for an event."""
        ...

    def synchronized(self, stream: FakeStream) -> None:
        """Note that the host has waited for a stream."""
        ...

    def kept(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Note that memory of a tensor is kept for a stream."""
        ...


class _OfThread(threading.local):
    """What CUDA keeps for each thread: its current GPU, and its current stream on each."""

    def __init__(self) -> None:
        self.gpu = torch.device("cpu")
        self.streams: dict[torch.device, FakeStream] = {}


class FakeCuda:
    """What is under way; ``log`` has every call in order.

    Parameters
    ----------
    passes_after
        Seconds after which an event passes, from when it is recorded.

    Attributes
    ----------
    observers
        Receive each call.
    caller
        The default stream of the first GPU, which is current at first.
    """

    def __init__(self, passes_after: float = 0.0) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.passes_after = passes_after
        self.observers: list[Observer] = []
        self.now = 0
        self.streams: list[FakeStream] = []
        self.capturing: set[int] | None = None  # streams that have joined
        self.open: set[int] = set()  # those of them that have not come back
        self.nodes: list[FakeEvent] = []  # events that note the time in the graph under capture
        self._of_thread = _OfThread()
        self._defaults: dict[torch.device, FakeStream] = {}
        self.lock = threading.RLock()  # hosts may be several threads
        self.caller = self.current_stream()

    @property
    def gpu(self) -> torch.device:
        """The current GPU of the calling thread."""
        return self._of_thread.gpu

    @gpu.setter
    def gpu(self, gpu: torch.device) -> None:
        self._of_thread.gpu = gpu

    @property
    def _current(self) -> dict[torch.device, FakeStream]:
        return self._of_thread.streams

    @property
    def current(self) -> FakeStream:
        """The current stream of the current GPU."""
        return self.current_stream()

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        """Return the calls of one kind."""
        return [call for call in self.log if call[0] == name]

    def touch(self, stream: FakeStream) -> None:
        """Note that a stream is given work."""
        if self.capturing is not None:
            assert stream.number in self.capturing, f"stream {stream.number} is not captured"
            self.open.add(stream.number)

    # In torch's place

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the current stream of a GPU: at first its default stream."""
        gpu = self._gpu(device)
        with self.lock:
            if gpu not in self._defaults:
                self._defaults[gpu] = FakeStream(self, gpu)
        return self._current.get(gpu, self._defaults[gpu])

    def _gpu(self, device: Any) -> torch.device:
        return self.gpu if device is None else torch.device(device)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream, and its GPU, the current one."""
        gpu, before = self.gpu, self.current_stream(stream.device)
        self.gpu, self._current[stream.device] = stream.device, stream
        try:
            yield
        finally:
            self.gpu, self._current[stream.device] = gpu, before

    def set_stream(self, stream: FakeStream) -> None:
        """Make a stream, and its GPU, the current one for good."""
        self.gpu, self._current[stream.device] = stream.device, stream

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Make a GPU the current one."""
        before, self.gpu = self.gpu, self._gpu(device)
        try:
            yield
        finally:
            self.gpu = before

    @contextmanager
    def graph(
        self, cuda_graph: FakeGraph, pool: Any = None, stream: FakeStream | None = None
    ) -> Iterator[None]:
        """Capture what is given to a stream, once all that was given before has run."""
        assert stream is not None
        for observer in self.observers:
            for other in self.streams:
                observer.synchronized(other)
        cuda_graph.stream = stream
        before, self._current[self.gpu] = self.current, stream
        self.capturing, self.open, self.nodes = {stream.number}, set(), cuda_graph.nodes
        self.log.append(("begin", stream.number))
        try:
            yield
        finally:
            left, self.capturing = self.open - {stream.number}, None
            self.log.append(("end", stream.number))
            if left:  # a capture that fails to end leaves the current stream as it is
                raise RuntimeError(f"streams {sorted(left)} were not joined")
            self._current[self.gpu] = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the stand-in in the place of torch's, whose signatures it must have."""

        def make_stream(device: Any = None, priority: int = 0, **kwargs: Any) -> FakeStream:
            assert not kwargs, kwargs
            return FakeStream(self, self._gpu(device))

        def make_event(
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> FakeEvent:
            return FakeEvent(self, enable_timing, external)

        def make_graph(keep_graph: bool = False) -> FakeGraph:
            return FakeGraph(self)

        def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
            self.log.append(("keep", stream.number))
            for observer in self.observers:
                observer.kept(tensor, stream)

        stand_ins = {
            "Stream": make_stream,
            "Event": make_event,
            "current_stream": self.current_stream,
            "stream": self.stream,
            "set_stream": self.set_stream,
            "device": self.device,
            "graph": self.graph,
            "CUDAGraph": make_graph,
        }
        for name, stand_in in stand_ins.items():
            check_signature(name, stand_in, _REAL[name])
            patch.setattr(torch.cuda, name, stand_in)
        for fake, real in ((FakeStream, "Stream"), (FakeEvent, "Event"), (FakeGraph, "CUDAGraph")):
            for name in (name for name in vars(fake) if not name.startswith("_")):
                check_signature(name, getattr(fake, name), getattr(_REAL[real], name))
        patch.setattr(torch.Tensor, "record_stream", record_stream)


class FakeStream:
    """A stream; its work is done when it is given, though its events may pass later."""

    def __init__(self, cuda: FakeCuda, device: torch.device) -> None:
        self._cuda, self.device = cuda, device
        self.device_index = device.index or 0
        self._passes_at = 0.0  # when all that was given has passed
        with cuda.lock:
            self.number = len(cuda.streams)
            cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded_at is not None, "nobody has recorded this event"
        assert not event.external, "an external event orders nothing in a capture"
        cuda, capturing = self._cuda, self._cuda.capturing
        cuda.log.append(("wait", self.number, event.stream_number))
        assert event.captured == (capturing is not None), "an event from outside the capture"
        if capturing is not None:
            assert event.stream_number in capturing
            capturing.add(self.number)
            cuda.open.discard(event.stream_number)  # what waits for it brings it back
            cuda.open.add(self.number)
        else:
            self._passes_at = max(self._passes_at, event.passes_at)
        for observer in cuda.observers:
            observer.waited(self, event)

    def wait_stream(self, stream: FakeStream) -> None:
        event = FakeEvent(self._cuda)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        assert self._cuda.capturing is None, "a capture cannot be waited for"
        self._cuda.log.append(("synchronize", self.number))
        sleep(max(0.0, self._passes_at - perf_counter()))
        for observer in self._cuda.observers:
            observer.synchronized(self)

    def _last_pass(self) -> float:
        """Return when what was given now will have passed."""
        self._passes_at = max(self._passes_at, perf_counter() + self._cuda.passes_after)
        return self._passes_at


class FakeEvent:
    """An event; passes some time after it is recorded, and in a graph after each replay."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, external: bool = False) -> None:
        self._cuda, self._timing, self.external = cuda, enable_timing, external
        self.recorded_at: int | None = None
        self.stream_number = -1
        self.device: torch.device | None = None
        self._usable = self.captured = False
        self.passes_at = math.inf

    def record(self, stream: FakeStream | None = None) -> None:
        cuda = self._cuda
        stream = stream or cuda.current
        assert self.device in (None, stream.device), "an event belongs to the GPU of its first use"
        cuda.touch(stream)
        with cuda.lock:
            cuda.now += 1
            self.recorded_at = cuda.now
        self.stream_number, self.device = stream.number, stream.device
        self.captured = cuda.capturing is not None
        # In a capture only external events are nodes of the graph, which have a time; torch makes
        # such a node only while its *current* stream is one that captures.
        is_node = self.external and cuda.current.number in (cuda.capturing or ())
        self._usable = self._timing and (not self.captured or is_node)
        self.passes_at = math.inf if self.captured else stream._last_pass()
        if self.captured and is_node:
            cuda.nodes.append(self)
        cuda.log.append(("record", stream.number, self.external))
        for observer in cuda.observers:
            observer.recorded(self, stream)

    def query(self) -> bool:
        assert self.recorded_at is not None, "nobody has recorded this event"
        assert not self.captured or self._usable, "an event of a capture is not asked for"
        self._cuda.log.append(("query", self.stream_number))
        return perf_counter() >= self.passes_at

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            assert event._usable, "no time was noted"
            assert perf_counter() >= event.passes_at, "both events must have passed"
        assert self.device == end_event.device, "events of two GPUs"
        assert self.recorded_at is not None
        assert end_event.recorded_at is not None
        return float(end_event.recorded_at - self.recorded_at)

    def _replayed(self, passes_at: float) -> None:
        """Note the time anew, as the node of a graph."""
        self._cuda.now += 1
        self.recorded_at, self.passes_at = self._cuda.now, passes_at


class FakeGraph:
    """A graph that does nothing but note the time when it is replayed."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.nodes: list[FakeEvent] = []
        self.stream: FakeStream | None = None  # the one that all others joined

    def replay(self) -> None:
        assert self.stream is not None, "nothing was captured"
        stream = self._cuda.current
        self._cuda.log.append(("replay", stream.number))
        for event in self.nodes:
            event._replayed(stream._last_pass())
        end = FakeEvent(self._cuda)  # what was captured is part of this stream from now on
        for observer in self._cuda.observers:
            observer.recorded(end, self.stream)
            observer.waited(stream, end)


class FakeGpu(CudaDevice):
    """A GPU whose memory is the host's.

    Parameters
    ----------
    index
        In its name alone.
    memory
        Number of the memory, for GPUs of their own, which copy messages and have two clocks; with
        None all are slices of one GPU.
    """

    def __init__(self, index: int = 0, memory: int | None = None) -> None:
        super().__init__(torch.device("cuda", index))
        self.torch_device = torch.device("cpu" if memory is None else f"cpu:{memory}")


def named_gpus(*indices: int) -> list[Any]:
    """Return devices that have no more of a GPU than its name and its torch device."""
    return [
        SimpleNamespace(torch_device=torch.device("cuda", i), name=f"cuda:{i}") for i in indices
    ]
