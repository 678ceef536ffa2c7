"""CUDA's streams and events behind the interface of `pipeexec.devices.streams`.

Work runs on the host at once and launches its kernels; the host waits only in ``synchronize``.
Not yet measured on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep

import torch

from pipeexec.devices.streams import Event, Work


class CudaEvent:
    """An event that orders streams and records the time.

    Attributes
    ----------
    order, time
        torch's events that streams wait for, and that times are read from; here one event.
    """

    __slots__ = ("order", "time")

    def __init__(self) -> None:
        self.order = self.time = torch.cuda.Event(enable_timing=True)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Set the event when everything submitted to ``stream`` before has run."""
        self.order.record(stream)

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event, both on one GPU, good to half a microsecond.

        CUDA returns float32 milliseconds, so times of events hours apart are coarser.
        """
        assert isinstance(base, CudaEvent)
        return float(base.time.elapsed_time(self.time)) * 1e-3

    def is_set(self) -> bool:
        """Return whether everything before this point has run."""
        return bool(self.time.query())

    def wait(self, seconds: float) -> bool:
        """Block the caller until the event is set, at most so long; CUDA has no timed wait."""
        end = perf_counter() + seconds
        while not self.time.query():
            if perf_counter() > end:
                return False
            sleep(20e-6)
        return True


class CapturedEvent(CudaEvent):
    """An event in a CUDA graph, whose time every replay records.

    It consists of two CUDA events. In a capture, an ordinary event orders streams. An external one
    becomes a node of the graph that records the time (`cudaEventRecordExternal`); a stream that
    waited for it would become a node that waits for work outside the graph.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self.order = torch.cuda.Event()
        self.time = torch.cuda.Event(enable_timing=True, external=True)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record the time first, so that work that waits for this event runs after it."""
        self.time.record(stream)
        self.order.record(stream)


class CudaStream:
    """A stream of CUDA.

    Parameters
    ----------
    stream
        Stream of torch.

    Attributes
    ----------
    make_event
        Makes the event that `record` records; `pipeexec.executor.step_capture` replaces it in a
        capture.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.make_event: Callable[[], CudaEvent] = CudaEvent

    def submit(self, work: Work) -> None:
        """Launch the kernels of ``work`` on this stream."""
        caller_stream = torch.cuda.current_stream()
        if caller_stream.device_index != self.stream.device_index:
            with torch.cuda.stream(self.stream):  # also restores the other GPU's current stream
                work()
            return
        # The same on one GPU, in half the time of the context manager: every task does this.
        torch.cuda.set_stream(self.stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(caller_stream)

    def record(self) -> CudaEvent:
        """Return an event that is set when everything submitted before has run."""
        event = self.make_event()
        event.record(self.stream)
        return event

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on wait for ``event``."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.order)

    def event_inside(self) -> tuple[CudaEvent, Work]:
        """Return an event within work, and the function by which work records it."""
        event = self.make_event()
        return event, partial(event.record, self.stream)

    def run(self, work: Work, events: Sequence[Event] = ()) -> tuple[CudaEvent, CudaEvent]:
        """Launch the kernels of ``work`` after ``events``; return the events around it."""
        for event in events:
            self.wait_event(event)
        start = self.record()
        self.submit(work)
        return start, self.record()

    def synchronize(self) -> None:
        """Block the caller until everything has run."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait until everything submitted has run."""
        self.stream.synchronize()
