"""CUDA's own streams and events behind the interface of `pipeexec.devices.streams`.

Work runs on the host at once and launches its kernels; the host waits in ``synchronize`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep

import torch

from pipeexec.devices.streams import Event, Work

__all__ = ["CapturedEvent", "CudaEvent", "CudaStream"]


class CudaEvent:
    """An event that orders streams and tells the time."""

    __slots__ = ("order", "time")

    def __init__(self) -> None:
        self.order = self.time = torch.cuda.Event(enable_timing=True)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Let the event pass when everything given to ``stream`` before has run."""
        self.order.record(stream)

    def seconds_since(self, base: Event) -> float:
        """Return seconds from ``base`` to this event, both on one GPU, good to half a microsecond.

        A float of milliseconds, so events hours apart would be told no better than that.
        """
        assert isinstance(base, CudaEvent)
        return float(base.time.elapsed_time(self.time)) * 1e-3

    def passed(self) -> bool:
        """Return whether everything before this point has run."""
        return bool(self.time.query())

    def wait(self, seconds: float) -> bool:
        """Block the caller until this passes, for so long at most; CUDA has no timed wait."""
        end = perf_counter() + seconds
        while not self.time.query():
            if perf_counter() > end:
                return False
            sleep(20e-6)
        return True


class CapturedEvent(CudaEvent):
    """An event in a CUDA graph, of which every replay tells the time.

    Two of CUDA's: in a capture, an event either orders streams or, as an external one, becomes a
    node of the graph that notes the time (`cudaEventRecordExternal`); waiting for an external one
    would be a node that waits for someone outside.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self.order = torch.cuda.Event()
        self.time = torch.cuda.Event(enable_timing=True, external=True)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Note the time first, so that what waits for this event comes after the note."""
        self.time.record(stream)
        self.order.record(stream)


class CudaStream:
    """A stream of CUDA.

    Parameters
    ----------
    stream
        torch's.

    Attributes
    ----------
    make_event
        What `record` records; `pipeexec.executor.cuda_graph` changes it while it captures.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.make_event: Callable[[], CudaEvent] = CudaEvent

    def submit(self, work: Work) -> None:
        """Launch the kernels of ``work`` on this stream."""
        before = torch.cuda.current_stream()
        if before.device_index != self.stream.device_index:
            with torch.cuda.stream(self.stream):  # which also puts back that GPU's own stream
                work()
            return
        # As that does on one GPU, in half the time: this is done for every task.
        torch.cuda.set_stream(self.stream)
        try:
            work()
        finally:
            torch.cuda.set_stream(before)

    def record(self) -> CudaEvent:
        """Return an event that passes when everything given before has run."""
        event = self.make_event()
        event.record(self.stream)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on wait for ``event``."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.order)

    def milestone(self) -> tuple[CudaEvent, Work]:
        """Return an event within work, and what that work calls to let it pass."""
        event = self.make_event()
        return event, partial(event.record, self.stream)

    def run(self, work: Work, after: Sequence[Event] = ()) -> tuple[CudaEvent, CudaEvent]:
        """Launch the kernels of ``work`` behind these events; return those around it."""
        for event in after:
            self.wait_event(event)
        began = self.record()
        self.submit(work)
        return began, self.record()

    def synchronize(self) -> None:
        """Block the caller until everything has run."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for what was given."""
        self.stream.synchronize()
