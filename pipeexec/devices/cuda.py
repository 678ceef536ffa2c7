"""`CudaDevice`: a GPU, and CUDA's streams and events behind the interface of `streams`.

Work runs on the host at once and launches its kernels; the host waits only in ``synchronize``.
Not yet measured on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, sleep

import torch

from pipeexec.devices.device import Device, NamedStreams, Values, hold_link
from pipeexec.devices.streams import Begin, Event, Stream, Work


class CudaDevice(NamedStreams):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.torch_device = torch.device(device.type, device.index or 0)
        self.name = str(self.torch_device)

    def _make_stream(self, name: str, blocks: bool) -> Stream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def _prepare_host(self) -> None:
        """Make this GPU, and its compute stream, the current ones of the calling thread.

        CUDA keeps both for each thread. A stream makes itself the current one while it runs work,
        which takes less time on the current GPU.
        """
        torch.cuda.set_stream(_cuda_stream(self, "compute").stream)

    def mark(self) -> Event:
        """Return an event on the compute stream.

        `pipeexec.devices.clocks` aligns those of GPUs. Work submitted later waits for the caller's
        own stream, on which batches are copied to the GPU and parameters may have been changed.

        Returns
        -------
        Event
            The zero of this device's clock.
        """
        compute = _cuda_stream(self, "compute")
        compute.stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        return compute.record()

    def rejoin(self, event: Event, values: Values = ()) -> None:
        """Make the caller's own stream on this GPU wait for an event; the caller does not wait.

        Parameters
        ----------
        event
            Event of a stream of this GPU.
        values
            Tensors that streams of this device made. Their memory is kept until the caller's stream
            has used it.
        """
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self.torch_device)
        current.wait_event(event.order)
        for value in values:
            if value is not None:
                value.record_stream(current)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory.

        The current stream copies; nobody waits.

        Parameters
        ----------
        data
            Tensor of this GPU.

        Returns
        -------
        torch.Tensor
            Tensor of the same shape and type, on the CPU. It has its values once the current stream
            has copied them.
        """
        copy = torch.empty_like(data, device="cpu", pin_memory=torch.cuda.is_available())
        return copy.copy_(data, non_blocking=True)

    def from_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy on this GPU.

        The current stream copies, once the compute stream has run what it was given before: the
        memory is the compute stream's, so that it may be that of tensors freed there.

        Parameters
        ----------
        data
            Tensor on the CPU, or of a peer; copies of pinned memory overlap with computation.

        Returns
        -------
        torch.Tensor
            Tensor of the same shape and type, on this GPU.
        """
        compute = _cuda_stream(self, "compute").stream
        with torch.cuda.stream(compute):
            copy = torch.empty(data.shape, dtype=data.dtype, device=self.torch_device)
        torch.cuda.current_stream(self.torch_device).wait_stream(compute)
        return copy.copy_(data, non_blocking=True)

    def to_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies in the memory of another GPU, or of another slice of this one.

        The current stream copies; nobody waits. The memory is that of a stream of ``peer`` which
        runs nothing: its compute stream may be far behind.

        Parameters
        ----------
        data
            Tensors of this GPU.
        peer
            Device that holds the copies.

        Returns
        -------
        list of torch.Tensor
            Tensors of the same shapes and types, on ``peer``.
        """
        held = _cuda_stream(peer, "held copies")
        with torch.cuda.stream(held.stream):
            copies = [torch.empty(x.shape, dtype=x.dtype, device=peer.torch_device) for x in data]
        torch.cuda.current_stream(self.torch_device).wait_stream(held.stream)
        with held.beside_current(), hold_link(self, peer, data):
            for copy, x in zip(copies, data, strict=True):
                copy.copy_(x, non_blocking=True)
        return copies

    def from_peer(self, data: Sequence[torch.Tensor], peer: Device) -> list[torch.Tensor]:
        """Return copies of memory of another GPU, or slice, on this GPU.

        The current stream copies as in `from_host`. A later `to_peer` may use the memory of
        ``data`` again, and so waits for this copy.

        Parameters
        ----------
        data
            Copies from `to_peer`.
        peer
            Device that holds them.

        Returns
        -------
        list of torch.Tensor
            Tensors of the same shapes and types, on this GPU.
        """
        with _cuda_stream(peer, "returned copies").beside_current():
            copies = super().from_peer(data, peer)
        current = torch.cuda.current_stream(self.torch_device)
        _cuda_stream(peer, "held copies").stream.wait_stream(current)
        return copies

    def wait_for_host(self, event: Event) -> None:
        """Return at once: the host launched the kernels when it submitted the work.

        Parameters
        ----------
        event
            Event of a stream of this GPU.
        """

    def adopt(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the allocator wait for ``stream`` before it uses the memory again.

        The alternative is to hold references until the consumer's event. It needs a host that polls
        events, or a wait on the stream that owns the memory, which is an edge that the graph lacks.
        The allocator polls too, but only when it has to allocate.

        Parameters
        ----------
        tensor
            Tensor from another stream.
        stream
            Stream of this GPU that will use it.
        """
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.stream)


def _cuda_stream(device: Device, name: str) -> CudaStream:
    stream = device.stream(name)
    assert isinstance(stream, CudaStream)
    return stream


class CudaEvent:
    """An event that orders streams and records the time.

    Streams wait for ``order``, and times are read from ``time``; here one event of torch.
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

    ``make_event`` makes the event that `record` records; `pipeexec.executor.step_capture` replaces
    it in a capture.
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

    def run(self, work: Work, events: Sequence[Event], begin: Begin) -> CudaEvent:
        """Launch the kernels of ``work`` after ``events``; return the event after it."""
        for event in events:
            self.wait_event(event)
        begin(self.record())
        self.submit(work)
        return self.record()

    @contextmanager
    def beside_current(self) -> Iterator[None]:
        """Make this the current stream of its GPU in a block; the current GPU stays the same."""
        current = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream), torch.cuda.stream(current):
            yield

    def synchronize(self) -> None:
        """Block the caller until everything has run."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait until everything submitted has run."""
        self.stream.synchronize()
